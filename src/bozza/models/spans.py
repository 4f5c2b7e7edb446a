"""Where the tokens of a pass stand: in the pass, in their slot, and in their text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a pass: `count` tokens at [first, first + count) of the pass, after `start` cached ones in `slot`."""

    slot: int
    start: int
    first: int
    count: int
    chain: int  # leading tokens in a line; the rest are draft nodes
    parents: tuple[int, ...]  # of the draft nodes; -1 is the last token of the line
    depths: tuple[int, ...]
    fed: int = 0  # leading draft nodes that the slot holds already; the line is empty then

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_tree(self) -> bool:
        return any(parent != node - 1 for node, parent in enumerate(self.parents))

    @property
    def base(self) -> int:
        """Where in the slot the line and the draft begin."""
        return self.start - self.fed

    @property
    def positions(self) -> list[int]:
        """Position of each token from `base` on: siblings share one."""
        last = self.base + self.chain - 1
        return [*range(self.base, last + 1), *(last + depth for depth in self.depths)]

    def ancestors(self) -> Tensor:
        """bool [count, fed + count]: which tokens from `base` on each new token sees."""
        size = self.fed + self.count
        seen = torch.ones(size, size, dtype=torch.bool).tril_()
        for node, parent in enumerate(self.parents):
            row = self.chain + node
            seen[row, self.chain :] = False
            if parent >= 0:
                seen[row] |= seen[self.chain + parent]
            seen[row, row] = True
        return seen[self.fed :]
