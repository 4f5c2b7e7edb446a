"""`bozza train`: data, features, training and the finished drafter, each part going on where it was left."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import bozza
from bozza.errors import ConfigError, ModelError
from bozza.llm import LLM
from bozza.models.eagle import EagleHead, HeadShape, head_rows, start_from_target
from bozza.models.heads import layer_like, save_head
from bozza.models.loading import end_ids, load
from bozza.models.mtp import hidden_layer, sequential_heads
from bozza.models.mtp_files import save_mtp
from bozza.train.data import BATCH, Conversation, ConversationFile, Synthesis
from bozza.train.draft import DraftTrainer, fewer_layers
from bozza.train.eagle import EagleTrainer, frequent_tokens
from bozza.train.features import Features
from bozza.train.lines import Frequent
from bozza.train.loop import Agreement, Recipe, Trainer
from bozza.train.mtp import MtpTrainer, start_modules

INTERVAL = 50  # updates between two checkpoints
LEAST = 10  # conversations


class Watcher(Protocol):
    """Hears how far a run has come."""

    def part(self, name: str, done: int, total: int) -> None:
        """So much of a part is done; `total` of it is all."""
        ...

    def agreement(self, agreement: Agreement) -> None:
        """How well the drafter guesses held-out text by now."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What a user asks for."""

    model: str
    out: Path
    tokens: int
    seed: int = 0
    prompts: tuple[str, ...] | None = None
    widen: int = 2  # eagle: width of the feed-forward part, times the target's
    recipe: Recipe = field(default_factory=Recipe)


