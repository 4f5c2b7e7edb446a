"""The best that anyone could have made of a trace: what to draft at each place, for someone who knows the outcome.

At a place a step either drafts nothing, or has one drafter draft k tokens that will all stand, 1 <= k <= a_t; it then
moves on by k + 1 places. Going backwards from the end, the least time to the end is the least of these steps' times
plus the least time from where they lead (dynamic programming, exact, since a step's time depends only on the place).

Nothing else has to be tried. Tokens that will not stand only cost, as long as a larger pass never takes less time. Nor
does a second drafter help: all drafts begin at the same place, so the longest path that stands lies within one of them;
without the others the step commits as much, for less. (`tests/study/test_oracle.py` compares with a search over all
sets of drafters and lengths.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bozza.leader.cost import CostModel
from bozza.study.guesses import Guesser, make_drafters, request_of, standing
from bozza.study.traces import Trace


@dataclass(slots=True)
class Run:
    """What a policy made of one trace, in simulated seconds."""

    tokens: int
    plain_seconds: float  # the same without drafting
    seconds: float = 0.0
    steps: int = 0
    choices: Counter[str] = field(default_factory=Counter)  # steps by who drafted what was verified

    def step(self, choice: str, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.seconds += seconds
        self.choices[choice] += 1

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
            "speedup": self.plain_seconds / self.seconds,
            "choices": dict(self.choices),
        }


class Move(NamedTuple):
    """A step: `tokens` of a drafter, all of which stand; 0 is plain decoding."""

    drafter: str
    tokens: int


class Oracle:
    """Knows how far each drafter is right, and takes the least time.

    Args:
        traces: what is replayed.
        guessers: the drafters that may be asked.
        costs: of a step with one request; seconds.
    """

    def __init__(self, traces: Sequence[Trace], guessers: Sequence[Guesser], costs: CostModel) -> None:
        self._traces = traces
        self._guessers = guessers
        self._costs = costs
        most = max(guesser.tokens for guesser in guessers) if guessers else 0
        self._extra = {guesser.name: self._growth(guesser.name, most) for guesser in guessers}

    def run(self, index: int) -> Run:
        """The least time for a trace."""
        trace = self._traces[index]
        run = Run(len(trace.output), plain_seconds(trace, self._costs))
        place = 0
        moves = self.moves(trace, self.right(index))
        while place < len(moves):
            name, tokens = moves[place]
            cached = len(trace.prompt) + place - 1
            drafting = self._costs.draft_seconds(name, 1, tokens, tokens, cached) if tokens else 0.0
            run.step(name if tokens else "off", drafting + self._costs.pass_seconds(1, 1 + tokens, cached))
            place += tokens + 1
        return run

    def right(self, index: int) -> dict[str, list[int]]:
        """How many tokens each drafter would have right at each place of a trace."""
        trace = self._traces[index]
        right = {
            guesser.name: [min(trace.right(guesser.name, t), guesser.tokens) for t in range(len(trace.output))]
            for guesser in self._guessers
            if guesser.spec is None
        }
        free = [guesser for guesser in self._guessers if guesser.spec is not None]
        return right | _tried(free, trace, index)

    def moves(self, trace: Trace, right: Mapping[str, Sequence[int]]) -> list[Move]:
        """The best step from each place, had one come there."""
        costs, read, length = self._costs, len(trace.prompt) - 1, len(trace.output)
        least = np.zeros(length + 1)  # seconds from a place to the end
        moves = [Move("", 0)] * length
        for place in range(length - 1, -1, -1):
            alone = costs.pass_seconds(1, 1, read + place)
            best = alone + float(least[place + 1])
            for name, known in right.items():
                most = min(known[place], length - place - 1)
                if most < 1:
                    continue
                totals = self._extra[name][:most] + least[place + 2 : place + 2 + most]
                tokens = int(totals.argmin()) + 1
                total = float(totals[tokens - 1]) + alone + costs.draft_seconds(name, 1, 0, 0, read + place)
                if total < best:
                    best, moves[place] = total, Move(name, tokens)
            least[place] = best
        return moves

    def _growth(self, name: str, most: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[most], what 1, 2, ... tokens of a drafter add to a step in which it is asked for none.

        A cost is a part for the tokens plus a part for what is cached (see `CostModel`), so this is the same at all
        places.
        """
        costs = self._costs
        none = costs.pass_seconds(1, 1, 0) + costs.draft_seconds(name, 1, 0, 0, 0)
        some = [costs.pass_seconds(1, 1 + k, 0) + costs.draft_seconds(name, 1, k, k, 0) for k in range(1, most + 1)]
        return np.array(some) - none


def plain_seconds(trace: Trace, costs: CostModel) -> float:
    """Time of a trace without drafting."""
    first = len(trace.prompt) - 1
    return sum(costs.pass_seconds(1, 1, first + place) for place in range(len(trace.output)))


def _tried(free: Sequence[Guesser], trace: Trace, index: int) -> dict[str, list[int]]:
    """How far free drafters are right at each place, by letting them draft their most at each."""
    drafters = make_drafters(free, ())
    request = request_of(trace, index)
    right: dict[str, list[int]] = {name: [] for name in drafters}
    for drafter in drafters.values():
        drafter.start(request)
    for place, token in enumerate(trace.output):
        for guesser in free:
            draft = drafters[guesser.name].draft([request], [guesser.tokens])[0]
            right[guesser.name].append(len(standing(draft, trace.output, place)))
        request.tokens.append(token)
        for drafter in drafters.values():
            drafter.observe(request, [token])
    return right
