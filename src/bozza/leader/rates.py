"""How often things come true, keyed from general to specific."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

Key: TypeAlias = tuple[Hashable, ...]

WEIGHT = 16.0  # observations that an estimate's parent counts for
MEMORY = 400.0  # observations after which older ones begin to fade


class Rates:
    """Success rates; each estimate is shrunk to that of the next more general key.

    A key is a tuple whose beginnings are its more general keys. With h successes in n tries at a key, and p estimated
    one key up, its estimate is (h + w p) / (n + w): the mean of a Beta law whose prior weighs as much as w tries. What
    was never seen under a specific key is thus what is known in general.

    Args:
        levels: lengths of the beginnings that count, ascending; the last is the length of a whole key.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self._levels = tuple(levels)
        self._seen: dict[Key, list[float]] = {}  # key -> successes, tries
        self._known: dict[Key, float] = {}  # estimates since something was learned

    def estimate(self, key: Key, prior: float) -> float:
        """The rate at a whole key.

        Args:
            key: what is asked for.
            prior: what to believe before anything is seen; the same for equal keys.
        """
        if (known := self._known.get(key)) is not None:
            return known
        rate = prior
        for level in self._levels:
            if (seen := self._seen.get(key[:level])) is not None:
                rate = (seen[0] + WEIGHT * rate) / (seen[1] + WEIGHT)
        self._known[key] = rate
        return rate

    def learn(self, key: Key, success: bool) -> None:
        """Something came true, or did not."""
        for level in self._levels:
            seen = self._seen.setdefault(key[:level], [0.0, 0.0])
            if seen[1] >= MEMORY:
                seen[0] *= 1.0 - 1.0 / MEMORY
                seen[1] *= 1.0 - 1.0 / MEMORY
            seen[0] += success
            seen[1] += 1.0
        if self._known:
            self._known.clear()
