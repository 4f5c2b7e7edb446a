"""What a paid drafter is expected to have right, before it is asked.

The chance that the i-th node of a draft stands (drafts come best first; of a chain it is the i-th token) is looked up
by the drafter, i, how likely the free drafts' first token is, and how the drafter fared lately in this request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from bozza.leader.beliefs import Offer, favoured
from bozza.leader.rates import Key, Rates

LEVELS = (2, 3, 4, 5)
FREE = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9)  # edges of the chance of the free drafts' first token
PRIOR, FADE = 0.55, 0.8  # before anything is seen: the first node's chance, and each further one's share of it
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)  # further nodes share the estimate of the next one


class Gains:
    """Learns from each draft that was asked for."""

    def __init__(self) -> None:
        self._rates = Rates(LEVELS)
        self._curves: dict[tuple[str, int, int, int, int, float], list[float]] = {}

    def curve(self, name: str, most: int, free: float, record: tuple[int, int], luck: float = 1.0) -> list[float]:
        """The chance that each of the first `most` nodes stands.

        Args:
            name: the drafter.
            most: nodes.
            free: chance of the free drafts' first token.
            record: `Record.bins` of the drafter in this request.
            luck: its `Record.luck`.
        """
        known = (name, most, bisect_right(FREE, free), *record, luck)
        if (curve := self._curves.get(known)) is None:
            curve = []
            for rank in range(1, most + 1):
                key = _key(name, rank, free, record)
                curve.append(favoured(self._rates.estimate(key, PRIOR * FADE ** bisect_left(RANKS, rank)), luck))
            self._curves[known] = curve
        return curve

    def learn(self, offer: Offer, asked: int, tokens: Sequence[int], free: float) -> None:
        """Take in what came of a draft.

        Args:
            offer: the draft, compared with nothing yet.
            asked: how many nodes it might have had.
            tokens: what the step committed.
            free: chance of the free drafts' first token.
        """
        standing, last = set(), -1
        for token in tokens:
            last = next((kid for kid in offer.below(last) if offer.draft.tokens[kid] == token), -2)
            if last == -2:
                break
            standing.add(last)
        unknown: set[int] = set()  # what continues all that was committed
        for node, parent in enumerate(offer.draft.parents):
            if (parent == last and last != -2) or parent in unknown:
                unknown.add(node)
            else:
                self._rates.learn(_key(offer.name, node + 1, free, offer.record), node in standing)
        if not unknown:
            for rank in range(len(offer.draft) + 1, asked + 1):
                self._rates.learn(_key(offer.name, rank, free, offer.record), False)
        self._curves.clear()


def _key(name: str, rank: int, free: float, record: tuple[int, int]) -> Key:
    return (name, bisect_left(RANKS, rank), bisect_right(FREE, free), record[0], record[1])
