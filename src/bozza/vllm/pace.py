"""How long steps take, as the leader is to hear it.

vLLM tells a proposer no times, so a step lasts from one call to the next. That is its cost only if every row went on a
request of the call before: a step that also read a prompt, or came after a pause, says nothing about drafts. It is
taken to cost what was expected.

A cost model that starts as a guess creeps slowly to where it should be, and bends on the way. So the first steps are
plain and set its level, and the first ones with drafts set what a drafted token costs on top. From then on the leader
follows each step.

A token that is taken to cost too much is not drafted, and so the leader never finds out that it costs less: those steps
may have fallen into a bad moment. So when hardly anything was drafted for long, it is found out again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bozza.leader.adaptive import Adaptive
from bozza.leader.cost import CostModel
from bozza.vllm.options import DEFAULT_COSTS

PLAIN, DRAFTED = 5, 9  # steps of either kind that a guess is replaced after
WARM = 5  # steps with drafts before these: the first ones may wait for kernels to be built
AGAIN, SELDOM = 1024, 32  # of so many measured steps so few had drafts: find out again
PATIENCE = 32  # steps, measured or not, after which drafts are not held back any longer
LEAST = 1e-3  # of a plain step: less than this no token is taken to cost


class Pace:
    """One for each leader.

    Args:
        leader: whose cost model is used, and replaced as long as it is a guess.
        follow: whether times count at all.
        known: the cost model is no guess.
    """

    def __init__(self, leader: Adaptive, follow: bool, known: bool) -> None:
        self._leader = leader
        self._follow = follow
        self._known = known or not follow
        self._fitted = not self._known  # by what was found out here
        self._ratios: list[float] = []  # of plain steps to what was expected
        self._steps = 0
        self._recent, self._drafting = 0, 0  # measured steps since what a token costs was found out, those with drafts
        self._extra: list[float] = []  # seconds per drafted token of steps with drafts

    @property
    def quiet(self) -> bool:
        """Whether the next step had better be plain."""
        return not self._known and len(self._ratios) < PLAIN and self._steps < PATIENCE

    def seconds(self, rows: int, drafted: int, cached: int, measured: float | None) -> float:
        """What a step cost.

        Args:
            rows: requests in the pass.
            drafted: tokens that it verified.
            cached: tokens that it attended to.
            measured: seconds from call to call; None if these say nothing about the step.
        """
        self._steps += 1
        useful = self._follow and measured is not None and measured > 0.0
        if useful and not self._known:
            useful = self._fit(rows, drafted, cached, measured or 0.0)
        elif useful and self._fitted:
            self._doubt(rows, drafted, cached)
        return measured if useful and measured else self._leader.costs.pass_seconds(rows, rows + drafted, cached)

    def _fit(self, rows: int, drafted: int, cached: int, measured: float) -> bool:
        """Take in a step while the costs are a guess; whether the leader should learn from it too."""
        costs = self._leader.costs
        plain = costs.pass_seconds(rows, rows, cached)
        if drafted == 0:
            if len(self._ratios) == PLAIN:
                return True
            self._ratios.append(measured / plain)
            if len(self._ratios) == PLAIN:
                self._replace(_scaled(costs.document(), statistics.median(self._ratios)))
            return False
        if len(self._ratios) < PLAIN:
            return False
        self._extra.append((measured - plain) / drafted)
        if len(self._extra) == WARM + DRAFTED:
            each = max(statistics.median(self._extra[WARM:]), LEAST * plain)
            self._replace(_steeper(costs.document(), rows, plain, each))
            self._known = True
        return False

    def _doubt(self, rows: int, drafted: int, cached: int) -> None:
        """Go back to the guess, at the level of now, if for long hardly a draft was tried."""
        self._recent += 1
        self._drafting += drafted > 0
        if self._recent < AGAIN:
            return
        if self._drafting <= SELDOM:
            guess = CostModel.from_document(DEFAULT_COSTS)
            level = self._leader.costs.pass_seconds(rows, rows, cached) / guess.pass_seconds(rows, rows, cached)
            self._replace(_scaled(guess.document(), level))
            self._known, self._extra = False, []
        self._recent, self._drafting = 0, 0

    def _replace(self, document: Mapping[str, Any]) -> None:
        self._leader.costs = CostModel.from_document(document)


def _scaled(document: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The same machine, so many times slower."""
    verify = dict(document["verify"])
    knots = [[tokens, seconds * factor] for tokens, seconds in verify.pop("knots")]
    return {**document, "verify": {"knots": knots} | {name: seconds * factor for name, seconds in verify.items()}}


def _steeper(document: Mapping[str, Any], rows: int, plain: float, each: float) -> dict[str, Any]:
    """The same machine, on which a step with more than `rows` tokens takes `each` for every further one."""
    verify = document["verify"]
    knots = [[tokens, seconds] for tokens, seconds in verify["knots"] if tokens < rows]
    knots += [[rows, plain]]
    knots += [[tokens, plain + each * (tokens - rows)] for tokens, _ in verify["knots"] if tokens > rows]
    return {**document, "verify": {**verify, "knots": knots}}
