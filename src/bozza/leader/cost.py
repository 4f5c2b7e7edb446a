"""What a step costs on this machine, in seconds, learned from whole served steps.

A step without drafting takes `pass_seconds`: a curve over the tokens that it computes (straight between knots, since
what a pass costs bends where kernels change), plus so much for each further request and each cached token. One call of
a drafter takes `draft_seconds`, linear in what it was asked for and in what it has to read before.

Both start from a calibration and follow what is served: a common drift for a machine that gets slower or faster, and
small corrections of the knots near what was run. Each correction is bounded, so that one stall moves little.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bozza.core import StepStats
from bozza.errors import ConfigError

GRID = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # knots of a law that is given as a straight line
CLIP = 0.3  # the largest log-ratio that one step counts for
DRIFT = 0.05  # part of it that moves all of the curve
BEND = 0.05  # and the nearest knots
FOLLOW = 0.1  # part of an error that moves a drafter's weights
UNITS = (1.0, 8.0, 16.0, 4096.0, 256.0)  # typical sizes of a drafter's features, so that all of them learn
VERIFY_KEYS = {"base", "per_token", "per_cached", "per_row", "knots"}
DRAFTER_KEYS = ("base", "per_depth", "per_token", "per_cached", "per_read")


class Asked(NamedTuple):
    """One call of a drafter."""

    requests: int
    depth: int  # largest budget
    tokens: int  # budgets of all requests together
    cached: int  # tokens that these requests have read
    unread: int = 0  # those of them that the drafter has not read yet: it does so before it drafts


class CostModel:
    """Predicts and learns.

    Args:
        knots: (tokens in the pass, seconds of the step), ascending.
        per_row: seconds for each request after the first.
        per_cached: seconds for each cached token.
        drafters: name -> seconds per call, per token of the largest budget, per token of all budgets, per cached token,
            per token that it has to read first.
        copies: each request stands for so many that behave alike; what is asked about one is answered for all.
    """

    def __init__(
        self,
        knots: Mapping[int, float],
        per_row: float = 0.0,
        per_cached: float = 0.0,
        drafters: Mapping[str, Sequence[float]] | None = None,
        copies: int = 1,
    ) -> None:
        self._tokens = sorted(knots)
        self._seconds = [knots[tokens] for tokens in self._tokens]
        self._per_row = per_row
        self._per_cached = per_cached
        self._drafters = {name: list(weights) for name, weights in (drafters or {}).items()}
        self._copies = copies
        self._drift = 1.0

    @classmethod
    def from_document(cls, document: Mapping[str, Any], copies: int = 1) -> CostModel:
        """Read {"verify": {...}, "overhead": s, "drafters": {NAME: {...}}}, all in seconds.

        "verify" has "per_cached" and either "base" and "per_token" or "knots": [[tokens, seconds], ...] and "per_row";
        a drafter has "base", "per_depth", "per_token", "per_cached", "per_read". What is absent is 0.

        Raises:
            ConfigError: a key is unknown or missing, or a value is no such number.
        """
        _known(document, {"verify", "overhead", "drafters", "cap"}, "costs")
        verify = document.get("verify")
        if not isinstance(verify, Mapping) or not ({"base", "knots"} & set(verify)):
            raise ConfigError('costs: write {"verify": {"base": s, "per_token": s, "per_cached": s}, ...}, in seconds')
        _known(verify, VERIFY_KEYS, "costs, verify")
        if "knots" in verify and {"base", "per_token"} & set(verify):
            raise ConfigError("costs, verify: knots take the place of base and per_token, drop one of them")
        overhead = _number(document, "overhead", "costs")
        knots = _knots(verify["knots"]) if "knots" in verify else _line(verify)
        drafters = {}
        if not isinstance(given := document.get("drafters", {}), Mapping):
            raise ConfigError('costs, drafters: write {NAME: {"base": s, ...}, ...}, in seconds')
        for name, entry in given.items():
            _known(entry, set(DRAFTER_KEYS), f"costs, drafter {name}")
            drafters[name] = [_number(entry, key, f"costs, drafter {name}") for key in DRAFTER_KEYS]
        return cls(
            {tokens: seconds + overhead for tokens, seconds in knots.items()},
            _number(verify, "per_row", "costs, verify"),
            _number(verify, "per_cached", "costs, verify"),
            drafters,
            copies,
        )

    def document(self) -> dict[str, Any]:
        """The present state, as `from_document` reads it."""
        return {
            "verify": {
                "knots": [[t, s * self._drift] for t, s in zip(self._tokens, self._seconds, strict=True)],
                "per_row": self._per_row * self._drift,
                "per_cached": self._per_cached * self._drift,
            },
            "overhead": 0.0,
            "drafters": {
                name: dict(zip(DRAFTER_KEYS, weights, strict=True)) for name, weights in self._drafters.items()
            },
        }

    def pass_seconds(self, rows: int, tokens: int, cached: int) -> float:
        """A step without drafting: `rows` requests, `tokens` computed, `cached` attended to."""
        copies = self._copies
        curve = self._curve(tokens * copies)
        rest = self._per_row * (rows * copies - 1) + self._per_cached * cached * copies
        return (curve + rest) * self._drift

    def draft_seconds(self, name: str, requests: int, depth: int, tokens: int, cached: int, unread: int = 0) -> float:
        """One call of a drafter; see `Asked`. 0 for a drafter that has never been seen."""
        if (weights := self._drafters.get(name)) is None:
            return 0.0
        base, per_depth, per_token, per_cached, per_read = weights
        sized = per_token * tokens + per_cached * cached + per_read * unread
        return base + per_depth * depth + sized * self._copies

    def reading_seconds(self, name: str, unread: int) -> float:
        """The part of a call that goes to reading what the drafter has missed."""
        weights = self._drafters.get(name)
        return weights[-1] * unread * self._copies if weights else 0.0

    def learn(self, step: StepStats, asked: Mapping[str, Asked]) -> None:
        """Take in a served step, and what its drafters were asked for."""
        drafting = {name: spent - step.read_seconds.get(name, 0.0) for name, spent in step.draft_seconds.items()}
        self._learn_pass(step, step.total_seconds - sum(drafting.values()))
        for name, call in asked.items():
            if name in drafting:
                self._learn_draft(name, call, drafting[name])

    def _learn_pass(self, step: StepStats, seconds: float) -> None:
        expected = self.pass_seconds(step.rows, step.new_tokens, step.cached_tokens)
        if seconds <= 0.0 or expected <= 0.0:
            return
        off = max(-CLIP, min(CLIP, math.log(seconds / expected)))
        self._drift *= math.exp(DRIFT * off)
        place, share = self._between(step.new_tokens * self._copies)
        share = min(share, 1.0)
        self._seconds[place] *= math.exp(BEND * off * (1.0 - share))
        if place + 1 < len(self._seconds):
            self._seconds[place + 1] *= math.exp(BEND * off * share)

    def _learn_draft(self, name: str, call: Asked, seconds: float) -> None:
        if name not in self._drafters:
            self._drafters[name] = [seconds, *[0.0] * (len(DRAFTER_KEYS) - 1)]
            return
        expected = self.draft_seconds(name, *call)
        most = max(expected, 1e-6)
        error = max(-most / 2, min(most / 2, seconds - expected))
        given = (1, call.depth, *(size * self._copies for size in (call.tokens, call.cached, call.unread)))
        sizes = [size / unit for size, unit in zip(given, UNITS, strict=True)]
        step = FOLLOW * error / sum(size * size for size in sizes)
        weights = self._drafters[name]
        for index, (size, unit) in enumerate(zip(sizes, UNITS, strict=True)):
            if index == 0 or weights[index] > 0.0:  # what the calibration found no cost in stays free
                weights[index] = max(0.0, weights[index] + step * size / unit)

    def _curve(self, tokens: int) -> float:
        place, share = self._between(tokens)
        seconds = self._seconds[place]
        return seconds + share * (self._seconds[place + 1] - seconds) if share else seconds

    def _between(self, tokens: int) -> tuple[int, float]:
        """The knot before so many tokens, and which part of the way to the next one they are; > 1 beyond the last."""
        knots = self._tokens  # asked for a dozen times in a step of every request, so there is little in here
        place, last = bisect_right(knots, tokens) - 1, len(knots) - 2
        if place < 0 or last < 0:
            return 0, 0.0
        if place > last:
            place = last
        return place, (tokens - knots[place]) / (knots[place + 1] - knots[place])


def _line(verify: Mapping[str, Any]) -> dict[int, float]:
    base, per_token = _number(verify, "base", "costs, verify"), _number(verify, "per_token", "costs, verify")
    return {tokens: base + per_token * tokens for tokens in GRID}


def _knots(given: Any) -> dict[int, float]:
    try:
        knots = {int(tokens): float(seconds) for tokens, seconds in given}
    except (TypeError, ValueError, OverflowError):  # infinitely many tokens
        knots = {}
    if not knots or min(knots) < 1 or not all(seconds > 0.0 and math.isfinite(seconds) for seconds in knots.values()):
        raise ConfigError("costs, verify: knots are [[tokens, seconds], ...], each at least 1 and above 0")
    return knots


def _known(entry: Any, keys: set[str], place: str) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place}: this is an object of {', '.join(sorted(keys))}")
    if unknown := sorted(set(entry) - keys):
        raise ConfigError(f"{place}: unknown key '{unknown[0]}', use {', '.join(sorted(keys))}")


def _number(entry: Mapping[str, Any], key: str, place: str) -> float:
    value = entry.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0.0:
        raise ConfigError(f"{place}: {key} is {value!r}, use seconds of at least 0")
    return float(value)
