"""`bozza train eagle`: data, features, training and the finished head, each part going on where it was left."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import bozza
from bozza.errors import ConfigError
from bozza.llm import LLM
from bozza.models.eagle import EagleHead, HeadShape, start_from_target
from bozza.models.heads import layer_like, save_head
from bozza.models.loading import end_ids
from bozza.train.data import BATCH, Conversation, ConversationFile, Synthesis
from bozza.train.eagle import EagleTrainer, frequent_tokens
from bozza.train.features import Features
from bozza.train.loop import Agreement, Recipe

INTERVAL = 50  # updates between two checkpoints


class Watcher(Protocol):
    """Hears how far a run has come."""

    def part(self, name: str, done: int, total: int) -> None:
        """So much of a part is done; `total` of it is all."""
        ...

    def agreement(self, agreement: Agreement) -> None:
        """How well the head guesses held-out text by now."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What a user asks for."""

    model: str
    out: Path
    tokens: int = 600_000
    seed: int = 0
    prompts: tuple[str, ...] | None = None
    widen: int = 2
    recipe: Recipe = field(default_factory=Recipe)


def train_eagle(order: Order, watcher: Watcher) -> dict[str, Any]:
    """Train a head for a target, or go on with it; returns its training card.

    In the folder afterwards: the head (`eagle:FOLDER` drafts with it), `card.json`, and under `work` what a longer
    run could use again: conversations, features, checkpoint.

    Raises:
        ConfigError: the folder holds another run.
        ModelError: the model cannot be had.
        PromptError: the model cannot write conversations by itself.
    """
    clock = _Clock(order.out / "work" / "seconds.json")
    llm = LLM(order.model, policy="off", max_batch=BATCH, token_budget=1024)
    target = llm.model.requires_grad_(False)
    with clock.part("data"):
        data = _data(order, llm, watcher)
    layers = features_read(target.config.get_text_config(decoder=True).num_hidden_layers)
    with clock.part("features"):
        features = _features(order, llm, data, layers, watcher)
    targets, coverage = frequent_tokens(data, order.recipe.draft_vocab, sorted(end_ids(target)))
    torch.manual_seed(order.seed)
    shape = HeadShape(
        layer_like(target, order.recipe.layers, order.widen),
        layers,
        target.config.get_text_config(decoder=True).hidden_size,
        len(targets),
    )
    head = EagleHead(shape, target.get_input_embeddings(), targets).to(target.device)
    start_from_target(head, target)
    with clock.part("training"):
        agreement = _train(order, head, features, watcher)
    save_head(head, order.out, llm.name, own_rows=False)
    card = {
        "target": llm.name,
        "bozza": bozza.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tokens": int(features.starts[-1]),
        "conversations": len(data),
        "prompts": "written by the target" if order.prompts is None else f"{len(order.prompts)} of a file",
        "seed": order.seed,
        "recipe": asdict(order.recipe) | {"widen": order.widen},
        "parameters": sum(w.numel() for name, w in head.named_parameters() if name != "lm_head.weight"),
        "draft_vocabulary": {"tokens": len(targets), "covers": round(coverage, 4)},
        "minutes": {name: round(seconds / 60, 1) for name, seconds in clock.seconds.items()},
        "held_out": {
            "agreement_by_depth": [round(depth, 3) for depth in agreement.depths],
            "chain_tokens_per_pass": round(agreement.per_pass, 3),
        },
    }
    (order.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    return card


def features_read(layers: int) -> tuple[int, ...]:
    """Low, middle and the last layer's input, so that the head can start as that layer (`start_from_target`)."""
    return tuple(sorted({min(2, layers - 1), layers // 2, layers - 1}))


def _data(order: Order, llm: LLM, watcher: Watcher) -> list[Conversation]:
    origin = {"model": llm.name, "seed": order.seed, "prompts": None if order.prompts is None else len(order.prompts)}
    file = ConversationFile(order.out / "work" / "conversations.jsonl", origin)
    watcher.part("conversations", 0, order.tokens)
    Synthesis(llm, order.seed, order.prompts).run(
        file, order.tokens, lambda done: watcher.part("conversations", done, order.tokens)
    )
    data = file.dataset(order.tokens)
    if len(data) < 10:
        raise ConfigError(f"{len(data)} conversations are too few to train on: give more prompts or tokens")
    return data


def _features(order: Order, llm: LLM, data: list[Conversation], layers: tuple[int, ...], watcher: Watcher) -> Features:
    size = llm.model.config.get_text_config(decoder=True).hidden_size
    features = Features(order.out / "work" / "features", data, layers, size)
    total = int(features.starts[-1])
    watcher.part("features", int(features.starts[features.done]), total)
    features.fill(llm.runner, lambda done: watcher.part("features", done, total))
    return features


def _train(order: Order, head: EagleHead, features: Features, watcher: Watcher) -> Agreement:
    trainer = EagleTrainer(head, features, order.recipe, order.out / "work" / "checkpoint.pt")

    def on_update(updates: int, loss: float) -> None:
        watcher.part("training", updates, trainer.total)
        if updates % INTERVAL == 0 and updates < trainer.total:
            watcher.agreement(trainer.agreement())

    watcher.part("training", trainer.updates, trainer.total)
    trainer.run(on_update, INTERVAL)
    agreement = trainer.agreement(most=200)
    watcher.agreement(agreement)
    return agreement


class _Clock:
    """Wall time of each part over all runs of a folder; a run that is killed loses what its part had taken."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}

    def part(self, name: str) -> _Part:
        return _Part(self, name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self.seconds))


class _Part:
    def __init__(self, clock: _Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *problem: object) -> None:
        self._clock.add(self._name, time.perf_counter() - self._started)
