"""Shows drafters that learn from the target's passes what a pass computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bozza.core import Request
from bozza.drafters.base import Drafter, Reader, Reading
from bozza.models.runner import ForwardResult, Row
from bozza.sampling.largest import largest


class Kept(NamedTuple):
    """What stays of one row."""

    request: Request
    row: Row
    first: int  # place in the request of the row's first token
    path: tuple[int, ...]  # accepted nodes


class Readings:
    """Knows which drafters want to be shown something, and which hidden states the target must give for it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._readers: dict[str, Reader] = {d.name: d for d in drafters if isinstance(d, Reader)}
        self.hidden_layers = sorted({layer for reader in self._readers.values() for layer in reader.hidden_layers})

    def names(self) -> list[str]:
        """The drafters that are shown something."""
        return list(self._readers)

    def show(self, name: str, rows: Sequence[Row], kept: Sequence[Kept], result: ForwardResult) -> None:
        """Show one drafter a pass.

        Args:
            name: the drafter.
            rows: all of the pass.
            kept: of the requests that go on.
            result: of the pass.
        """
        reader = self._readers[name]
        places, outputs, token, output = {}, {}, 0, 0
        for row in rows:
            places[row.slot], outputs[row.slot] = token, output
            token, output = token + len(row.tokens) + len(row.draft), output + row.outputs
        added = [
            [*range(places[row.slot], places[row.slot] + len(row.tokens))]
            + [places[row.slot] + len(row.tokens) + node for node in path]
            for _, row, _, path in kept
        ]
        hidden = None
        if reader.hidden_layers:
            index = torch.tensor([place for places in added for place in places], dtype=torch.int64)
            hidden = torch.cat([result.hidden[layer][index] for layer in reader.hidden_layers], dim=1)
        start = 0
        for (request, row, first, path), mine in zip(kept, added, strict=True):
            after = (row.tokens[-1], *row.draft.tokens) if row.wanted else ()
            own = None if hidden is None else hidden[start : start + len(mine)]
            end = outputs[row.slot] + row.outputs
            likeliest = partial(_likeliest, result.logits[end - len(after) : end])
            reader.read(request, Reading(first, own, after, path, likeliest))
            start += len(mine)


def _likeliest(logits: Tensor, rows: Sequence[int], count: int) -> tuple[list[list[int]], list[list[float]]]:
    """See `bozza.drafters.base.Likeliest`."""
    chosen = logits if rows == range(len(logits)) else logits[list(rows)]
    probabilities, tokens = largest(chosen.softmax(dim=1), count)  # half the time of a logsumexp
    return tokens.tolist(), probabilities.tolist()
