"""Runs an unmodified transformers model over rows of many requests in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bozza.core import NO_DRAFT, Draft
from bozza.models.attention import attending
from bozza.models.kvstore import KVStore
from bozza.models.spans import Span
from bozza.native.attention import AttentionKernel, pass_over


@dataclass(frozen=True, slots=True)
class Row:
    """What one request brings to a pass: tokens that follow those in its slot, and a draft that follows these.

    The pass returns logits after the last `wanted` of the tokens and, if there are any, after each node of the draft.
    A draft can also come in parts: with `fed`, the slot holds its first nodes already, there are no tokens, and the
    pass returns logits after each of the other nodes.
    """

    slot: int
    tokens: Sequence[int]
    draft: Draft = NO_DRAFT
    wanted: int = 1
    fed: int | None = None

    @property
    def outputs(self) -> int:
        """How many rows of logits it gets."""
        if self.fed is not None:
            return len(self.draft) - self.fed
        return self.wanted + len(self.draft) if self.wanted else 0


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`logits` [wanted rows, vocab] float32, in the order of the rows and their nodes; `hidden[i]` [tokens, size]."""

    logits: Tensor
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


class Model(Protocol):
    """A language model that owns slots. What the engine and the model drafter know of a model."""

    vocab_size: int
    context_length: int
    device: torch.device

    def alloc(self) -> int:
        """A fresh, empty slot."""
        ...

    def free(self, slot: int) -> None:
        """Give a slot back."""
        ...

    def forward(self, rows: Sequence[Row], hidden_layers: Sequence[int] = ()) -> ForwardResult:
        """One pass over all rows; afterwards each slot holds the row's tokens and all nodes of its draft."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        ...

    def keep(self, slot: int, base: int, path: Sequence[int]) -> None:
        """Of the draft that begins at `base` in the slot, keep the nodes on `path` and forget the rest."""
        ...


class RaggedRunner:
    """`Model` for decoder-only transformers models that call the attention interface. The model stays unmodified.

    Hidden state i is the input of layer i (0: the embeddings), as in transformers' `output_hidden_states`.

    Args:
        model: a transformers model in evaluation mode.
        invariant: in float32 on a CPU too, let no logit depend on the shape of its pass (`check_invariant` tries it).
        kernel: compiled attention, where there is any.
    """

    def __init__(self, model: Any, invariant: bool = False, kernel: AttentionKernel | None = None) -> None:
        self._model = model
        self.kernel = kernel
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.store = KVStore(self.device)
        self._configs = configs_of(model)
        # In 16 bits on a CPU, equal bits for every shape of pass cost little, and a single row is all that must not be.
        # In float32 products are equal from row to row only if rows come in eights, which plain decoding pays for.
        self._equal_bits = self.device.type == "cpu" and (self.dtype.itemsize == 2 or invariant)
        self._least, self._multiple = (2, 1) if self.dtype.itemsize == 2 else (8, 8)

    @torch.inference_mode()
    def alloc(self) -> int:
        """See `Model.alloc`."""
        return self.store.alloc()

    def free(self, slot: int) -> None:
        """See `Model.free`."""
        self.store.free(slot)

    def truncate(self, slot: int, length: int) -> None:
        """See `Model.truncate`."""
        self.store.truncate(slot, length)

    @torch.inference_mode()
    def keep(self, slot: int, base: int, path: Sequence[int]) -> None:
        """See `Model.keep`."""
        self.store.keep(slot, base, path)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], hidden_layers: Sequence[int] = ()) -> ForwardResult:
        """See `Model.forward`."""
        lengths = [(row.slot, self.store.length(row.slot)) for row in rows]
        try:
            return self._forward(rows, hidden_layers)
        except BaseException:  # an interrupted pass has not happened
            for slot, length in lengths:
                self.store.truncate(slot, length)
            raise

    def _forward(self, rows: Sequence[Row], hidden_layers: Sequence[int]) -> ForwardResult:
        ids, spans, wanted = self._lay_out(rows)
        positions = [position for span in spans for position in span.positions[span.fed :]]
        kept = wanted + [0] * self._filling(len(wanted)) if wanted else wanted  # the head is a product like any other
        filling = self._filling(len(ids))
        ids, positions = ids + ids[:1] * filling, positions + positions[:1] * filling
        extra = {"output_hidden_states": list(hidden_layers)} if hidden_layers else {}
        ragged = pass_over(self.store, spans, self.device, self._equal_bits, self.kernel)
        with attending(self._configs, ragged):
            output = self._model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(kept, dtype=torch.int64, device=self.device),
                **extra,
            )
        logits = output.logits[0, : len(wanted)].float()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the time of a pass is charged to the pass
        count = sum(len(row.tokens) + len(row.draft) - (row.fed or 0) for row in rows)
        return ForwardResult(logits, {layer: output.hidden_states[layer][0, :count] for layer in hidden_layers})

    def _filling(self, rows: int) -> int:
        """How many rows a matrix product of `rows` is filled up with."""
        return max(self._least, -(-rows // self._multiple) * self._multiple) - rows if self._equal_bits else 0

    def _lay_out(self, rows: Sequence[Row]) -> tuple[list[int], list[Span], list[int]]:
        """Token ids of the pass, its spans, and the places whose logits are wanted."""
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for row in rows:
            span = lay_out(self.store, row, len(ids))
            if row.outputs:
                wanted += range(span.first + span.count - row.outputs, span.first + span.count)
            spans.append(span)
            ids += [*row.tokens, *row.draft.tokens[span.fed :]]
        return ids, spans, wanted


def lay_out(store: KVStore, row: Row, first: int) -> Span:
    """Make room for a row whose tokens begin at `first` of the pass."""
    fed, chain = row.fed or 0, len(row.tokens)
    count = chain + len(row.draft) - fed
    start = store.append(row.slot, count)
    return Span(row.slot, start, first, count, chain, row.draft.parents, tuple(row.draft.depths()), fed)


def configs_of(model: Any) -> list[Any]:
    """Every configuration object that a part of the model reads, once each."""
    unique = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in unique.values() if hasattr(config, "_attn_implementation")]
