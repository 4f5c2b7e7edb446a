"""The training loop that all kinds share: batches, schedule, checkpoints that a killed run goes on from."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bozza.errors import ConfigError
from bozza.train.features import Features


@dataclass(frozen=True, slots=True)
class Recipe:
    """What training depends on beside data and target."""

    draft_vocab: int = 8192
    layers: int = 1
    steps: int = 3  # unrolled
    epochs: int = 8
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.03  # share of all updates
    held_out: float = 0.02  # share of the conversations
    seed: int = 0


class Agreement(NamedTuple):
    """How often each depth's first guess was right, given that all before it were; and what a chain commits."""

    depths: list[float]
    per_pass: float

    @classmethod
    def of(cls, right: Sequence[int], tried: Sequence[int]) -> Agreement:
        """From counts for each depth."""
        depths = [hits / max(count, 1) for hits, count in zip(right, tried, strict=True)]
        return cls(depths, 1.0 + sum(math.prod(depths[: depth + 1]) for depth in range(len(depths))))


class Trainer(ABC):
    """Owns module, optimiser and position; saves and resumes all of it.

    Args:
        module: to be trained, as far as its weights require gradients.
        features: of all conversations; the last ones are held out.
        recipe: how.
        checkpoint: where progress is kept.

    Raises:
        ConfigError: the checkpoint is of another recipe or size.
    """

    def __init__(self, module: nn.Module, features: Features, recipe: Recipe, checkpoint: Path) -> None:
        self.recipe = recipe
        self.updates = 0
        self._module = module
        self._device = next(module.parameters()).device
        self._features = features
        self._checkpoint = checkpoint
        count = len(features.conversations)
        held = max(1, round(count * recipe.held_out))
        self.train_set, self.held_out = list(range(count - held)), list(range(count - held, count))
        self._optimizer = torch.optim.AdamW(
            list(self._trained().values()),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
        )
        self._per_epoch = len(self._epoch(0))
        self.total = self._per_epoch * recipe.epochs
        if checkpoint.exists():
            self._resume()

    @abstractmethod
    def loss(self, chosen: Sequence[int]) -> Tensor:
        """Of some conversations."""

    @abstractmethod
    def agreement(self, most: int = 60) -> Agreement:
        """On at most so many held-out conversations."""

    def run(self, on_update: Callable[[int, float], None], interval: int, until: int | None = None) -> None:
        """Train to the end, or to update `until`; save every `interval` updates and at the end."""
        until = self.total if until is None else min(until, self.total)
        while self.updates < until:
            epoch, place = divmod(self.updates, self._per_epoch)
            for chosen in self._epoch(epoch)[place:]:
                loss = self._update(chosen)
                self.updates += 1
                if self.updates % interval == 0 or self.updates == until:
                    self.save()
                on_update(self.updates, loss)
                if self.updates == until:
                    return

    def _update(self, chosen: Sequence[int]) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._schedule()
        loss = self.loss(chosen)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 0.5)
        self._optimizer.step()
        return loss.item()

    def _schedule(self) -> float:
        """Linear warm-up, then a cosine to a twentieth."""
        warm = max(1, round(self.total * self.recipe.warmup))
        if self.updates < warm:
            return (self.updates + 1) / warm
        done = (self.updates - warm) / max(1, self.total - warm)
        return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The batches of one epoch: neighbours in length share one, in an order of their own each time."""
        chance = random.Random(f"{self.recipe.seed}/{epoch}")
        # The order within a length differs, the number of batches does not: an interrupted epoch must line up.
        batches = self._pack(self.train_set, chance)
        chance.shuffle(batches)
        return batches

    def _pack(self, indices: Sequence[int], chance: random.Random | None = None) -> list[list[int]]:
        """Conversations of one batch, filled up to the longest of them, have at most `batch_tokens` tokens."""
        lengths = {index: len(self._features.conversations[index].tokens) for index in indices}
        shuffled = list(indices)
        if chance is not None:
            chance.shuffle(shuffled)
        ordered = sorted(shuffled, key=lambda index: lengths[index])
        batches: list[list[int]] = [[]]
        for index in ordered:
            if batches[-1] and lengths[index] * (len(batches[-1]) + 1) > self.recipe.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def save(self) -> None:
        """Write the checkpoint; the old one stands until the new one is whole."""
        scratch = self._checkpoint.with_suffix(".tmp")
        state = {
            "recipe": asdict(self.recipe),
            "updates": self.updates,
            "module": {name: weight.data for name, weight in self._trained().items()},
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ConfigError(f"{self._checkpoint} was made with another recipe: use another folder, or delete it")
        trained = self._trained()
        kept = {name: state["module"][name] for name in trained.keys() & state["module"].keys()}
        same = {name: weight.shape for name, weight in trained.items()} == {name: kept[name].shape for name in kept}
        if not same or len(state["optimizer"]["state"]) > len(trained):
            raise ConfigError(f"{self._checkpoint} is of another size: use another folder, or delete it")
        self._module.load_state_dict(kept, strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    def _trained(self) -> dict[str, nn.Parameter]:
        """What training changes. Rows of the target are not among them: a longer run may have chosen other ones."""
        return {name: weight for name, weight in self._module.named_parameters() if weight.requires_grad}
