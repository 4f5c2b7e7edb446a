"""Traces that nobody recorded, and what things cost there."""

from __future__ import annotations

import random
from typing import Any

from bozza.study.traces import Trace

COSTS: dict[str, Any] = {
    "verify": {"base": 10.0, "per_token": 0.5, "per_cached": 0.01},
    "overhead": 1.0,
    "drafters": {
        "eagle": {"base": 0.25, "per_token": 1.0, "per_cached": 0.002},
        "mtp": {"base": 2.0, "per_token": 0.125, "per_cached": 0.001},
        "ngram": {"base": 0.125, "per_token": 0.0625, "per_cached": 0.0},
    },
}


def seconds(trace: Trace, place: int, drafted: int, **asked: int) -> float:
    """What a step at a place costs, spelled out: `drafted` tokens are verified, and drafters draft what they say."""
    cached = len(trace.prompt) + place - 1
    spent = 10.0 + 0.5 * (1 + drafted) + 0.01 * cached + 1.0
    for name, tokens in asked.items():
        cost = COSTS["drafters"].get(name, {"base": 0.0, "per_token": 0.0, "per_cached": 0.0})
        spent += cost["base"] + cost["per_token"] * tokens + cost["per_cached"] * cached
    return spent


def invented(
    seed: int, length: int = 12, cap: int = 3, vocab: int = 3, names: tuple[str, ...] = ("eagle", "mtp")
) -> Trace:
    """A random trace; with few tokens in its vocabulary it repeats itself."""
    chance = random.Random(seed)
    prompt, output = (tuple(chance.randrange(vocab) for _ in range(size)) for size in (chance.randint(1, 9), length))
    accept = {name: tuple(chance.choice([0, 0, 1, 2, cap]) for _ in output) for name in names}
    return Trace(prompt, output, accept, dict.fromkeys(names, cap))
