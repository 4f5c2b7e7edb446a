"""A trained head on the target's hidden states drafts a tree, all requests together, one pass of the head per level.

The head reads the target's features of every token once, when the request drafts next; until then they wait. What it
adds for a tree is forgotten afterwards: the next draft begins from features of the target again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.base import Reading
from bozza.drafters.tree import WIDTH, Rank, Tree, grow
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.runner import Row

CHUNK = 512  # slots per request and pass


@dataclass(slots=True)
class _State:
    slot: int
    known: int = 0  # leading tokens of the request whose features have come
    read: int = 0  # of these, how many the head has read
    waiting: list[Tensor] = field(default_factory=list)  # features of the others, fused
    output: Tensor | None = None  # of the last slot that was read [1, size]
    logits: Tensor | None = None  # there [1, draft vocab]


class EagleDrafter:
    """Drafts dynamic trees. Owns its slots in the head.

    Args:
        runner: runs the head.
        coupled: see `bozza.drafters.tree.Rank`.
        width: most children of a node, and nodes that get children at one level.
    """

    def __init__(self, runner: HeadRunner, name: str = "eagle", *, coupled: bool = True, width: int = WIDTH) -> None:
        self.name = name
        self.hidden_layers = runner.head.shape.features
        self._runner = runner
        self._rank = Rank(coupled, runner.head.targets)
        self._width = width
        self._states: dict[int, _State] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        self._states[request.id] = _State(self._runner.alloc())

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the features of these tokens come with the next passes."""

    def read(self, request: Request, reading: Reading) -> None:
        """See `Reader.read`."""
        state = self._states[request.id]
        if reading.first == state.known:
            state.waiting.append(self._runner.fuse(reading.hidden))
            state.known += len(reading.hidden)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        able = [r for r in requests if self._states[r.id].known == len(r.tokens) - 1 > 0]
        drafts: dict[int, Draft] = {}
        if able:
            budget = dict(zip((request.id for request in requests), budgets, strict=True))
            growing = _Growing(self._runner, {request.id: self._states[request.id] for request in able})
            trees = [Tree(request, budget[request.id]) for request in able]
            grow(trees, growing.roots(able), growing.expand, self._rank, self._width)
            drafts = {tree.request.id: tree.draft(self.name) for tree in trees}
            for request in able:
                state = self._states[request.id]
                self._runner.truncate(state.slot, state.read)
        return [drafts.get(request.id, NO_DRAFT) for request in requests]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        if state := self._states.pop(request.id, None):
            self._runner.free(state.slot)


class _Growing:
    """What the head knows while it grows the trees of one step."""

    def __init__(self, runner: HeadRunner, states: dict[int, _State]) -> None:
        self._runner = runner
        self._states = states
        self._outputs: dict[int, Tensor] = {}  # request id -> outputs [1 + fed nodes, size], the root's first

    def roots(self, requests: Sequence[Request]) -> Tensor:
        """Let the head read what it has not, and return its logits [requests, draft vocab] for the next token."""
        states = [self._states[request.id] for request in requests]
        for state in states:
            self._runner.truncate(state.slot, state.read)  # what an interrupted step left there
        while unread := [pair for pair in zip(requests, states, strict=True) if pair[1].waiting]:
            rows = [_next_row(request, state) for request, state in unread]
            outputs, logits = self._runner.forward(rows)
            end = 0
            for index, ((_, state), row) in enumerate(zip(unread, rows, strict=True)):
                end += len(row.hidden)
                state.read += len(row.hidden)
                left = torch.cat(state.waiting)[len(row.hidden) :]
                state.waiting = [left] if len(left) else []
                state.output, state.logits = outputs[end - 1 : end], logits[index : index + 1]
        roots = [state.logits for state in states if state.logits is not None]
        self._outputs = {
            request.id: state.output
            for request, state in zip(requests, states, strict=True)
            if state.output is not None
        }
        return torch.cat(roots)

    def expand(self, asked: Sequence[tuple[Tree, Draft, int]]) -> Tensor:
        """See `bozza.drafters.tree.Expand`."""
        rows = []
        for tree, draft, fed in asked:
            known = self._outputs[tree.request.id]
            hidden = known[[parent + 1 for parent in draft.parents[fed:]]]
            rows.append(HeadRow(Row(self._states[tree.request.id].slot, (), draft, fed=fed), hidden))
        outputs, logits = self._runner.forward(rows)
        start = 0
        for (tree, _, _), row in zip(asked, rows, strict=True):
            new = outputs[start : start + len(row.hidden)]
            self._outputs[tree.request.id] = torch.cat([self._outputs[tree.request.id], new])
            start += len(row.hidden)
        return logits


def _next_row(request: Request, state: _State) -> HeadRow:
    """The next slots that the head has not read, at most a chunk; slot t comes with token t + 1."""
    hidden = torch.cat(state.waiting)[:CHUNK]
    return HeadRow(Row(state.slot, request.tokens[state.read + 1 : state.read + 1 + len(hidden)]), hidden)
