"""Draft what followed the longest contexts like this one, as a tree where they were followed by different things.

The end of the text is looked up by its last 8, 4, 2 or 1 tokens, the most that are known, and what was found is
compared further back. Each occurrence votes for its continuation with a weight that grows with how much agrees; a node
is worth the share of the votes on its path (after SuffixDecoding, Oliaro et al., 2024, who count over a suffix tree).
The likeliest nodes are drafted, no deeper than twice the match is long: a chance match of two tokens says little about
the twentieth.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from bozza.core import NO_DRAFT, Draft, Request

ORDERS = (8, 4, 2, 1)  # how many last tokens are looked up
RECENT = 8  # occurrences kept of each
LONGEST = 64  # tokens compared backwards
REACH = 2  # drafted depth per matched token
LEAST = 0.1  # a node that gets less of the votes is not worth checking


class Occurrence(NamedTuple):
    """A place in a text: the tokens before `end` agree with what is looked for, `match` of them."""

    text: list[int]
    end: int
    match: int
    own: bool  # the text is the one that is continued: a copy that reaches its end repeats

    def token(self, depth: int) -> int | None:
        """What stands `depth` tokens on."""
        place = self.end + depth
        if place < len(self.text):
            return self.text[place]
        return self.text[self.end + depth % (len(self.text) - self.end)] if self.own else None


class SuffixIndex:
    """Where the last `RECENT` occurrences of each short token sequence end, over texts that grow.

    Memory: for each token of text one entry for each of the 4 orders, about 500 bytes together.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """Append tokens to a text of this index. A sequence is known once the token after it is."""
        ends = self._ends
        for token in tokens:
            end = len(text)
            for order in ORDERS:
                if order > end:
                    continue
                known = ends.setdefault(tuple(text[end - order :]), [])
                known.append((text, end))
                if len(known) > RECENT:
                    del known[0]
            text.append(token)

    def find(self, text: Sequence[int]) -> list[Occurrence]:
        """Occurrences of the longest known end of a text, the most recent one last."""
        for order in ORDERS:
            if order <= len(text) and (known := self._ends.get(tuple(text[-order:]))):
                return [Occurrence(other, end, _match(text, other, end, order), other is text) for other, end in known]
        return []


def _match(text: Sequence[int], other: Sequence[int], end: int, known: int) -> int:
    """How many tokens before `end` in `other` agree with the end of `text`; at least `known` do."""
    most = min(len(text), end, LONGEST)
    while known < most and other[end - known - 1] == text[-known - 1]:
        known += 1
    return known


def vote(occurrences: Sequence[Occurrence], nodes: int, drafter: str) -> Draft:
    """The tree of the `nodes` likeliest continuations."""
    deepest = REACH * max((occurrence.match for occurrence in occurrences), default=0)
    weights = [float(occurrence.match**2) for occurrence in occurrences]
    total = sum(weights)
    tokens: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, int, list[int]]] = []  # share (negative), order, parent, token, depth
    order = 0

    def expand(node: int, depth: int, voters: Sequence[int]) -> None:
        """Queue what the voters say next."""
        nonlocal order
        says: dict[int, list[int]] = {}
        for voter in reversed(voters):  # of equal shares the most recent one first
            if (token := occurrences[voter].token(depth)) is not None:
                says.setdefault(token, []).append(voter)
        for token, agreeing in says.items():
            share = sum(weights[voter] for voter in agreeing) / total
            if share >= LEAST:
                order += 1
                heapq.heappush(waiting, (-share, order, node, token, depth, sorted(agreeing)))

    expand(-1, 0, range(len(occurrences)))
    while waiting and len(tokens) < nodes:
        _, _, parent, token, depth, voters = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        if depth + 1 < deepest:
            expand(len(tokens) - 1, depth + 1, voters)
    return Draft(tuple(tokens), tuple(parents), (drafter,) * len(tokens)) if tokens else NO_DRAFT


class SuffixDrafter:
    """Drafts a tree from the request's own prompt and output. Knows no other request."""

    def __init__(self, name: str = "suffix") -> None:
        self.name = name
        self._texts: dict[int, tuple[SuffixIndex, list[int]]] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        index = SuffixIndex()
        text: list[int] = []
        index.extend(text, request.tokens)
        self._texts[request.id] = (index, text)

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`."""
        index, text = self._texts[request.id]
        index.extend(text, tokens)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            index, text = self._texts[request.id]
            drafts.append(vote(index.find(text), budget, self.name))
        return drafts

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        self._texts.pop(request.id, None)
