"""Drafts what a grammar leaves no choice about: keys and punctuation of a JSON schema, the rest of an alternative."""

from __future__ import annotations

from collections.abc import Sequence

from bozza.core import NO_DRAFT, Draft, Request


class GrammarDrafter:
    """Drafts the forced tokens of requests that have a constraint. Knows nothing about the others."""

    def __init__(self, name: str = "grammar") -> None:
        self.name = name

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the constraint hears of the tokens as one of the request's watches."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            tokens = request.constraint.forced(budget) if request.constraint is not None else []
            drafts.append(Draft.chain(tokens, self.name) if tokens else NO_DRAFT)
        return drafts

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
