"""From measured steps to a cost document: medians of equal steps, then the law of `bozza.leader.cost`."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bozza.leader.cost import DRAFTER_KEYS

LEAST = 1e-7  # seconds: a clock may stand still, a pass that costs nothing is nothing to reckon with
FAR = 512  # tokens of a knot that is not measured: the slope of the upper knots goes on to here


class PassTime(NamedTuple):
    """A step without its drafting."""

    rows: int
    tokens: int  # computed
    cached: int  # attended to in the store
    seconds: float


class DraftTime(NamedTuple):
    """One call of a drafter."""

    name: str
    requests: int
    depth: int  # budget of each request
    seconds: float


class LateDraft(NamedTuple):
    """A draft of one token for one request of which the drafter had read nothing."""

    name: str
    unread: int
    seconds: float


def cost_document(
    passes: Sequence[PassTime],
    distant: Sequence[PassTime],
    drafts: Sequence[DraftTime],
    late: Sequence[LateDraft] = (),
) -> dict[str, Any]:
    """What `CostModel.from_document` reads, in seconds.

    Args:
        passes: over few cached tokens; some with one row.
        distant: passes over one token with many cached ones; without any, these cost nothing.
        drafts: calls of all drafters.
        late: what shows what reading costs them; without any, it costs nothing.
    """
    per_cached = _per_cached(passes, distant)
    near = [step._replace(seconds=max(LEAST, step.seconds - per_cached * step.cached)) for step in passes]
    single = _medians((step.tokens, step.seconds) for step in near if step.rows == 1)
    knots = dict(zip(single, non_decreasing(list(single.values())), strict=True))
    many = _medians(((step.rows, step.tokens), step.seconds) for step in near if step.rows > 1)
    further = [(seconds - _between(knots, tokens)) / (rows - 1) for (rows, tokens), seconds in many.items()]
    names = dict.fromkeys(call.name for call in drafts)
    return {
        "verify": {
            "knots": [[tokens, seconds] for tokens, seconds in _prolonged(knots).items()],
            "per_row": max(0.0, statistics.median(further)) if further else 0.0,
            "per_cached": per_cached,
        },
        "overhead": 0.0,
        "drafters": {
            name: draft_law(
                [call for call in drafts if call.name == name], [call for call in late if call.name == name]
            )
            for name in names
        },
    }


def draft_law(calls: Sequence[DraftTime], late: Sequence[LateDraft] = ()) -> dict[str, float]:
    """Seconds of one drafter per call, per token of the budget, of all requests and to be read first, none below 0.

    What was not varied has no share: with one request per call all tokens count as depth, with one token per request
    all depth counts as base.
    """
    times = _medians(((call.requests, call.depth), call.seconds) for call in calls)
    columns = {"base": [1.0] * len(times)}
    if len({depth for _, depth in times}) > 1:
        columns["per_depth"] = [float(depth) for _, depth in times]
    if len({requests for requests, _ in times}) > 1:
        columns["per_token"] = [float(requests * depth) for requests, depth in times]
    law = dict.fromkeys(DRAFTER_KEYS, 0.0) | _fit(columns, list(times.values()))
    ready = law["base"] + law["per_depth"] + law["per_token"]  # a draft of one token with nothing to read
    if late:
        law["per_read"] = max(0.0, statistics.median((call.seconds - ready) / call.unread for call in late))
    return law


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence in the sense of least squares: neighbours out of order share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _fit(columns: dict[str, list[float]], seconds: list[float]) -> dict[str, float]:
    """Least squares of relative errors; a column whose weight would be negative is left out."""
    scale = 1.0 / np.maximum(np.array(seconds), LEAST)
    while columns:
        matrix = np.array(list(columns.values())).T * scale[:, None]
        weights = dict(zip(columns, np.linalg.lstsq(matrix, np.array(seconds) * scale)[0].tolist(), strict=True))
        worst = min(weights, key=lambda name: weights[name])
        if weights[worst] >= 0.0:
            return weights
        columns = {name: column for name, column in columns.items() if name != worst}
    return {}


def _per_cached(passes: Sequence[PassTime], distant: Sequence[PassTime]) -> float:
    """What a cached token adds to a pass over one token."""
    few = [step for step in passes if (step.rows, step.tokens) == (1, 1)]
    if not few or not distant:
        return 0.0
    cached, seconds = (
        statistics.median(getattr(step, name) for step in distant)
        - statistics.median(getattr(step, name) for step in few)
        for name in ("cached", "seconds")
    )
    return max(0.0, seconds / cached) if cached > 0 else 0.0


def _prolonged(knots: dict[int, float]) -> dict[int, float]:
    """The knots and one far away, on the line from the middle knot to the last.

    A cost model goes on as between its last two knots, and of these one bad median would decide the slope.
    """
    sizes = list(knots)
    first, last = sizes[len(sizes) // 2 - 1 if len(sizes) > 1 else 0], sizes[-1]
    if last in (first, FAR) or last > FAR:
        return knots
    slope = (knots[last] - knots[first]) / (last - first)
    return knots | {FAR: knots[last] + slope * (FAR - last)}


def _between(knots: dict[int, float], tokens: int) -> float:
    """Straight between knots, and beyond the last as before it."""
    sizes = list(knots)
    place = max(0, min(bisect_right(sizes, tokens) - 1, len(sizes) - 2))
    first, second = sizes[place], sizes[min(place + 1, len(sizes) - 1)]
    if first == second:
        return knots[first]
    return knots[first] + (knots[second] - knots[first]) * (tokens - first) / (second - first)


def _medians(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """The median of the values of each key, keys ascending."""
    found: dict[Any, list[float]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: statistics.median(found[key]) for key in sorted(found)}
