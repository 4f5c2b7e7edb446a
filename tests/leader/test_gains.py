"""Gains: what a paid drafter is expected to add to what is drafted for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.core import Draft
from bozza.leader.beliefs import LEVELS, Beliefs, Offer
from bozza.leader.gains import FADE, PRIOR, Gains
from bozza.leader.rates import Rates

UNKNOWN = (0, 0)
PAID = Draft((1, 5, 2, 6), (-1, -1, 0, 1), ("eagle",) * 4)


def offered(draft: Draft, free: Draft | None = None, record: tuple[int, int] = UNKNOWN) -> Offer:
    """A paid draft, merged into a free one."""
    beliefs = Beliefs(Rates(LEVELS), 0.0)
    if free is not None:
        beliefs.add(Offer("ngram", free, UNKNOWN))
    offer = Offer("eagle", draft, record)
    beliefs.add(offer)
    return offer


def moved(gains: Gains, offer: Offer, asked: int, tokens: Sequence[int]) -> str:
    """How the expectation of each node changes with one draft: up, down or not."""
    before = list(gains.curve("eagle", asked, 0.0, offer.record))
    gains.learn(offer, asked, tokens, 0.0)
    after = gains.curve("eagle", asked, 0.0, offer.record)
    return "".join("+" if new > old else "-" if new < old else "=" for old, new in zip(before, after, strict=True))


def test_before_anything_is_seen_later_nodes_are_less_likely() -> None:
    curve = Gains().curve("eagle", 5, 0.0, UNKNOWN)
    assert curve == pytest.approx([PRIOR * FADE**rank for rank in range(5)])


def test_a_curve_is_as_long_as_it_is_asked_for() -> None:
    gains = Gains()
    curves = [gains.curve("eagle", most, 0.0, UNKNOWN) for most in (3, 0, 6, 3)]
    assert [len(curve) for curve in curves] == [3, 0, 6, 3]
    assert curves[2][:3] == curves[0]


def test_luck_moves_the_odds_of_every_node() -> None:
    gains = Gains()
    usual, lucky, unlucky = (gains.curve("eagle", 4, 0.0, UNKNOWN, luck) for luck in (1.0, 3.0, 1 / 3))
    for chance, more, less in zip(usual, lucky, unlucky, strict=True):
        assert more / (1 - more) == pytest.approx(3 * chance / (1 - chance)) == pytest.approx(9 * less / (1 - less))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 7], "++---"),  # of five nodes that it was asked for, the last is missing
        ([1, 2, 3, 7], "+++--"),
        ([1, 2, 3, 4, 7], "++++-"),
        ([1, 2, 3, 4], "++++-"),  # what is missing would not have been there, however the text goes on
        ([7], "-----"),
        ([1, 2], "++==="),  # the request ended: nobody knows of the rest
        ([1], "+===="),
        ([], "====="),
    ],
)
def test_a_chain_is_compared_with_what_was_committed(tokens: list[int], expected: str) -> None:
    assert moved(Gains(), offered(Draft.chain([1, 2, 3, 4], "eagle")), 5, tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([5, 6, 9], "-+-+"), ([1, 2, 9], "+-+-"), ([5], "-+-="), ([1], "+-=-"), ([2, 2], "----"), ([5, 7], "-+--")],
)
def test_a_tree_is_compared_with_what_was_committed(tokens: list[int], expected: str) -> None:
    assert moved(Gains(), offered(PAID), 4, tokens) == expected


def test_a_drafter_that_says_nothing_adds_nothing() -> None:
    assert moved(Gains(), Offer("eagle", Draft(), UNKNOWN), 3, [1, 2]) == "---"


def test_only_so_many_nodes_as_were_asked_for_are_missed() -> None:
    gains, offer = Gains(), offered(Draft.chain([1], "eagle"))
    before = list(gains.curve("eagle", 6, 0.0, UNKNOWN))
    gains.learn(offer, 3, [1, 7], 0.0)
    after = gains.curve("eagle", 6, 0.0, UNKNOWN)
    assert [new < old for old, new in zip(before, after, strict=True)] == [False, True, True, False, False, False]
    assert after[3:] == before[3:]


def test_far_nodes_share_an_estimate_and_near_ones_do_not() -> None:
    chain = offered(Draft.chain(list(range(12)), "eagle"))
    assert moved(Gains(), chain, 12, [*range(8), 99]) == "++++++++----"
    gains = Gains()
    for _ in range(20):
        gains.learn(offered(Draft.chain([1], "eagle")), 9, [1, 7], 0.0)
    ninth, tenth, eleventh = gains.curve("eagle", 11, 0.0, UNKNOWN)[8:]
    assert ninth == tenth < 0.3 * eleventh


def test_what_is_learned_is_followed() -> None:
    gains, rng = Gains(), random.Random(0)
    for _ in range(600):
        tokens = [1, 2, 3] if rng.random() < 0.5 else [1]
        gains.learn(offered(Draft.chain([1, 2, 3], "eagle")), 4, [*tokens, 99], 0.0)
    first, second, third, fourth = gains.curve("eagle", 4, 0.0, UNKNOWN)
    assert first > 0.97
    assert second == pytest.approx(0.5, abs=0.08) == third
    assert fourth < 0.03


@pytest.mark.parametrize("what", ["free", "record"])
def test_what_is_known_beforehand_is_learned_to_matter(what: str) -> None:
    gains = Gains()
    low, high = (0.1, 0.7) if what == "free" else (0.1, 0.1)
    poor, rich = (UNKNOWN, UNKNOWN) if what == "free" else ((1, 0), (5, 4))
    for _ in range(300):
        gains.learn(offered(Draft.chain([1], "eagle"), record=poor), 1, [9], low)
        gains.learn(offered(Draft.chain([1], "eagle"), record=rich), 1, [1, 9], high)
    assert gains.curve("eagle", 1, low, poor)[0] < 0.2
    assert gains.curve("eagle", 1, high, rich)[0] > 0.8
    assert gains.curve("mtp", 1, 0.1, poor) == Gains().curve("mtp", 1, 0.1, poor)  # of another drafter nothing is known


def test_what_a_draft_taught_shows_in_other_situations() -> None:
    gains = Gains()
    fresh = gains.curve("eagle", 1, 0.1, (2, 2))[0]
    for _ in range(50):
        gains.learn(offered(Draft.chain([1], "eagle")), 1, [1, 9], 0.1)
    assert gains.curve("eagle", 1, 0.1, (2, 2))[0] > fresh + 0.2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 1.0), st.integers(0, 80))
def test_a_curve_is_made_of_chances(seed: int, free: float, most: int) -> None:
    gains, rng = Gains(), random.Random(seed)
    for _ in range(5):
        draft = Draft.chain([rng.randint(0, 1) for _ in range(rng.randint(0, 12))], "eagle")
        gains.learn(offered(draft), 12, [rng.randint(0, 1) for _ in range(6)], rng.random())
    curve = gains.curve("eagle", most, free, UNKNOWN)
    assert len(curve) == most
    assert all(0.0 <= chance <= 1.0 for chance in curve)
