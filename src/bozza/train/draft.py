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
from bozza.train.lines import Frequent, lay_out
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
        self._frequent = Frequent(targets, head_rows(model, targets), model.config.vocab_size)
        super().__init__(model, features, recipe, checkpoint)

    def loss(self, chosen: Sequence[int]) -> Tensor:
        """Cross-entropy against the target's law on the frequent tokens, after each token of the answers."""
        lines = lay_out(self._features, chosen, self._device)
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = self._frequent.logits(self._hidden(lines.tokens)[lines.due]).float()
        return self._frequent.entropy(logits, lines.law_ids[lines.due], lines.law_probs[lines.due])

    @torch.inference_mode()
    def agreement(self, most: int = 60) -> Agreement:
        """On held-out answers, how long a chain of the model's first guesses agrees with what came."""
        right, tried = [0] * DEPTHS, [0] * DEPTHS
        for chosen in self._pack(self.held_out[:most]):
            lines = lay_out(self._features, chosen, self._device)
            with torch.autocast(self._device.type, torch.bfloat16):
                logits = self._frequent.logits(self._hidden(lines.tokens))
            hits = self._frequent.targets[logits.argmax(dim=2)] == lines.next_tokens
            alive = lines.due
            for step in range(DEPTHS):
                alive = functional.pad(alive[:, :-1], (1, 0)) & lines.due if step else alive
                tried[step] += int(alive.sum())
                alive = alive & hits
                right[step] += int(alive.sum())
        return Agreement.of(right, tried)

    def _hidden(self, ids: Tensor) -> Tensor:
        """[lines, length, size], after the final norm."""
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden
