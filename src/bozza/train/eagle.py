"""Train a head that guesses from features of the target and from its own output, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bozza.models.eagle import EagleHead
from bozza.train.data import Conversation
from bozza.train.features import Features
from bozza.train.loop import Agreement, Recipe, Trainer
from bozza.train.unrolled import unroll

DECAY = 0.8  # weight of each further step in the loss (Li et al., 2025, section 3.2)
DEPTHS = 5  # of the agreement


class Batch(NamedTuple):
    """Several conversations, filled up to the same length."""

    ids: Tensor  # [sequences, length], the token after each slot
    features: Tensor  # [sequences, length, width]
    due: Tensor  # bool [sequences, length]: slots whose guess belongs to the answer
    law_ids: Tensor  # [due slots, kept], draft tokens
    law_probs: Tensor  # of these; a slot whose likely tokens are no draft tokens has none
    labels: Tensor  # [due slots], the token that really came, as a target id


def frequent_tokens(conversations: Sequence[Conversation], count: int, always: Sequence[int]) -> tuple[Tensor, float]:
    """The `count` most frequent tokens of all answers, rising, and which share of these answers they cover."""
    counts = Counter[int]()
    for conversation in conversations:
        counts.update(conversation.tokens[conversation.prompt_len :])
    chosen = dict.fromkeys(always)
    # Of equally rare tokens the lower id: tokenizers number common tokens first.
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= count:
            break
        chosen[token] = None
    covered = sum(counts[token] for token in chosen) / max(sum(counts.values()), 1)
    return torch.tensor(sorted(chosen)), covered


class EagleTrainer(Trainer):
    """Trains a head; its embedding and output rows stay the target's. See `Trainer` for the arguments."""

    def __init__(self, head: EagleHead, features: Features, recipe: Recipe, checkpoint: Path) -> None:
        self.head = head
        head.lm_head.weight.requires_grad_(False)
        head.embed[0].requires_grad_(False)
        self._draft_ids = torch.full((head.vocab_size,), -1)
        self._draft_ids[head.targets.cpu()] = torch.arange(len(head.targets))
        super().__init__(head, features, recipe, checkpoint)

    def loss(self, chosen: Sequence[int]) -> Tensor:
        """Cross-entropy against the target's law on the draft vocabulary, over all steps."""
        batch = self.batch(chosen)
        total = torch.zeros((), device=self._device)
        weights = 0.0
        with torch.autocast(self._device.type, torch.bfloat16):
            outputs = unroll(self.head, batch.ids, batch.features, self.recipe.steps)
        slots = torch.arange(batch.ids.shape[1], device=self._device).expand_as(batch.ids)[batch.due]
        for step, hidden in enumerate(outputs):
            # A half of the slots is enough for the later steps, and saves a third of the time.
            real = slots >= step if step == 0 else (slots >= step) & ((slots + step + self.updates) % 2 == 0)
            if not real.any():
                continue
            with torch.autocast(self._device.type, torch.bfloat16):
                logits = self.head.logits(hidden[batch.due][real]).float()
            probs = batch.law_probs[real]
            likely = logits.gather(1, batch.law_ids[real])
            entropy = probs.sum(dim=1) * logits.logsumexp(dim=1) - (probs * likely).sum(dim=1)
            total = total + DECAY**step * entropy.mean()
            weights += DECAY**step
        return total / weights

    @torch.inference_mode()
    def agreement(self, most: int = 60) -> Agreement:
        """On held-out answers, how long a chain of the head's first guesses agrees with what came."""
        right, tried = [0] * DEPTHS, [0] * DEPTHS
        for chosen in self._pack(self.held_out[:most]):
            batch = self.batch(chosen)
            with torch.autocast(self._device.type, torch.bfloat16):
                outputs = unroll(self.head, batch.ids, batch.features, DEPTHS)
            labels = torch.full_like(batch.ids, -1)
            labels[batch.due] = batch.labels
            alive = batch.due.clone()
            for step, hidden in enumerate(outputs):
                with torch.autocast(self._device.type, torch.bfloat16):
                    guesses = self.head.targets[self.head.logits(hidden).argmax(dim=2)]
                alive = functional.pad(alive[:, :-1], (1, 0)) & batch.due if step else alive
                tried[step] += int(alive.sum())
                alive &= guesses == labels
                right[step] += int(alive.sum())
        return Agreement.of(right, tried)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Lay some conversations side by side."""
        conversations = [self._features.conversations[index] for index in chosen]
        length = max(len(conversation.tokens) for conversation in conversations) - 1
        width = self._features.hidden.shape[1]
        ids = torch.zeros(len(chosen), length, dtype=torch.int64)
        features = torch.zeros(len(chosen), length, width, dtype=torch.bfloat16)
        due = torch.zeros(len(chosen), length, dtype=torch.bool)
        laws: list[tuple[Tensor, Tensor]] = []
        labels: list[int] = []
        for line, (index, conversation) in enumerate(zip(chosen, conversations, strict=True)):
            tokens, slots = conversation.tokens, len(conversation.tokens) - 1
            ids[line, :slots] = torch.tensor(tokens[1:])
            features[line, :slots] = self._features.features(index)[:-1]
            low, high = max(conversation.prompt_len - 2, 0), slots - 1  # slot s guesses token s + 2
            due[line, low:high] = True
            law_ids, law_probs = self._features.laws(index)
            laws.append((law_ids[low + 1 : high + 1], law_probs[low + 1 : high + 1]))
            labels += tokens[low + 2 : high + 2]
        law_ids, law_probs = (torch.cat(parts) for parts in zip(*laws, strict=True))
        law_ids = self._draft_ids[law_ids]
        law_probs = law_probs.masked_fill(law_ids < 0, 0.0)
        law_probs /= law_probs.sum(dim=1, keepdim=True).clamp(min=1e-3)
        batch = Batch(ids, features, due, law_ids.clamp_(min=0), law_probs, torch.tensor(labels))
        return Batch(*(part.to(self._device) for part in batch))
