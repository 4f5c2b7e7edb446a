"""Trained heads on the target's hidden states draft a tree, all requests together, level by level.

What the heads add for a tree is forgotten afterwards: the next draft begins from features of the target again.

**Several heads in a row** (DeepSeek-AI, 2024, DeepSeek-V3, section 2.2). Head k (k = 1, ..., M) has a sequence of its
own, with its own keys and values: its slot i reads token i + k and what head k - 1 gave at slot i (head 1: the target's
features of token i), sees its slots 0 to i, and guesses token i + k + 1. Counted by tokens instead of slots: to read
token m, head k needs what head k - 1 gave for token m - 1, and nothing else that is new. So every committed token is
read by all heads, one after the other; and a drafted node of depth d, whose parent has been through heads d to M, goes
through heads d + 1 to M. Its children are what head d + 1 guesses. No head but the last ever sees deeper nodes.

**Deeper nodes than heads**: depth d + 1 > M is guessed by head M as well, with its own output for the parent in place
of what head M - 1 would have given. With one head this is the recursion of EAGLE (Li et al., 2024, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.base import Reading
from bozza.drafters.tree import Rank, Tree, grow
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.runner import Row

LEVEL = 0.15  # a further level costs a pass of the head: it must be likely enough that the target gets so far
CHUNK = 512  # slots per request and pass


@dataclass(slots=True)
class _State:
    slots: list[int]  # one for each head
    outputs: list[Tensor | None]  # of each head for the last token that it has read [1, size]
    known: int = 0  # leading tokens of the request whose features have come
    read: int = 0  # of these, how many the first head has read
    waiting: list[Tensor] = field(default_factory=list)  # features of the others, fused
    logits: Tensor | None = None  # of the first head, for the last token that it has read [1, draft vocab]


class HeadDrafter:
    """Drafts dynamic trees. Owns its slots in the heads.

    Args:
        runners: run the heads, in their order.
        name: its own.
        coupled: see `bozza.drafters.tree.Rank`.
        width: most children of a node, and nodes that get children at one level.
    """

    def __init__(self, runners: Sequence[HeadRunner], name: str, *, coupled: bool, width: int) -> None:
        self.name = name
        self.hidden_layers = runners[0].head.shape.features
        self._runners = runners
        self._rank = Rank(coupled, runners[0].head.targets)
        self._width = width
        self._states: dict[int, _State] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        slots = [runner.alloc() for runner in self._runners]
        self._states[request.id] = _State(slots, [None] * len(slots))

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the features of these tokens come with the next passes."""

    def read(self, request: Request, reading: Reading) -> None:
        """See `Reader.read`."""
        state = self._states[request.id]
        if reading.first == state.known:
            state.waiting.append(self._runners[0].fuse(reading.hidden))
            state.known += len(reading.hidden)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        able = [request for request in requests if self._able(request)]
        drafts: dict[int, Draft] = {}
        if able:
            budget = dict(zip((request.id for request in requests), budgets, strict=True))
            growing = _Growing(self._runners, {request.id: self._states[request.id] for request in able})
            trees = [Tree(request, budget[request.id]) for request in able]
            grow(trees, growing.roots(able), growing.expand, self._rank, self._width, LEVEL)
            drafts = {tree.request.id: tree.draft(self.name) for tree in trees}
        return [drafts.get(request.id, NO_DRAFT) for request in requests]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        if state := self._states.pop(request.id, None):
            for runner, slot in zip(self._runners, state.slots, strict=True):
                runner.free(slot)

    def _able(self, request: Request) -> bool:
        """Whether all features have come, and are enough for each head to have a slot."""
        return self._states[request.id].known == len(request.tokens) - 1 >= len(self._runners)


class _Growing:
    """What the heads know while they grow the trees of one step."""

    def __init__(self, runners: Sequence[HeadRunner], states: dict[int, _State]) -> None:
        self._runners = runners
        self._states = states
        self._outputs: dict[int, list[Tensor]] = {}  # request id -> per head [1 + fed nodes, size], the root's first

    def forget(self) -> None:
        """Drop from the slots what was drafted before, also by a step that was interrupted."""
        for state in self._states.values():
            for head, (runner, slot) in enumerate(zip(self._runners, state.slots, strict=True)):
                runner.truncate(slot, max(state.read - head, 0))

    def roots(self, requests: Sequence[Request]) -> Tensor:
        """Let the heads read what they have not, and return the logits [requests, draft vocab] for the next token."""
        self.forget()
        while unread := [request for request in requests if self._states[request.id].waiting]:
            self._read(unread)
        states = [self._states[request.id] for request in requests]
        for request, state in zip(requests, states, strict=True):
            self._outputs[request.id] = [output for output in state.outputs if output is not None]
        return torch.cat([state.logits for state in states if state.logits is not None])

    def _read(self, requests: Sequence[Request]) -> None:
        """One chunk of each request, through all heads. Nothing counts as read before all of them are done."""
        states = [self._states[request.id] for request in requests]
        inputs = [torch.cat(state.waiting)[:CHUNK] for state in states]
        ends = [state.read + 1 + len(hidden) for state, hidden in zip(states, inputs, strict=True)]
        counts = [len(hidden) for hidden in inputs]
        outputs = [list(state.outputs) for state in states]
        guesses: list[Tensor] = []
        for head, runner in enumerate(self._runners):
            active = [index for index, hidden in enumerate(inputs) if len(hidden)]
            rows = []
            for index in active:
                tokens = requests[index].tokens[ends[index] - len(inputs[index]) : ends[index]]
                rows.append(HeadRow(Row(states[index].slots[head], tokens, wanted=int(head == 0)), inputs[index]))
            if not rows:
                break
            results, logits = runner.forward(rows, guess=head == 0)
            if head == 0:
                guesses = [logits[index : index + 1] for index in range(len(rows))]
            for index, result in zip(active, _split(results, rows), strict=True):
                before = outputs[index][head]
                outputs[index][head] = result[-1:]
                inputs[index] = result[:-1] if before is None else torch.cat([before, result[:-1]])
        for state, count, output, guess in zip(states, counts, outputs, guesses, strict=True):
            left = torch.cat(state.waiting)[count:]
            state.waiting = [left] if len(left) else []
            state.read += count
            state.outputs, state.logits = output, guess

    def expand(self, asked: Sequence[tuple[Tree, Draft, int]]) -> Tensor:
        """See `bozza.drafters.tree.Expand`; the new nodes of all trees are of one depth."""
        last = len(self._runners) - 1
        depth = asked[0][1].depths()[-1]
        guesses: list[Tensor] = []
        for head in range(min(depth, last), last + 1):
            source = head - 1 if depth <= last else last
            rows = []
            for tree, draft, fed in asked:
                hidden = self._outputs[tree.request.id][source][[parent + 1 for parent in draft.parents[fed:]]]
                rows.append(HeadRow(Row(self._states[tree.request.id].slots[head], (), draft, fed=fed), hidden))
            results, logits = self._runners[head].forward(rows, guess=not guesses)
            guesses = guesses or [logits]
            for (tree, _, _), new in zip(asked, _split(results, rows), strict=True):
                known = self._outputs[tree.request.id]
                known[head] = torch.cat([known[head], new])
        return guesses[0]


def _split(results: Tensor, rows: Sequence[HeadRow]) -> list[Tensor]:
    """The results of each row."""
    ends = list(accumulate(len(row.hidden) for row in rows))
    return [results[end - len(row.hidden) : end] for row, end in zip(rows, ends, strict=True)]
