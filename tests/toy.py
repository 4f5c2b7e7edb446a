"""A language model that is a table: what follows depends on the last token only, and is known exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bozza.core import Draft, Request
from bozza.models.kvstore import KVStore
from bozza.models.runner import ForwardResult, Row


class ToyModel:
    """`Model` with logits = table[token]. Remembers the tokens of each slot, and checks that they are consistent.

    Args:
        table: [vocab, vocab] logits of the next token.
        context_length: most tokens of a request.
    """

    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor, context_length: int = 1000) -> None:
        self.table = table
        self.vocab_size = table.shape[0]
        self.context_length = context_length
        self.store = KVStore(self.device)
        self.tokens: dict[int, list[int]] = {}
        self.passes: list[list[Row]] = []

    def alloc(self) -> int:
        slot = self.store.alloc()
        self.tokens[slot] = []
        return slot

    def free(self, slot: int) -> None:
        del self.tokens[slot]
        self.store.free(slot)

    def truncate(self, slot: int, length: int) -> None:
        del self.tokens[slot][length:]

    def keep(self, slot: int, base: int, path: Sequence[int]) -> None:
        held = self.tokens[slot]
        self.tokens[slot] = held[:base] + [held[base + node] for node in path]

    def forward(self, rows: Sequence[Row], hidden_layers: Sequence[int] = ()) -> ForwardResult:
        self.passes.append(list(rows))
        wanted: list[int] = []
        for row in rows:
            self.tokens[row.slot] += [*row.tokens, *row.draft.tokens]
            assert len(self.tokens[row.slot]) <= self.context_length, "a pass went past the context"
            if row.wanted:
                wanted += [*row.tokens[-row.wanted :], *row.draft.tokens]
        return ForwardResult(self.table[wanted] if wanted else torch.empty(0, self.vocab_size))


def cycle(vocab: int) -> ToyModel:
    """Greedily counts 0, 1, 2, ... and starts again."""
    return ToyModel(10.0 * torch.roll(torch.eye(vocab), 1, dims=1))


class Oracle:
    """A drafter that knows what a greedy `cycle` will say, and errs where it is told to.

    Args:
        vocab: of the cycle.
        wrong_at: depths (from 1) at which it drafts the token before the right one.
    """

    def __init__(self, vocab: int, wrong_at: Sequence[int] = (), name: str = "oracle") -> None:
        self.name = name
        self.budgets: list[int] = []
        self.live: set[int] = set()
        self.seen: Mapping[int, list[int]] = {}
        self._vocab = vocab
        self._wrong_at = set(wrong_at)

    def start(self, request: Request) -> None:
        self.live.add(request.id)
        self.seen = {**self.seen, request.id: list(request.tokens)}

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        self.seen[request.id].extend(tokens)
        assert self.seen[request.id] == request.tokens

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        self.budgets += budgets
        return [Draft.chain(self._chain(r.tokens[-1], b), self.name) for r, b in zip(requests, budgets, strict=True)]

    def stop(self, request: Request) -> None:
        self.live.remove(request.id)

    def _chain(self, last: int, budget: int) -> list[int]:
        return [(last + depth - (depth in self._wrong_at)) % self._vocab for depth in range(1, budget + 1)]
