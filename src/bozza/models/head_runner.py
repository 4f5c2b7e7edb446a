"""Runs an EAGLE head over rows of many requests in one pass, with keys and values in slots like a model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bozza.models.attention import How, Pass, Span
from bozza.models.eagle import EagleHead
from bozza.models.kvstore import KVStore
from bozza.models.runner import Row, lay_out


@dataclass(frozen=True, slots=True)
class HeadRow:
    """What one request brings: as for a model, and for each token of the row what stands for the features before it."""

    row: Row
    hidden: Tensor  # [tokens of the row, size]


class HeadRunner:
    """Owns the slots of a head.

    Args:
        head: in evaluation mode, in the dtype that it is to run in.
    """

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self._device = head.fc.weight.device
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
        """See `EagleHead.fuse`."""
        return self.head.fuse(features.to(self.head.fc.weight))

    @torch.inference_mode()
    def forward(self, rows: Sequence[HeadRow]) -> tuple[Tensor, Tensor]:
        """One pass over all rows; afterwards each slot holds the row's tokens.

        Returns:
            Outputs [tokens, size], and logits [wanted, draft vocab] float32 as a model would give them.
        """
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for row in (each.row for each in rows):
            span = lay_out(self._store, row, len(ids))
            wanted += range(span.first + span.count - row.outputs, span.first + span.count)
            spans.append(span)
            ids += [*row.tokens, *row.draft.tokens[span.fed :]]
        ragged = Pass(self._store, spans, self._device, equal_bits=False)
        positions = torch.tensor([p for span in spans for p in span.positions[span.fed :]], device=self._device)
        hidden = self.head(
            torch.tensor(ids, device=self._device),
            torch.cat([each.hidden for each in rows]),
            positions,
            lambda layer, query, key, value: ragged.attend(layer, query, key, value, How()),
        )
        return hidden, self.head.logits(hidden[torch.tensor(wanted, device=self._device, dtype=torch.int64)]).float()
