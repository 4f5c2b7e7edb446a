"""The seam of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bozza.core import Plan, Request, StepStats


class Leader(Protocol):
    """Plans each step before it runs and hears what came of it."""

    def plan(self, requests: Sequence[Request]) -> Plan:
        """What to draft for `requests`, all of which are decoding. The engine never drafts past a request's limit."""
        ...

    def learn(self, outcome: StepStats) -> None:
        """The step that the last plan led to."""
        ...
