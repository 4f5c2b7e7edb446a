"""Runs a trained head over rows of many requests in one pass, with keys and values in slots like a model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bozza.models.attention import PLAIN, How
from bozza.models.kvstore import KVStore
from bozza.models.runner import Row, lay_out
from bozza.models.spans import Span
from bozza.native.attention import AttentionKernel, pass_over


class AttendHow(Protocol):
    """Attention over all slots that each token of a pass sees.

    Query [heads, tokens, size], key and value [kv heads, tokens, size] -> [tokens, heads, size].
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How = PLAIN) -> Tensor:
        """See `bozza.models.attention.Pass.attend`."""
        ...


class Reads(Protocol):
    """The shape of a head."""

    @property
    def features(self) -> tuple[int, ...]:
        """The target's hidden states that it reads: i is the input of layer i."""
        ...


class Head(Protocol):
    """Guesses at a slot the token after next, from what the target made of its token and from the next token.

    A call takes `ids` [tokens], the token after each slot, `hidden` [tokens, size], fused features or what stands in
    for them, `positions` [tokens], and `attend`, and gives [tokens, size].
    """

    @property
    def shape(self) -> Reads:
        """What it is made of."""
        ...

    @property
    def targets(self) -> Tensor | None:
        """int64 [draft vocab], the target's id of each token of the logits; None when they are the same."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of one device; the first one has the dtype of the head's input."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Features [tokens, layers * target size], as a call takes them."""
        ...

    def __call__(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: AttendHow) -> Any:
        """See above."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, draft vocab] of the results of calls."""
        ...


@dataclass(frozen=True, slots=True)
class HeadRow:
    """What one request brings: as for a model, and for each token of the row what stands for the features before it."""

    row: Row
    hidden: Tensor  # [tokens of the row, size]


class HeadRunner:
    """Owns the slots of a head.

    Args:
        head: in evaluation mode, in the dtype that it is to run in.
        kernel: compiled attention, where there is any.
    """

    def __init__(self, head: Head, kernel: AttentionKernel | None = None) -> None:
        self.head = head
        self._kernel = kernel
        self._like = next(head.parameters())
        self._device = self._like.device
        self._store = KVStore(self._device)

    @torch.inference_mode()
    def alloc(self) -> int:
        """A fresh, empty slot."""
        return self._store.alloc()

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._store.free(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._store.truncate(slot, length)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """See `Head.fuse`."""
        return self.head.fuse(features.to(self._like))

    @torch.inference_mode()
    def forward(self, rows: Sequence[HeadRow], *, guess: bool = True) -> tuple[Tensor, Tensor]:
        """One pass over all rows; afterwards each slot holds the row's tokens.

        Args:
            rows: the rows.
            guess: whether any logits are wanted.

        Returns:
            Outputs [tokens, size], and logits [wanted, draft vocab] float32 as a model would give them.
        """
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for row in (each.row for each in rows):
            span = lay_out(self._store, row, len(ids))
            if guess:
                wanted += range(span.first + span.count - row.outputs, span.first + span.count)
            spans.append(span)
            ids += [*row.tokens, *row.draft.tokens[span.fed :]]
        ragged = pass_over(self._store, spans, self._device, False, self._kernel)
        positions = torch.tensor([p for span in spans for p in span.positions[span.fed :]], device=self._device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, how: How = PLAIN) -> Tensor:
            return ragged.attend(layer, query, key, value, how)

        hidden: Tensor = self.head(
            torch.tensor(ids, device=self._device), torch.cat([each.hidden for each in rows]), positions, attend
        )
        return hidden, self.head.logits(hidden[torch.tensor(wanted, device=self._device, dtype=torch.int64)]).float()
