"""Policies that learn nothing: never draft, and always draft the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bozza.core import Draft, Load, Plan, Request, StepStats
from bozza.drafters.merge import merge
from bozza.leader.base import Ask


class Off:
    """Plain decoding."""

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """See `Leader.plan`."""
        return Plan()

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """See `Leader.learn`."""


class Fixed:
    """The same number of tokens from each drafter at every step, all of them verified.

    Args:
        tokens: drafter name -> tokens to draft, in order of trust.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """See `Leader.plan`."""
        found: dict[int, list[Draft]] = {}
        for name, tokens in self._tokens.items():
            for id_, draft in ask(name, dict.fromkeys(load.room, tokens)).items():
                found.setdefault(id_, []).append(draft)
        if load.chains:  # branches that are thrown away need no room
            return Plan({id_: merge(drafts, sum(map(len, drafts))) for id_, drafts in found.items()})
        return Plan({id_: merge(drafts, load.room[id_]) for id_, drafts in found.items()})

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """See `Leader.learn`."""
