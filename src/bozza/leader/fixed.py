"""Policies that learn nothing: never draft, and always draft the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bozza.core import Plan, Request, StepStats


class Off:
    """Plain decoding."""

    def plan(self, requests: Sequence[Request]) -> Plan:
        """See `Leader.plan`."""
        return Plan()

    def learn(self, outcome: StepStats) -> None:
        """See `Leader.learn`."""


class Fixed:
    """The same number of tokens from each drafter, at every step.

    Args:
        tokens: drafter name -> tokens to draft.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)

    def plan(self, requests: Sequence[Request]) -> Plan:
        """See `Leader.plan`."""
        return Plan({request.id: self._tokens for request in requests})

    def learn(self, outcome: StepStats) -> None:
        """See `Leader.learn`."""
