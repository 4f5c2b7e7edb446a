"""Draft what the target itself found likely after each token when it last saw it (Token Recycling, Luo et al., 2024).

Checking a draft computes the target's next-token laws at all nodes, most of which are thrown away. Here the likeliest
successors of each token are kept in a table, and a tree is drafted by following the table from the last token on, the
likeliest paths first. No training, no text of any request: the table knows pairs of tokens.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.base import Reading

KEPT = 8  # successors of a token
LEAST = 0.01  # a node that is less likely to stand than this is not worth checking
TRUST = 0.7  # how far a likelihood from another context is believed


class Successors:
    """The likeliest successors of each token. Holds 40 bytes per token of the vocabulary: 1.3 MB for 32,000."""

    def __init__(self, vocab_size: int) -> None:
        self._tokens = array("i", bytes(4 * KEPT * vocab_size))
        self._shares = array("B", bytes(KEPT * vocab_size))  # probabilities in 255ths; 0: unknown

    def put(self, token: int, successors: Sequence[int], probabilities: Sequence[float]) -> None:
        """Replace what is known, likeliest first."""
        start = token * KEPT
        for place, (successor, probability) in enumerate(zip(successors, probabilities, strict=True), start):
            self._tokens[place] = successor
            self._shares[place] = min(255, max(1, round(255 * probability)))

    def get(self, token: int, rank: int) -> tuple[int, float]:
        """The successor of a rank below `KEPT` and its probability; 0 when there is none."""
        place = token * KEPT + rank
        return self._tokens[place], self._shares[place] / 255.0


class RecyclingDrafter:
    """Drafts a tree from one table for all requests: what a target finds likely says little about who asked.

    Args:
        vocab_size: the target's.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, name: str = "recycling") -> None:
        self.name = name
        self._table = Successors(vocab_size)
        self._kept = min(KEPT, vocab_size)

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the table is filled by `read`."""

    def read(self, request: Request, reading: Reading) -> None:
        """See `Reader.read`. All rows are kept: what the target thinks of tokens that did not come is news as well."""
        after = reading.after
        if not after:
            return
        standing = [0, *(node + 1 for node in reading.path)]  # noted last, so that they count where a token comes twice
        rows = [*sorted(set(range(len(after))) - set(standing)), *standing]
        successors, probabilities = reading.likeliest(range(len(after)), self._kept)
        for row in rows:
            self._table.put(after[row], successors[row], probabilities[row])

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        return [self._tree(request.tokens[-1], budget) for request, budget in zip(requests, budgets, strict=True)]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""

    def _tree(self, last: int, nodes: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        values: list[float] = []
        waiting: list[tuple[float, int, int, int, int, float]] = []  # -value, order, parent, its token, rank, its value
        order = 0

        def wait(parent: int, after: int, rank: int, value: float) -> None:
            nonlocal order
            share = self._table.get(after, rank)[1] * TRUST * value if rank < self._kept else 0.0
            if share >= LEAST:
                order += 1
                heapq.heappush(waiting, (-share, order, parent, after, rank, value))

        wait(-1, last, 0, 1.0)
        while waiting and len(tokens) < nodes:
            share, _, parent, after, rank, value = heapq.heappop(waiting)
            token = self._table.get(after, rank)[0]
            tokens.append(token)
            parents.append(parent)
            values.append(-share)
            wait(parent, after, rank + 1, value)  # the next best brother: no need to queue those behind it yet
            wait(len(tokens) - 1, token, 0, -share)
        if not tokens:
            return NO_DRAFT
        return Draft(tuple(tokens), tuple(parents), (self.name,) * len(tokens), confidences=tuple(values))
