"""From specifications to drafters that are ready to run, loading each draft model and head once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bozza.drafters.base import Drafter
from bozza.drafters.eagle import EagleDrafter
from bozza.drafters.grammar import GrammarDrafter
from bozza.drafters.history import SharedHistory
from bozza.drafters.model import ModelDrafter
from bozza.drafters.mtp import MtpDrafter
from bozza.drafters.ngram import NgramDrafter
from bozza.drafters.prediction import PredictionDrafter
from bozza.drafters.recycling import RecyclingDrafter
from bozza.drafters.spec import DraftSpec, drafter_names
from bozza.drafters.suffix import SuffixDrafter
from bozza.drafters.translated import DraftModel, dialect_for
from bozza.errors import ConfigError, ModelError
from bozza.models.head_runner import HeadRunner
from bozza.models.heads import load_head, shipped_head
from bozza.models.loading import Loaded, load_packed
from bozza.models.mtp_files import load_mtp
from bozza.models.packing import QUANTIZED, pack_alone
from bozza.models.probe import load_runner
from bozza.models.translation import Translation
from bozza.models.vocabulary import vocabularies
from bozza.native.attention import AttentionKernel, attention_kernel
from bozza.native.products import use_native_products

FREE: dict[str, Callable[[str], Drafter]] = {
    "grammar": GrammarDrafter,
    "prediction": PredictionDrafter,
}


class Factory:
    """Makes drafters for one target.

    Args:
        target: the loaded target.
        vocab_size: of its logits.
        history: that all `suffix` drafters share, if any.
    """

    def __init__(self, target: Loaded, vocab_size: int, history: SharedHistory | None = None) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._history = history
        self._loaded: dict[tuple[str, str | None], Any] = {}

    def load(self, specs: Sequence[DraftSpec]) -> None:
        """Load the models and heads that are named and not yet loaded.

        Raises:
            ModelError: one cannot be had, or does not go with the target.
        """
        for spec in specs:
            key = (spec.kind, spec.model)
            if key in self._loaded:
                continue
            if spec.kind == "model":
                self._loaded[key] = load_draft_model(str(spec.model), self._target)
            elif spec.kind == "eagle":
                folder = Path(spec.model).expanduser() if spec.model else shipped_head(self._target.path)
                head = load_head(folder, self._target.model)
                pack_alone(head)
                if self._target.compiled:
                    use_native_products(head)
                self._loaded[key] = HeadRunner(head, kernel_for(self._target))
            elif spec.kind == "mtp":
                self._loaded[key] = load_modules(spec.model, self._target)

    def make(self, specs: Sequence[DraftSpec], coupled: bool, private: bool = False) -> list[Drafter]:
        """Fresh drafters.

        Args:
            specs: which ones.
            coupled: see `Rule.coupled`.
            private: without the history that the others share.

        Raises:
            ConfigError: a model that is named has not been loaded.
        """
        history = None if private else self._history
        return [
            self._make(spec, name, coupled, history) for spec, name in zip(specs, drafter_names(specs), strict=True)
        ]

    def _make(self, spec: DraftSpec, name: str, coupled: bool, history: SharedHistory | None) -> Drafter:
        if spec.kind in FREE:
            return FREE[spec.kind](name)
        if spec.kind == "suffix":
            return SuffixDrafter(name, history)
        if spec.kind == "ngram":
            return NgramDrafter(**{f"{size}_n": n for size, n in spec.options.items()}, name=name)
        if spec.kind == "recycling":
            return RecyclingDrafter(self._vocab_size, name)
        runner = self._loaded.get((spec.kind, spec.model))
        if runner is None:
            raise ConfigError(f"draft {spec.text} is not loaded: name it when the LLM is made")
        if spec.kind == "eagle":
            return EagleDrafter(runner, name, coupled=coupled, **spec.options)
        if spec.kind == "mtp":
            return MtpDrafter(runner, name, coupled=coupled, **spec.options)
        shared = not coupled or spec.options.get("width", 1) > 1
        dialect = dialect_for(runner, self._vocab_size, shared)
        return ModelDrafter(runner.runner, self._vocab_size, name, coupled=coupled, dialect=dialect, **spec.options)


def load_draft_model(name: str, target: Loaded) -> DraftModel:
    """A draft model in the target's dtype, quantized and compiled if that is, on its device; translated if need be.

    Raises:
        ModelError: it cannot be had, or its tokens can neither be used nor translated.
    """
    quantize = target.weights if target.weights in QUANTIZED else None
    draft = load_packed(name, target.model.dtype, target.model.device, quantize)
    runner = load_runner(draft.model, compiled=target.compiled)
    views = vocabularies(name, draft, target)
    return DraftModel(name, runner, None if views is None else Translation(*views))


def load_modules(folder: str | None, target: Loaded) -> list[HeadRunner]:
    """Runners for MTP modules: those in a folder, or those in the target's own checkpoint.

    Raises:
        ModelError: there are none, or they do not go with the target.
    """
    place = Path(folder).expanduser() if folder else target.path
    if place is None:
        raise ModelError("the target was not loaded from a folder, so MTP modules must be named: mtp:FOLDER")
    kernel = kernel_for(target)
    return [HeadRunner(module, kernel) for module in load_mtp(place, target.model).steps]


def kernel_for(target: Loaded) -> AttentionKernel | None:
    """The compiled attention of a target's heads: where its own is compiled."""
    return attention_kernel() if target.compiled else None
