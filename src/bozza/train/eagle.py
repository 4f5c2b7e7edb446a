"""Train an EAGLE head on features of the target."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bozza.errors import ConfigError
from bozza.models.eagle import EagleHead
from bozza.train.data import Conversation
from bozza.train.features import Features
from bozza.train.unrolled import unroll

DECAY = 0.8  # weight of each further step in the loss (Li et al., 2025, section 3.2)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What training depends on beside data and target."""

    draft_vocab: int = 8192
    layers: int = 1
    steps: int = 3  # unrolled
    epochs: int = 4
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.03  # share of all updates
    held_out: float = 0.02  # share of the conversations
    seed: int = 0


class Batch(NamedTuple):
    """Several conversations, filled up to the same length."""

    ids: Tensor  # [sequences, length], the token after each slot
    features: Tensor  # [sequences, length, width]
    due: Tensor  # bool [sequences, length]: slots whose guess belongs to the answer
    law_ids: Tensor  # [due slots, kept], draft tokens
    law_probs: Tensor  # of these; a slot whose likely tokens are no draft tokens has none
    labels: Tensor  # [due slots], the token that really came, as a target id


class Agreement(NamedTuple):
    """How often each depth's first guess was right, given that all before it were; and what a chain commits."""

    depths: list[float]
    per_pass: float


def frequent_tokens(conversations: Sequence[Conversation], count: int, always: Sequence[int]) -> tuple[Tensor, float]:
    """The `count` most frequent tokens, rising, and which share of all answer tokens they cover."""
    counts = Counter[int]()
    for conversation in conversations:
        counts.update(conversation.tokens[conversation.prompt_len :])
    chosen = dict.fromkeys(always)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= count:
            break
        chosen[token] = None
    covered = sum(counts[token] for token in chosen) / max(sum(counts.values()), 1)
    return torch.tensor(sorted(chosen)), covered


class EagleTrainer:
    """Owns head, optimiser and position; saves and resumes all of it.

    Args:
        head: to be trained; its embedding and head rows stay as they are.
        features: of all conversations.
        recipe: how.
        checkpoint: where progress is kept.
    """

    def __init__(self, head: EagleHead, features: Features, recipe: Recipe, checkpoint: Path) -> None:
        self.head = head
        self.recipe = recipe
        self.updates = 0
        self._features = features
        self._checkpoint = checkpoint
        count = len(features.conversations)
        held = max(1, round(count * recipe.held_out))
        self.train_set, self.held_out = list(range(count - held)), list(range(count - held, count))
        self._draft_ids = torch.full((head.vocab_size,), -1)
        self._draft_ids[head.targets] = torch.arange(len(head.targets))
        head.lm_head.weight.requires_grad_(False)
        head.embed[0].requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            [weight for weight in head.parameters() if weight.requires_grad],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
        )
        self._per_epoch = len(self._epoch(0))
        self.total = self._per_epoch * recipe.epochs
        if checkpoint.exists():
            self._resume()

    def run(self, on_update: Callable[[int, float], None], interval: int, until: int | None = None) -> None:
        """Train to the end, or to update `until`; save every `interval` updates and at the end."""
        until = self.total if until is None else min(until, self.total)
        while self.updates < until:
            epoch, place = divmod(self.updates, self._per_epoch)
            for chosen in self._epoch(epoch)[place:]:
                loss = self._update(self.batch(chosen))
                self.updates += 1
                on_update(self.updates, loss)
                if self.updates % interval == 0 or self.updates == until:
                    self.save()
                if self.updates == until:
                    return

    def _update(self, batch: Batch) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule()
        loss = self.loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self._optimizer.step()
        return float(loss)

    def _schedule(self) -> float:
        """Linear warm-up, then a cosine to a twentieth."""
        warm = max(1, round(self.total * self.recipe.warmup))
        if self.updates < warm:
            return (self.updates + 1) / warm
        done = (self.updates - warm) / max(1, self.total - warm)
        return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done))

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy against the target's law on the draft vocabulary, over all steps."""
        total = torch.zeros(())
        weights = 0.0
        with torch.autocast("cpu", torch.bfloat16):
            outputs = unroll(self.head, batch.ids, batch.features, self.recipe.steps)
        slots = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)[batch.due]
        for step, hidden in enumerate(outputs):
            # A half of the slots is enough for the later steps, and saves a third of the time.
            real = slots >= step if step == 0 else (slots >= step) & ((slots + step + self.updates) % 2 == 0)
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.head.logits(hidden[batch.due][real]).float()
            probs = batch.law_probs[real]
            chosen = logits.gather(1, batch.law_ids[real])
            entropy = probs.sum(dim=1) * logits.logsumexp(dim=1) - (probs * chosen).sum(dim=1)
            total = total + DECAY**step * entropy.mean()
            weights += DECAY**step
        return total / weights

    @torch.inference_mode()
    def agreement(self, steps: int = 5, most: int = 60) -> Agreement:
        """On held-out answers, how long a chain of the head's first guesses agrees with what came."""
        right, tried = [0] * steps, [0] * steps
        for chosen in self._pack(self.held_out[:most]):
            batch = self.batch(chosen)
            with torch.autocast("cpu", torch.bfloat16):
                outputs = unroll(self.head, batch.ids, batch.features, steps)
            labels = torch.full_like(batch.ids, -1)
            labels[batch.due] = batch.labels
            alive = batch.due.clone()
            for step, hidden in enumerate(outputs):
                with torch.autocast("cpu", torch.bfloat16):
                    guesses = self.head.targets[self.head.logits(hidden).argmax(dim=2)]
                alive = torch.nn.functional.pad(alive[:, :-1], (1, 0)) & batch.due if step else alive
                tried[step] += int(alive.sum())
                alive &= guesses == labels
                right[step] += int(alive.sum())
        depths = [hits / max(count, 1) for hits, count in zip(right, tried, strict=True)]
        return Agreement(depths, 1.0 + sum(math.prod(depths[: depth + 1]) for depth in range(steps)))

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
        return Batch(ids, features, due, law_ids.clamp_(min=0), law_probs, torch.tensor(labels))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The batches of one epoch: neighbours in length share one, in an order of their own each time."""
        chance = random.Random(f"{self.recipe.seed}/{epoch}")
        batches = self._pack(self.train_set, chance)
        chance.shuffle(batches)
        return batches

    def _pack(self, indices: Sequence[int], chance: random.Random | None = None) -> list[list[int]]:
        jitter = chance.random if chance else lambda: 0.0
        lengths = {index: len(self._features.conversations[index].tokens) for index in indices}
        ordered = sorted(indices, key=lambda index: lengths[index] + 24 * jitter())
        batches: list[list[int]] = [[]]
        for index in ordered:
            longest = max([lengths[index], *(lengths[other] for other in batches[-1])])
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.recipe.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def save(self) -> None:
        """Write the checkpoint; the old one stands until the new one is whole."""
        scratch = self._checkpoint.with_suffix(".tmp")
        state = {
            "recipe": asdict(self.recipe),
            "updates": self.updates,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ConfigError(f"{self._checkpoint} was made with another recipe: use another folder, or delete it")
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
