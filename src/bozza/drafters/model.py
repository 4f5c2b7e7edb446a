"""A smaller model drafts: a chain, one pass of all its requests per token, or trees, one pass per level.

Under a rule that accepts by equality (`coupled`) it draws with the target's own noise: where both models give a token
the best chance, they draw the same one. Beside acceptance draws (`rejection`, `block`) it draws a chain with a noise
of its own and says from what, with the same temperature, filters, penalties and bans as the target. The nodes of a tree
are the likeliest tokens, no draws, so every rule takes them as point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.slots import CHUNK as CHUNK
from bozza.drafters.slots import Slots
from bozza.drafters.tree import Rank, Tree, grow
from bozza.models.runner import Model
from bozza.sampling.chance import Coins
from bozza.sampling.processors import Place
from bozza.sampling.sampler import Sampler


class Dialect(Protocol):
    """How the tokens of the draft model relate to the target's. Drawn tokens are in ids of the dialect's own."""

    def context(self, request: Request) -> tuple[Sequence[int], int]:
        """A request in the draft model's tokens, and how many of these will be the same at every later call."""
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [rows, draft vocab] over the ids that are drawn from. Those of the target's tokens are its own."""
        ...

    def spoken(self, token: int) -> int | None:
        """The draft model's token for a drawn one; None when it has none, and can go no further."""
        ...

    def written(self, drawn: Sequence[int]) -> Sequence[int]:
        """The target's tokens for drawn ones; the same ones where laws are to be stated."""
        ...

    def forget(self, request: Request) -> None:
        """The request is gone."""
        ...


class SameTokens:
    """`Dialect` of a draft model with the target's own ids.

    Args:
        vocab_size: least of both; a token at or above it is never proposed, however far either embedding is padded.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size

    def context(self, request: Request) -> tuple[Sequence[int], int]:
        """See `Dialect.context`."""
        return request.tokens, len(request.tokens)

    def spread(self, logits: Tensor) -> Tensor:
        """See `Dialect.spread`."""
        return logits[:, : self._vocab]

    def spoken(self, token: int) -> int | None:
        """See `Dialect.spoken`."""
        return token

    def written(self, drawn: Sequence[int]) -> Sequence[int]:
        """See `Dialect.written`."""
        return drawn

    def forget(self, request: Request) -> None:
        """See `Dialect.forget`."""


@dataclass(slots=True)
class _Draft:
    """A chain on its way."""

    request: Request
    budget: int
    coins: Coins
    pending: list[int]  # tokens that the draft model must read for the next one
    drawn: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)


class ModelDrafter:
    """Owns its slots in the draft model. What the target rejected is rolled back when the request drafts next.

    Args:
        model: the draft model, ready to run.
        vocab_size: the target's.
        coupled: draw with the noise of the output (see `Rule.coupled`).
        width: most children of a node, and nodes that get children at one level; 1 drafts a chain.
        dialect: for a draft model with other tokens than the target's.
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        name: str = "model",
        *,
        coupled: bool = True,
        width: int = 1,
        dialect: Dialect | None = None,
    ) -> None:
        self.name = name
        self._coupled = coupled
        self._sampler = Sampler(in_turn=False)
        self._rank = Rank(coupled)
        self._width = width
        self._model = model
        self._slots = Slots(model)
        self._dialect: Dialect = dialect or SameTokens(min(vocab_size, model.vocab_size))

    def start(self, request: Request) -> None:
        """See `Drafter.start`; a slot is taken at the first draft."""

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the request's tokens are compared with what was fed at the next draft."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`. A request that the draft model cannot read gets an empty draft.

        That is one which has outgrown its context, or holds a token that only the target has.
        """
        begun = [self._begin(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        able = [draft for draft in begun if draft is not None]
        self._slots.read_prompts({draft.request.id: draft.pending for draft in able})
        drafts = self._draw_chains(able) if self._width == 1 else self._grow_trees(able)
        return [drafts.get(request.id, NO_DRAFT) for request in requests]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        self._slots.free(request.id)
        self._dialect.forget(request)

    def _begin(self, request: Request, budget: int) -> _Draft | None:
        context, settled = self._dialect.context(request)
        budget = min(budget, self._model.context_length - len(context) + 1)
        unread = self._slots.unread(request.id, context, settled) if context and budget > 0 else None
        return None if unread is None else _Draft(request, budget, Coins(request, f"draft {self.name}"), unread)

    def _draw_chains(self, drafts: Sequence[_Draft]) -> dict[int, Draft]:
        for depth in range(max((draft.budget for draft in drafts), default=0)):
            # A law of nothing but NaN gives no token, and its chain ends there.
            active = [draft for draft in drafts if draft.budget > depth and len(draft.drawn) == depth]
            if not active:
                break
            logits = self._read(active)
            places = [Place(draft.request, tuple(self._dialect.written(draft.drawn))) for draft in active]
            if self._coupled:
                for draft, token in zip(active, self._sampler.draw(logits, places), strict=True):
                    self._take(draft, token)
            else:
                for draft, law in zip(active, self._sampler.laws(logits, places), strict=True):
                    if bool(law.sum() > 0.0):
                        self._take(draft, draft.coins.pick(law), law)
        return {draft.request.id: self._chain(draft) for draft in drafts}

    def _take(self, draft: _Draft, token: int, law: Tensor | None = None) -> None:
        """Lengthen a chain, unless the draft model has no such token: then it ends, as a shorter guess."""
        spoken = self._dialect.spoken(token)
        if spoken is None:
            return
        draft.drawn.append(token)
        draft.pending = [spoken]
        if law is not None:
            draft.laws.append(law)

    def _chain(self, draft: _Draft) -> Draft:
        return Draft.chain(self._dialect.written(draft.drawn)[: draft.budget], self.name, draft.laws)

    def _read(self, drafts: Sequence[_Draft]) -> Tensor:
        """Feed what is pending; logits of the next tokens [drafts, ids of the dialect]."""
        return self._dialect.spread(self._slots.read({draft.request.id: draft.pending for draft in drafts}))

    def _grow_trees(self, drafts: Sequence[_Draft]) -> dict[int, Draft]:
        if not drafts:
            return {}
        trees = [Tree(draft.request, draft.budget) for draft in drafts]
        grow(trees, self._read(drafts), self._expand, self._rank, self._width)
        for tree in trees:
            self._slots.roll_back(tree.request.id)
        return {tree.request.id: tree.draft(self.name) for tree in trees}

    def _expand(self, asked: Sequence[tuple[Tree, Draft, int]]) -> Tensor:
        """See `bozza.drafters.tree.Expand`."""
        spoken = [
            (tree.request.id, replace(draft, tokens=self._speak(draft.tokens)), fed) for tree, draft, fed in asked
        ]
        return self._dialect.spread(self._slots.expand(spoken))

    def _speak(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Tokens of a tree. What the draft model lacks is never likely enough to be in one."""
        return tuple(self._dialect.spoken(token) or 0 for token in tokens)
