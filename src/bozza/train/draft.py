"""Distil a small decoder with the target's vocabulary, for targets that have no small sibling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bozza.models.eagle import head_rows
from bozza.train.features import Features
from bozza.train.loop import Agreement, Recipe, Trainer

DEPTHS = 5  # of the agreement


def fewer_layers(target: Any, layers: int) -> Any:
    """A float32 model of the target's kind with some of its layers, the first and the last among them.

    Embedding, output rows and final norm are the target's; rows are not trained.
    """
    text = target.config.get_text_config(decoder=True)
    deep = text.num_hidden_layers
    chosen = [round(place * (deep - 1) / max(layers - 1, 1)) for place in range(layers)]
    config = copy.deepcopy(text)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in chosen]
    small = AutoModelForCausalLM.from_config(config).float().to(target.device)
    state = {key: tensor for key, tensor in target.state_dict().items() if ".layers." not in key}
    for place, layer in enumerate(chosen):
        prefix = f".layers.{layer}."
        state |= {
            key.replace(prefix, f".layers.{place}."): tensor
            for key, tensor in target.state_dict().items()
            if prefix in key
        }
    small.load_state_dict(state)
    small.get_input_embeddings().requires_grad_(False)
    small.get_output_embeddings().requires_grad_(False)
    return small


class DraftTrainer(Trainer):
    """Trains a small decoder on the target's laws, over its most frequent tokens. See `Trainer` for the arguments.

    Args:
        targets: int64 [tokens], over which the laws are compared.
    """

    def __init__(self, model: Any, targets: Tensor, features: Features, recipe: Recipe, checkpoint: Path) -> None:
        self.model = model
        self._targets = targets
        self._rows = head_rows(model, targets).detach()
        self._place = torch.full((model.config.vocab_size,), -1)
        self._place[targets] = torch.arange(len(targets))
        super().__init__(model, features, recipe, checkpoint)

    def loss(self, chosen: Sequence[int]) -> Tensor:
        """Cross-entropy against the target's law on the frequent tokens, after each token of the answers."""
        ids, due = self._batch(chosen)
        laws = [self._features.laws(index) for index in chosen]
        places = [self._due(index) for index in chosen]
        law_ids = torch.cat([law[0][place] for law, place in zip(laws, places, strict=True)])
        probs = torch.cat([law[1][place] for law, place in zip(laws, places, strict=True)])
        law_ids = self._place[law_ids]
        probs = probs.masked_fill(law_ids < 0, 0.0)
        probs /= probs.sum(dim=1, keepdim=True).clamp(min=1e-3)
        law_ids, probs = law_ids.clamp(min=0).to(self._device), probs.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = functional.linear(self._hidden(ids)[due], self._rows).float()
        likely = logits.gather(1, law_ids)
        return (probs.sum(dim=1) * logits.logsumexp(dim=1) - (probs * likely).sum(dim=1)).mean()

    @torch.inference_mode()
    def agreement(self, most: int = 60) -> Agreement:
        """On held-out answers, how long a chain of the model's first guesses agrees with what came."""
        right, tried = [0] * DEPTHS, [0] * DEPTHS
        for chosen in self._pack(self.held_out[:most]):
            ids, due = self._batch(chosen)
            with torch.autocast(self._device.type, torch.bfloat16):
                guesses = self._targets.to(self._device)[functional.linear(self._hidden(ids), self._rows).argmax(dim=2)]
            came = functional.pad(ids[:, 1:], (0, 1), value=-1)
            alive = due.clone()
            for step in range(DEPTHS):
                alive = functional.pad(alive[:, :-1], (1, 0)) & due if step else alive
                tried[step] += int(alive.sum())
                alive &= guesses == came
                right[step] += int(alive.sum())
        return Agreement.of(right, tried)

    def _hidden(self, ids: Tensor) -> Tensor:
        """[sequences, length, size], after the final norm."""
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def _due(self, index: int) -> slice:
        """The tokens of a conversation after which one of its answer comes."""
        conversation = self._features.conversations[index]
        return slice(max(conversation.prompt_len - 1, 0), len(conversation.tokens) - 1)

    def _batch(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids [sequences, length] and which of them are due; what fills up comes last, so that none sees it."""
        conversations = [self._features.conversations[index] for index in chosen]
        length = max(len(conversation.tokens) for conversation in conversations)
        ids = torch.zeros(len(chosen), length, dtype=torch.int64)
        due = torch.zeros(len(chosen), length, dtype=torch.bool)
        for line, (index, conversation) in enumerate(zip(chosen, conversations, strict=True)):
            ids[line, : len(conversation.tokens)] = torch.tensor(conversation.tokens)
            due[line, self._due(index)] = True
        return ids.to(self._device), due.to(self._device)
