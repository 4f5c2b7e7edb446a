"""Constraints over token ids, for tests that have no text."""

from __future__ import annotations

from collections.abc import Sequence


class OneOf:
    """`Constraint`: the output is exactly one of a few token sequences. Notices when it is moved by anything else."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab: int) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences]
        self._vocab = vocab
        self.taken: tuple[int, ...] = ()
        self.failure: str | None = None

    def push(self, token: int) -> bool:
        assert token in self._next(self.taken), f"{token} was committed after {self.taken}"
        self.taken += (token,)
        return not self._next(self.taken)

    def allowed(self, path: Sequence[int]) -> bytes | None:
        ways = self._next((*self.taken, *path))
        return sum(1 << token for token in ways).to_bytes(-(-self._vocab // 8), "little") if ways else None

    def forced(self, most: int) -> list[int]:
        forced: list[int] = []
        while len(forced) < most and len(ways := self._next((*self.taken, *forced))) == 1:
            forced += ways
        return forced

    def _next(self, taken: tuple[int, ...]) -> set[int]:
        at = len(taken)
        return {s[at] for s in self._sequences if len(s) > at and s[:at] == taken}
