"""How long steps take, as the leader is to hear it.

vLLM tells a proposer no times, so a step lasts from one call to the next. That is its cost only if every row went on a
request of the call before: a step that also read a prompt, or came after a pause, says nothing about drafts, and is taken
to cost what was expected.

A cost model that starts as a guess has the wrong level, and while it creeps there its shape bends. So the first `WARM`
measured steps set the level at once; after that the leader follows each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bozza.leader.adaptive import Adaptive
from bozza.leader.cost import CostModel

WARM = 8


class Pace:
    """One for each leader.

    Args:
        leader: whose cost model is used, and replaced once when its level is known.
        follow: whether times count at all.
        known: the level is right already.
    """

    def __init__(self, leader: Adaptive, follow: bool, known: bool) -> None:
        self._leader = leader
        self._follow = follow
        self._known = known
        self._ratios: list[float] = []

    def seconds(self, rows: int, tokens: int, cached: int, measured: float | None) -> float:
        """What a step cost.

        Args:
            rows: requests in the pass.
            tokens: that it computed.
            cached: tokens that it attended to.
            measured: seconds from call to call; None if these say nothing about the step.
        """
        expected = self._leader.costs.pass_seconds(rows, tokens, cached)
        if measured is None or measured <= 0.0 or not self._follow:
            return expected
        if self._known:
            return measured
        self._ratios.append(measured / expected)
        if len(self._ratios) < WARM:
            return expected
        factor = statistics.median(self._ratios)
        self._leader.costs = CostModel.from_document(_scaled(self._leader.costs.document(), factor))
        self._known = True
        return expected * factor


def _scaled(document: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The same machine, so many times slower."""
    verify = dict(document["verify"])
    knots = [[tokens, seconds * factor] for tokens, seconds in verify.pop("knots")]
    return {**document, "verify": {"knots": knots} | {name: seconds * factor for name, seconds in verify.items()}}
