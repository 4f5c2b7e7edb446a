"""The seam that every drafter fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bozza.core import Draft, Request


class Drafter(Protocol):
    """Guesses tokens. A guess may be any token of the target: it can cost time, never correctness."""

    name: str  # unique within an engine; shown in statistics

    def start(self, request: Request) -> None:
        """A request begins; its prompt is in `request.tokens`."""
        ...

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """`tokens` were committed, and are now the end of `request.tokens`."""
        ...

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft per request, of at most `budgets[i]` >= 1 nodes; an empty one when nothing is worth a guess."""
        ...

    def stop(self, request: Request) -> None:
        """The request is gone, finished or not: drop what belongs to it."""
        ...
