"""Chance for the rules that toss coins: each decision has its own number, fixed by the request's seed.

Streams are kept apart by name and by pass: no number is used for two decisions, so drafting and acceptance are
independent, and so are two drafters, and the drafts of successive passes, even at the same position.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from bozza.core import Request


class Chance(Protocol):
    """Where decisions come from. Tests put an enumeration of all outcomes in its place."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, weights: Tensor) -> int:
        """An index of weights [n], drawn in proportion to them; at least one is positive."""
        ...


class Coins:
    """`Chance` of one request in one pass.

    Args:
        request: gives the seed and the pass.
        stream: "accept", or "draft" and the name of the drafter.
    """

    def __init__(self, request: Request, stream: str) -> None:
        self._name = f"{request.seed}:{stream}:{request.stats.passes}"
        self._tossed = 0

    def _uniform(self) -> float:
        """In [0, 1), 53 bits."""
        digest = hashlib.blake2b(f"{self._name}:{self._tossed}".encode(), digest_size=8).digest()
        self._tossed += 1
        return (int.from_bytes(digest, "little") >> 11) / (1 << 53)

    def accept(self, probability: float) -> bool:
        """See `Chance.accept`."""
        return self._uniform() < probability

    def pick(self, weights: Tensor) -> int:
        """See `Chance.pick`."""
        total = weights.double().cumsum(dim=0)
        index = int(torch.searchsorted(total, total[-1] * self._uniform(), right=True))
        if index == len(weights):  # rounding at the very end
            index = int(weights.nonzero()[-1, 0])
        return index