class Run:
    """One run in a folder. Under `work` is what a longer run could use again: conversations, features, checkpoint.

    Raises:
        ModelError: the model cannot be had.
    """

    def __init__(self, order: Order, watcher: Watcher) -> None:
        self.order = order
        self.work = order.out / "work"
        self._watcher = watcher
        self._seconds = _read_seconds(self.work / "seconds.json")
        loaded = load(order.model)  # its weights are learned from, so they are left as they are
        self.llm = LLM(loaded.model, tokenizer=loaded.tokenizer, policy="off", max_batch=BATCH, token_budget=1024)
        self.target = self.llm.model.requires_grad_(False)
        self.text = self.target.config.get_text_config(decoder=True)

    def data(self) -> list[Conversation]:
        """The conversations; those that are missing are written.

        Raises:
            ConfigError: the folder holds those of another run, or there are too few.
            PromptError: the model cannot write conversations by itself.
        """
        order = self.order
        prompts = None if order.prompts is None else hashlib.sha256("\n".join(order.prompts).encode()).hexdigest()[:16]
        origin = {"model": self.llm.name, "seed": order.seed, "prompts": prompts}
        file = ConversationFile(self.work / "conversations.jsonl", origin)
        with self._timed("data"):
            Synthesis(self._writer(file), order.seed, order.prompts).run(
                file, order.tokens, lambda done: self._watcher.part("conversations", done, order.tokens)
            )
        data = file.dataset(order.tokens)
        if len(data) < LEAST:
            raise ConfigError(f"{len(data)} conversations are too few to train on: give more prompts or tokens")
        return data

    def _writer(self, file: ConversationFile) -> LLM:
        """The same model with packed weights, compiled where that can be done; unless all is written already."""
        if sum(len(each.tokens) for each in file.dataset(self.order.tokens)) >= self.order.tokens:
            return self.llm
        options: dict[str, Any] = {"policy": "off", "max_batch": BATCH, "token_budget": 512}
        try:
            return LLM(self.order.model, compile=True, **options)
        except ModelError:
            return LLM(self.order.model, **options)

    def features(self, data: list[Conversation], layers: Sequence[int]) -> Features:
        """The target's hidden states and laws; those that are missing are computed."""
        features = Features(self.work / "features", data, layers, self.text.hidden_size)
        total = int(features.starts[-1])
        self._watcher.part("features", int(features.starts[features.done]), total)
        with self._timed("features"):
            features.fill(self.llm.runner, lambda done: self._watcher.part("features", done, total))
        return features

    def train(self, trainer: Trainer) -> Agreement:
        """Train to the end."""

        def on_update(updates: int, loss: float) -> None:
            self._watcher.part("training", updates, trainer.total)
            if updates % INTERVAL == 0 and updates < trainer.total:
                self._watcher.agreement(trainer.agreement())

        self._watcher.part("training", trainer.updates, trainer.total)
        with self._timed("training"):
            trainer.run(on_update, INTERVAL)
        agreement = trainer.agreement(most=200)
        self._watcher.agreement(agreement)
        return agreement

    def card(self, data: Sequence[Conversation], agreement: Agreement, **more: Any) -> dict[str, Any]:
        """Write what was done, for whoever uses the drafter, and return it."""
        order = self.order
        card = {
            "target": self.llm.name,
            "bozza": bozza.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "tokens": sum(len(conversation.tokens) for conversation in data),
            "conversations": len(data),
            "prompts": "written by the target" if order.prompts is None else f"{len(order.prompts)} of a file",
            "seed": order.seed,
            "recipe": asdict(order.recipe),
            "minutes": {name: round(seconds / 60, 1) for name, seconds in self._seconds.items()},
            "held_out": {
                "agreement_by_depth": [round(depth, 3) for depth in agreement.depths],
                "chain_tokens_per_pass": round(agreement.per_pass, 3),
            },
            **more,
        }
        (order.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
        return card

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Wall time of a part over all runs in the folder; one that is killed does not tell."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started
            (self.work / "seconds.json").write_text(json.dumps(self._seconds))


def _read_seconds(file: Path) -> dict[str, float]:
    seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return seconds


def train_eagle(order: Order, watcher: Watcher) -> dict[str, Any]:
    """Train an EAGLE head, or go on with it; returns its training card. The head is for `eagle:FOLDER`.

    Raises:
        ConfigError, ModelError, PromptError: see `Run`.
    """
    run = Run(order, watcher)
    data = run.data()
    features = run.features(data, features_read(run.text.num_hidden_layers))
    targets, coverage = frequent_tokens(data, order.recipe.draft_vocab, sorted(end_ids(run.target)))
    torch.manual_seed(order.seed)
    layer = layer_like(run.target, order.recipe.layers, order.widen)
    shape = HeadShape(layer, features.layers, run.text.hidden_size, len(targets))
    head = EagleHead(shape, run.target.get_input_embeddings(), targets).to(run.target.device)
    start_from_target(head, run.target)
    agreement = run.train(EagleTrainer(head, features, order.recipe, run.work / "checkpoint.pt"))
    save_head(head, order.out, run.llm.name, own_rows=False)
    return run.card(
        data,
        agreement,
        widen=order.widen,
        parameters=sum(weight.numel() for name, weight in head.named_parameters() if name != "lm_head.weight"),
        draft_vocabulary={"tokens": len(targets), "covers": round(coverage, 4)},
    )


def features_read(layers: int) -> tuple[int, ...]:
    """Low, middle and the last layer's input, so that the head can start as that layer (`start_from_target`)."""
    return tuple(sorted({min(2, layers - 1), layers // 2, layers - 1}))


def train_draft(order: Order, watcher: Watcher) -> dict[str, Any]:
    """Distil a small model, or go on with it; returns its training card. It is for `model:FOLDER`.

    Raises:
        ConfigError, ModelError, PromptError: see `Run`.
    """
    run = Run(order, watcher)
    if not 1 <= order.recipe.layers < run.text.num_hidden_layers:
        raise ConfigError(f"--layers {order.recipe.layers}: the target has {run.text.num_hidden_layers}, use fewer")
    data = run.data()
    features = run.features(data, ())
    targets, coverage = frequent_tokens(data, order.recipe.draft_vocab, sorted(end_ids(run.target)))
    small = fewer_layers(run.target, order.recipe.layers)
    agreement = run.train(DraftTrainer(small, targets, features, order.recipe, run.work / "checkpoint.pt"))
    small.to(run.target.dtype).save_pretrained(order.out)
    run.llm.tokenizer.save_pretrained(order.out)
    return run.card(
        data,
        agreement,
        parameters=sum(weight.numel() for weight in small.parameters()),
        trained_vocabulary={"tokens": len(targets), "covers": round(coverage, 4)},
    )


def train_mtp(order: Order, watcher: Watcher) -> dict[str, Any]:
    """Train sequential heads, or go on with them; returns their training card. They are for `mtp:FOLDER`.

    Raises:
        ConfigError, ModelError, PromptError: see `Run`.
    """
    run = Run(order, watcher)
    data = run.data()
    features = run.features(data, (hidden_layer(run.target),))
    targets, coverage = frequent_tokens(data, order.recipe.draft_vocab, sorted(end_ids(run.target)))
    torch.manual_seed(order.seed)
    head = sequential_heads(run.target, layer_like(run.target, order.recipe.layers)).float()
    start_modules(head, run.target)
    frequent = Frequent(targets, head_rows(run.target, targets), run.text.vocab_size)
    agreement = run.train(MtpTrainer(head, frequent, features, order.recipe, run.work / "checkpoint.pt"))
    save_mtp(head, order.out, run.llm.name)
    return run.card(
        data,
        agreement,
        parameters=sum(weight.numel() for weight in head.parameters()),
        trained_vocabulary={"tokens": len(targets), "covers": round(coverage, 4)},
    )
