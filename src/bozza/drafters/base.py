"""The seam that every drafter fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


# Which of the tokens in `Reading.after`, and how many successors of each -> the likeliest successors, best first, and
# the target's probabilities of these, before any sampling parameter.
Likeliest = Callable[[Sequence[int], int], tuple[list[list[int]], list[list[float]]]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a pass of the target showed of one request, after its verdict was committed."""

    first: int  # place in `request.tokens` of the first token that the pass added for good
    hidden: Any  # [tokens added for good, width of all wanted layers side by side]
    after: tuple[int, ...]  # the tokens that logits came after: the last one of the row, then all nodes of the draft
    path: tuple[int, ...]  # the accepted nodes
    likeliest: Likeliest


@runtime_checkable
class Reader(Protocol):
    """A drafter that also learns from the passes of the target."""

    hidden_layers: tuple[int, ...]  # hidden states that it reads: i is the input of layer i

    def read(self, request: Request, reading: Reading) -> None:
        """A pass has read more of the request; comes after `observe`."""
        ...
