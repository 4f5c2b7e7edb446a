"""What the tokens of a pass see, as the compiled attention takes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from bozza.models.spans import Span

BLOCK = 64  # keys that are read at a time, as in attend.cpp


class PlanStruct(ctypes.Structure):
    """`Plan` of attend.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "places", "low", "high", "orders")),
        *((name, ctypes.c_int32) for name in ("tile_count", "tokens", "depth", "threads")),
    )


class Plan:
    """What the tokens of a pass see, the same for all layers with one window.

    Args:
        spans: of the pass.
        begins: where the slot of each begins in the store, in tokens.
        window: positions that a token sees, itself included; None for all.
        most: tokens of a tile.
    """

    def __init__(self, spans: Sequence[Span], begins: Sequence[int], window: int | None, most: int) -> None:
        tiles: list[int] = []
        places: list[int] = []
        high: list[int] = []
        tails: list[list[int]] = []
        for span, begin in zip(spans, begins, strict=True):
            places += range(begin + span.start, begin + span.end)
            high += [position + 1 for position in span.positions[span.fed :]]
            for low, count, shared, order in _tiles(span, most, tails):
                tiles += (begin, span.first + low, count, shared, order)
        depth = max(map(len, tails), default=0)
        orders = [[*tail, *[0] * (depth - len(tail))] for tail in tails]
        lows = [0 if window is None else max(0, end - window) for end in high]
        self._held = [torch.tensor(each, dtype=torch.int32) for each in (tiles, places, lows, high, orders)]
        pointers = (each.data_ptr() for each in self._held)
        self.struct = PlanStruct(*pointers, len(tiles) // 5, len(places), depth, torch.get_num_threads())


def _tiles(span: Span, most: int, tails: list[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """First token, tokens, leading keys that are at their positions for all, and where in `tails` the others begin.

    A token of a tree sees the branch that it is on; where the keys of that are, from the last shared block on, is added
    to `tails`, so that they are read in the order of their positions like any others.
    """
    line = max(span.chain - 1, 0) if span.is_tree else span.count  # the last one of the line is the tree's root
    for low in range(0, line, most):
        count = min(most, line - low)
        yield low, count, span.start + low + count, -1
    if not span.is_tree:
        return
    root = span.base + span.chain  # keys of the line and of all before it
    shared = root // BLOCK * BLOCK
    for low in range(line, span.count, most):
        count = min(most, span.count - low)
        yield low, count, shared, len(tails)
        for token in range(low, low + count):
            branch: list[int] = []
            node = span.fed + token - span.chain
            while node >= 0:
                branch.append(root + node)
                node = span.parents[node]
            tails.append([*range(shared, root), *reversed(branch)])
