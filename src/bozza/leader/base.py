"""The seam of a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bozza.core import Draft, Load, Plan, Request, StepStats

# A drafter's name, and how many tokens it may draft for each request, by id -> what it drafted. Requests without room
# are left out, and no budget exceeds a request's room.
Ask = Callable[[str, Mapping[int, int]], Mapping[int, Draft]]


class Leader(Protocol):
    """Decides before each step what is drafted and verified, and hears what came of it."""

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """What to verify.

        Args:
            requests: all that are past their prompt.
            load: of the pass that will verify it.
            ask: lets a drafter draft, now. Each may be asked once; what is drafted need not be verified. Of a draft
                with laws no node may be dropped because of what was drawn.
        """
        ...

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """The step that the last plan led to, and the tokens that each request of the plan committed, by id."""
        ...
