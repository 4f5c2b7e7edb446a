"""What speculation can be expected to gain, from how often a drafter is right and what it costs.

The formulas are those of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding"
(ICML 2023, arXiv 2211.17192). They hold for a chain of drafted tokens of which each is accepted with the same
probability, independently of the others, and for a target pass that takes equally long for one token and for
gamma + 1. Real acceptance comes in runs and real passes grow, so a measured factor may lie on either side.

In all functions:

- `alpha`, 0 to 1: the probability that a drafted token is accepted, given that those before it were.
- `gamma`, a whole number from 0: tokens drafted for each target pass.
- `cost`, from 0, in passes of the target: what one more drafted token costs. The paper's c for time, its c-hat for
  arithmetic operations per token.

All raise ConfigError for a number that is out of range.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from bozza.errors import ConfigError

MOST_GAMMA = 64


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens that a target pass commits, its own included: (1 - alpha^(gamma + 1)) / (1 - alpha) (equation 1)."""
    _check(alpha, gamma)
    total = 1.0
    for _ in range(gamma):  # the same as a sum of powers: right at alpha = 1 and near it, where the quotient is not
        total = 1.0 + alpha * total
    return total


def walltime_factor(alpha: float, gamma: int, cost: float) -> float:
    """How many times as fast as plain decoding (theorem 3.8); below 1, speculation loses."""
    _check(alpha, gamma, cost)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1.0)


def operations_factor(alpha: float, gamma: int, cost: float) -> float:
    """How many times as many arithmetic operations per token as plain decoding (theorem 3.11)."""
    _check(alpha, gamma, cost)
    return (gamma * cost + gamma + 1.0) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, cost: float, most: int = MOST_GAMMA) -> int:
    """The gamma from 0 to `most` with the largest wall-time factor, the smallest of several; 0: do not speculate.

    It is above 0 exactly when alpha > cost, and the factor is then at least (1 + alpha) / (1 + cost) (corollary 3.9).
    """
    _check(alpha, most, cost)
    return max(range(most + 1), key=lambda gamma: walltime_factor(alpha, gamma, cost))


def _check(alpha: float, gamma: Any, cost: float = 0.0) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha is {alpha}: use a probability, 0 to 1")
    if not isinstance(gamma, Integral) or gamma < 0:
        raise ConfigError(f"gamma is {gamma}: use a whole number, 0 (do not speculate) or more")
    if not 0.0 <= cost < math.inf:
        raise ConfigError(f"cost is {cost}: use a finite number, 0 (drafting is free) or more")
