"""What passes and drafts cost on this machine, measured in a few seconds as whole served steps.

A scripted leader runs the real engine through a list of shapes: so many requests, so many tokens to verify that nobody
believes in, and now and then a question to each paid drafter. Shapes take turns in a shuffled order, so that a machine
that stalls does not spoil one of them; what counts is the median of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bozza.leader.base import Leader
from bozza.study.fit import DraftTime, PassTime, cost_document
from bozza.study.stand import TEXT, Shapes, Stand

if TYPE_CHECKING:
    from bozza.engine import Engine

BATCH = 16  # most requests in a pass
ROUNDS = 3  # least number of times that each shape is run
PATIENCE = 120.0  # passes over one token that a calibration may take as long as: a small model needs no seconds
LONG = 384  # tokens of the prompt that shows what cached tokens cost, and what drafters take to read it
LATE = 64  # tokens of one that shows the latter alone, where there is no time for more

# From thorough to hasty: the first that can be run often enough in the time given is.
GRADES = (
    Shapes((1, 2, 4, 8, 12, 16, 24, 32, 48, 64), (4, 8, 16), LONG),
    Shapes((1, 2, 4, 8, 16, 32, 64), (4, 16), LONG),
    Shapes((1, 4, 16, 64), (4, 16), LONG),
    Shapes((1, 4, 16, 64), (4,), LONG),
    Shapes((1, 8, 32), (4,), 0),
)


def calibrate(
    engine_with: Callable[[Leader], Engine],
    paid: Mapping[str, int],
    *,
    text: Sequence[int] = (),
    batch: int = BATCH,
    seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure a cost document for `bozza.leader.cost.CostModel.from_document`.

    Args:
        engine_with: an engine that is used for nothing else, with its drafters, under a given leader. Its slots are all
            given back; what its model's store grew to stays.
        paid: names of the drafters whose time counts -> the most tokens that each is asked for.
        text: token ids of a prompt that the model has something to say to. After random tokens, which are used
            without one, drafters that grow trees as far as they are sure soon stop.
        batch: most requests that the engine runs at once.
        seconds: about how long it may take; a round of the hastiest shapes is always run.
        clock: seconds, monotonic; the engine's own.
        seed: decides prompts, junk and the order of the shapes.
    """
    stand = Stand(engine_with, paid, text, seed)
    try:
        return _measure(stand, batch, seconds, clock)
    finally:
        stand.clear()


def _measure(stand: Stand, batch: int, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    began = clock()
    widest = min(GRADES[0].tokens[-1], max(2, stand.context // 2))
    for tokens in (1, widest):  # memory is taken, code is loaded
        stand.run(1, tokens)
    plain = min(stand.run(1, 1) for _ in range(2))
    wide = stand.run(1, widest)
    guess = Guess(plain, max(0.0, wide - plain) / widest, stand.warm_drafters())
    seconds = min(seconds, PATIENCE * plain)
    end = began + seconds
    shapes = _affordable(end - clock(), guess, batch, stand.context)
    passes: list[PassTime] = []
    drafts: list[DraftTime] = []
    for turn in range(2 * ROUNDS):
        started = clock()
        stand.round(shapes, passes, drafts)
        now = clock()
        enough = turn + 1 >= ROUNDS and 2 * now - started + guess.long(shapes.long) > end
        if enough or now > end + seconds / 2:  # a machine that stalls: rather inexact than late
            break
    distant, late = [], []
    if shapes.long or (guess.drafting and widest >= LATE):
        stand.read_prompt(shapes.long or LATE)
        distant = stand.passes(ROUNDS) if shapes.long else []
        late = stand.late_drafts() if guess.drafting else []
    return cost_document(passes, distant, drafts, late)


class Guess(NamedTuple):
    """What things take, roughly, before they are measured: seconds."""

    plain: float  # a pass over one token
    per_token: float
    drafting: float  # all drafters, once

    def round(self, shapes: Shapes) -> float:
        """One round."""
        steps = [1, 1, *shapes.tokens, *(count for rows in shapes.rows for count in (rows, rows))]
        asked = [1, *shapes.rows[:1]] if self.drafting else []
        for rows in asked:  # a text to read, and one draft in vain
            steps += [rows * TEXT, rows, rows]
        return sum(self.plain + self.per_token * tokens for tokens in steps) + 2 * self.drafting * len(asked)

    def long(self, length: int) -> float:
        """The passes with a long prompt, which drafters read too: hardly slower than the model."""
        readers = 2 if self.drafting else 1
        tokens = length or (LATE if self.drafting else 0)
        return ((2 + ROUNDS) * self.plain if length else 0.0) + readers * self.per_token * tokens


def _affordable(seconds: float, guess: Guess, batch: int, context: int) -> Shapes:
    """The most thorough shapes that leave time for enough rounds."""
    widest = max(2, context // 2)
    for grade in GRADES:
        tokens = tuple(sorted({min(tokens, widest) for tokens in grade.tokens}))
        rows = tuple(sorted({min(rows, batch) for rows in grade.rows} - {1}))
        shapes = Shapes(tokens, rows, grade.long if grade.long <= widest else widest if widest >= 128 else 0)
        if ROUNDS * guess.round(shapes) + guess.long(shapes.long) <= seconds:
            break
    return shapes
