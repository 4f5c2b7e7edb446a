"""Rates: every estimate is a Beta mean, shrunk to that of the next more general key."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.leader.rates import MEMORY, WEIGHT, Key, Rates


def told(rates: Rates, key: Key, right: int, wrong: int) -> None:
    for success in [True] * right + [False] * wrong:
        rates.learn(key, success)


def beta(successes: float, tries: float, parent: float) -> float:
    return (successes + WEIGHT * parent) / (tries + WEIGHT)


@pytest.mark.parametrize("prior", [0.0, 0.3, 1.0])
def test_before_anything_is_seen_the_prior_stands(prior: float) -> None:
    rates = Rates((1, 2))
    assert rates.estimate(("a", 1), prior) == prior
    rates.learn(("b", 1), True)
    assert rates.estimate(("a", 1), prior) == prior  # another drafter's luck says nothing


def test_an_estimate_is_shrunk_to_the_more_general_one() -> None:
    rates = Rates((1, 3))
    told(rates, ("a", "x", 1), 3, 2)
    told(rates, ("a", "y", 2), 1, 3)
    general = beta(4, 9, 0.2)
    assert rates.estimate(("a", "x", 1), 0.2) == pytest.approx(beta(3, 5, general))
    assert rates.estimate(("a", "y", 2), 0.2) == pytest.approx(beta(1, 4, general))


def test_what_is_known_in_general_holds_where_nothing_was_seen() -> None:
    rates = Rates((1, 2, 4))
    told(rates, ("a", "x", 1, 1), 30, 0)
    general = beta(30, 30, 0.5)
    assert rates.estimate(("a", "new", 1, 1), 0.5) == pytest.approx(general)
    # One level closer, and what lies between levels makes no difference.
    assert rates.estimate(("a", "x", 7, 1), 0.5) == pytest.approx(beta(30, 30, general))
    assert rates.estimate(("a", "x", 7, 9), 0.5) == rates.estimate(("a", "x", 7, 1), 0.5)


KEYS = st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=60), KEYS, st.floats(0.0, 1.0))
def test_the_formula_holds_at_all_levels(seen: list[tuple[Key, bool]], key: Key, prior: float) -> None:
    levels: Sequence[int] = (1, 2, 3)
    rates = Rates(levels)
    for other, success in seen:
        rates.learn(other, success)
    expected = prior
    for level in levels:
        mine = [success for other, success in seen if other[:level] == key[:level]]
        expected = beta(sum(mine), len(mine), expected)
    found = rates.estimate(key, prior)
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= found <= 1.0


def test_nothing_fades_before_memory_is_full() -> None:
    rates, half = Rates((1,)), int(MEMORY) // 2
    told(rates, ("a",), half, half)
    assert rates.estimate(("a",), 0.5) == pytest.approx(beta(half, 2 * half, 0.5))
    rates = Rates((1,))
    told(rates, ("a",), half, half + 1)  # the first that is too many
    assert rates.estimate(("a",), 0.5) == pytest.approx(beta(half * (1 - 1 / MEMORY), MEMORY, 0.5))


def test_a_law_that_changes_is_followed() -> None:
    rates, full = Rates((1, 2)), int(MEMORY)
    told(rates, ("a", 1), 5 * full, 0)
    assert rates.estimate(("a", 1), 0.5) > 0.99
    told(rates, ("a", 1), 0, 3 * full)  # a plain mean would still say 0.6
    assert rates.estimate(("a", 1), 0.5) < 0.1
    told(rates, ("a", 1), 3 * full, 0)
    assert rates.estimate(("a", 1), 0.5) > 0.9


def test_what_is_learned_shows_at_once_in_all_that_depends_on_it() -> None:
    rates = Rates((1, 2))
    before = [rates.estimate(("a", kind), 0.5) for kind in (1, 2)]
    rates.learn(("a", 1), True)
    after = [rates.estimate(("a", kind), 0.5) for kind in (1, 2)]
    assert after[0] > after[1] > before[0] == before[1]
