"""Beliefs: the drafts of a request as one tree, what is thought of its nodes, and what is learned about them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.core import Draft
from bozza.drafters.merge import merge
from bozza.leader.beliefs import (
    AGREED,
    ALONE,
    DISPUTED,
    LEVELS,
    PACE,
    STALE,
    STEP,
    STEPS,
    UNSAID,
    UNSAID_DEEPER,
    Beliefs,
    Offer,
    Record,
)
from bozza.leader.rates import Key, Rates

UNKNOWN = (0, 0)


class Pupil(Rates):
    """Notes what it is taught."""

    def __init__(self) -> None:
        super().__init__(LEVELS)
        self.heard: list[tuple[Key, bool]] = []

    def learn(self, key: Key, success: bool) -> None:
        self.heard.append((key, success))
        super().learn(key, success)


@st.composite
def trees(draw: st.DrawFn, name: str, most: int = 10) -> Draft:
    """A draft whose siblings differ, with or without confidences."""
    nodes: list[tuple[int, int]] = []
    sure: list[float] = []
    for number in range(draw(st.integers(0, most))):
        node = (draw(st.integers(-1, number - 1)), draw(st.integers(0, 3)))
        if node in nodes or node[0] >= len(nodes):
            continue
        nodes.append(node)
        sure.append((sure[node[0]] if node[0] >= 0 else 1.0) * draw(st.floats(0.0, 1.0)))
    said = tuple(sure) if draw(st.booleans()) else ()
    return Draft(tuple(t for _, t in nodes), tuple(p for p, _ in nodes), (name,) * len(nodes), confidences=said)


def taught(seed: int) -> Rates:
    """Rates after a while of guesses by drafters a, b and c."""
    rng, rates = random.Random(seed), Rates(LEVELS)
    for _ in range(rng.choice([0, 100])):
        key = (rng.choice("abc"), rng.randint(-1, 12), rng.randint(1, 4), rng.randint(0, 2), rng.randint(-1, 12), 0, 0)
        rates.learn(key, rng.random() < 0.6)
    return rates


def judged(
    *drafts: Draft, rates: Rates | None = None, least: float = 0.0, record: tuple[int, int] = UNKNOWN
) -> Beliefs:
    beliefs = Beliefs(rates or Rates(LEVELS), least)
    for draft in drafts:
        beliefs.add(Offer(draft.drafters[0] if len(draft) else "a", draft, record))
    beliefs.judge()
    return beliefs


def sure(draft: Draft, *confidences: float) -> Draft:
    return Draft(draft.tokens, draft.parents, draft.drafters, confidences=confidences)


# --- the tree ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(trees("a"), trees("b"), trees("c"), st.integers(0, 3))
def test_the_tree_is_the_union_that_fixed_drafts_would_verify(a: Draft, b: Draft, c: Draft, seed: int) -> None:
    beliefs = judged(a, b, c, rates=taught(seed))
    union = merge([a, b, c], 100)
    assert (tuple(beliefs.tokens), tuple(beliefs.parents)) == (union.tokens, union.parents)
    assert beliefs.depths == union.depths()
    whole = beliefs.draft(range(len(union)))
    assert (whole.paths(), whole.drafters) == (union.paths(), union.drafters)
    for offer in beliefs.offers:
        assert [whole.paths()[place] for place in offer.places] == offer.draft.paths()
        assert offer.depths == offer.draft.depths()


@settings(max_examples=60, deadline=None)
@given(trees("a"), trees("b"), st.integers(0, 3), st.floats(0.0, 0.9))
def test_a_node_is_never_likelier_than_its_parent(a: Draft, b: Draft, seed: int, least: float) -> None:
    beliefs = judged(a, b, rates=taught(seed), least=least)
    for chance, parent in zip(beliefs.chances, beliefs.parents, strict=True):
        above = beliefs.chances[parent] if parent >= 0 else 1.0
        assert 0.0 <= chance <= above <= 1.0
        if above < least:
            assert chance == 0.0


@settings(max_examples=60, deadline=None)
@given(trees("a"), trees("b"), st.data())
def test_some_nodes_make_a_draft_of_their_paths(a: Draft, b: Draft, data: st.DataObject) -> None:
    beliefs = judged(a, b)
    chosen: set[int] = set()
    for node in data.draw(st.lists(st.integers(0, max(len(beliefs.tokens) - 1, 0)), max_size=5)):
        while len(beliefs.tokens) > node >= 0:
            chosen.add(node)
            node = beliefs.parents[node]
    draft = beliefs.draft(sorted(chosen, reverse=True))  # in any order
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    paths = beliefs.draft(range(len(beliefs.tokens))).paths()
    assert draft.paths() == [paths[node] for node in sorted(chosen)]
    assert list(draft.confidences) == [beliefs.chances[node] for node in sorted(chosen)]
    assert not any(draft.law(node) for node in range(len(draft)))


def test_a_node_is_credited_to_whoever_came_first() -> None:
    beliefs = judged(Draft.chain([1, 2], "a"), Draft.chain([1, 3], "b"), Draft.chain([1, 3, 2], "c"))
    assert beliefs.draft([0, 1, 2, 3]).drafters == ("a", "a", "b", "c")


# --- chances ----------------------------------------------------------------------------------------------------------


def test_before_anything_is_known_chances_multiply_what_a_drafter_usually_gets() -> None:
    beliefs = judged(Draft.chain([1, 2, 3], "a"))
    assert beliefs.chances == pytest.approx([UNSAID, UNSAID * UNSAID_DEEPER, UNSAID * UNSAID_DEEPER**2])


@pytest.mark.parametrize("given", [0.03, 0.15, 0.57, 0.86, 0.99])
def test_before_anything_is_known_a_drafter_is_taken_at_its_word(given: float) -> None:
    draft = sure(Draft.chain([1, 2], "a"), 0.96, 0.96 * given)
    assert judged(draft).chances == pytest.approx([0.96, 0.96 * given])  # in the middle of a bin


def test_confidences_of_nothing_at_all_are_borne() -> None:
    chances = judged(sure(Draft.chain([1, 2, 3], "a"), 0.0, 0.0, 0.0)).chances
    assert 0.0 < chances[0] < 0.05
    assert chances[2] < chances[1] < chances[0]


def test_chances_multiply_what_was_learned_down_the_path() -> None:
    rates, rng = Rates(LEVELS), random.Random(0)
    for _ in range(1000):
        beliefs = judged(Draft.chain([1, 2, 3], "a"), rates=rates)
        right = [rng.random() < rate for rate in (0.9, 0.5, 0.2)]
        beliefs.offers[0].follow([node + 1 if hit else 9 for node, hit in enumerate(right)], rates)
    first, second, third = judged(Draft.chain([1, 2, 3], "a"), rates=rates).chances
    assert first == pytest.approx(0.9, abs=0.05)
    assert second / first == pytest.approx(0.5, abs=0.08)
    assert third / second == pytest.approx(0.2, abs=0.08)


def kinds(beliefs: Beliefs, offer: int) -> list[int]:
    """What others say of each node of an offer."""
    keys = beliefs.offers[offer].keys
    return [key[3] for _, key in sorted(keys.items()) if isinstance(key[3], int)]


def test_it_is_seen_who_agrees_and_who_disputes() -> None:
    beliefs = judged(Draft.chain([1, 2, 3, 4], "a"), Draft.chain([1, 2, 9], "b"), Draft.chain([1], "c"))
    assert kinds(beliefs, 0) == [AGREED, AGREED, DISPUTED, ALONE]
    assert kinds(beliefs, 1) == [AGREED, AGREED, DISPUTED]
    assert kinds(beliefs, 2) == [AGREED]
    assert kinds(judged(Draft((1, 2), (-1, -1), ("a", "a"))), 0) == [ALONE, ALONE]  # its own sibling is no dispute


def test_agreement_is_learned_to_matter() -> None:
    rates = Rates(LEVELS)
    agree = [Draft.chain([1], "a"), Draft.chain([1], "b")]
    dispute = [Draft.chain([1], "a"), Draft.chain([2], "b")]
    for _ in range(200):
        for drafts, token in ((agree, 1), (dispute, 2)):
            for offer in judged(*drafts, rates=rates).offers:
                offer.follow([token], rates)
    assert judged(*agree, rates=rates).chances[0] > 0.9
    assert judged(*dispute, rates=rates).chances[0] < 0.1
    assert judged(*dispute, rates=rates).chances[1] > 0.9  # b is right in both cases
    assert 0.2 < judged(agree[0], rates=rates).chances[0] < 0.8


def test_where_drafters_agree_the_mean_of_what_is_known_of_each_counts() -> None:
    """Each estimate is right on average. The largest of them is not: it is the one that errs upwards."""
    rates = Rates(LEVELS)
    said = (sure(Draft.chain([1], "a"), 0.3), sure(Draft.chain([1], "b"), 0.97))
    beliefs = judged(*said, rates=rates)
    alone = [rates.estimate(offer.keys[0], 0.0) for offer in beliefs.offers]
    assert alone[0] < 0.4 < 0.9 < alone[1]
    assert beliefs.chances[0] == pytest.approx(sum(alone) / 2)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("lucky", "unlucky"), [((5, 2), (1, 2)), ((3, 3), (3, 0))])
def test_recent_luck_in_the_request_is_learned_to_matter(
    turned: bool, lucky: tuple[int, int], unlucky: tuple[int, int]
) -> None:
    rates = Rates(LEVELS)
    for _ in range(200):
        for record, token in ((lucky, 1), (unlucky, 2)):
            beliefs = judged(Draft.chain([1], "a"), rates=rates, record=record)
            beliefs.offers[0].follow([3 - token if turned else token], rates)
    good, bad = (judged(Draft.chain([1], "a"), rates=rates, record=record).chances[0] for record in (lucky, unlucky))
    assert (good < 0.2 and bad > 0.8) if turned else (good > 0.8 and bad < 0.2)


def test_nothing_is_looked_at_below_what_is_not_likely_enough() -> None:
    draft = sure(Draft.chain([1, 2, 3, 4], "a"), 0.86, 0.86 * 0.45, 0.86 * 0.45**2, 0.86 * 0.45**3)
    beliefs = judged(draft, least=0.3)
    assert [chance > 0.0 for chance in beliefs.chances] == [True, True, True, False]  # 0.86, 0.39, 0.17
    assert sorted(beliefs.offers[0].keys) == [0, 1, 2]


def test_first_is_the_likeliest_first_token() -> None:
    assert judged().first() == 0.0
    draft = sure(Draft((1, 2, 3), (-1, -1, 1), ("a",) * 3), 0.15, 0.77, 0.6)
    assert judged(draft).first() == pytest.approx(0.77)


def test_the_trunk_follows_the_likeliest_children() -> None:
    assert judged().trunk() == []
    #  0: 0.15 - 2: 0.14     1: 0.77 - 3: 0.1, - 4: 0.4 - 5: 0.39
    draft = Draft((1, 2, 3, 4, 5, 6), (-1, -1, 0, 1, 1, 4), ("a",) * 6)
    beliefs = judged(sure(draft, 0.15, 0.77, 0.14, 0.1, 0.4, 0.39))
    assert beliefs.trunk() == [1, 4, 5]


@settings(max_examples=60, deadline=None)
@given(trees("a"), trees("b"), st.integers(0, 3))
def test_the_trunk_is_a_chain_to_a_leaf(a: Draft, b: Draft, seed: int) -> None:
    beliefs = judged(a, b, rates=taught(seed))
    trunk = beliefs.trunk()
    assert [beliefs.parents[node] for node in trunk] == [-1, *trunk][:-1]
    assert not any(parent == (trunk[-1] if trunk else -1) for parent in beliefs.parents)
    for node in trunk:
        rivals = [n for n, parent in enumerate(beliefs.parents) if parent == beliefs.parents[node]]
        assert beliefs.chances[node] == max(beliefs.chances[rival] for rival in rivals)


# --- following --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], (0, False)),
        ([1], (1, False)),
        ([1, 2, 3], (3, False)),
        ([1, 2, 3, 4], (3, False)),  # a draft that ends is no miss
        ([9], (0, True)),
        ([1, 9, 3], (1, True)),
        ([1, 2, 9], (2, True)),
    ],
)
def test_a_chain_is_followed(tokens: list[int], expected: tuple[int, bool]) -> None:
    assert Offer("a", Draft.chain([1, 2, 3], "a"), UNKNOWN).follow(tokens, Rates(LEVELS)) == expected


@pytest.mark.parametrize(
    ("tokens", "expected", "at"),
    [([2, 4, 5], (3, False), 4), ([2, 3], (2, False), 2), ([1, 4], (1, False), 0), ([2, 5], (1, True), 1)],
)
def test_a_tree_is_followed(tokens: list[int], expected: tuple[int, bool], at: int) -> None:
    tree = Draft((1, 2, 3, 4, 5), (-1, -1, 1, 1, 3), ("a",) * 5)
    offer = Offer("a", tree, UNKNOWN)
    assert offer.follow(tokens, Rates(LEVELS)) == expected
    assert offer.at == at


def test_a_draft_is_followed_over_several_steps() -> None:
    offer = Offer("a", Draft.chain([1, 2, 3, 4, 5], "a"), UNKNOWN)
    rates = Rates(LEVELS)
    assert offer.follow([1, 2], rates) == (2, False)
    assert offer.follow([3], rates) == (1, False)
    assert list(offer.below(offer.at)) == [3]
    assert offer.follow([9, 5], rates) == (0, True)


def test_following_teaches_about_each_node_that_was_due_once() -> None:
    rates = Pupil()
    tree = Draft((1, 2, 3, 4, 5), (-1, -1, 1, 1, 0), ("a",) * 5)
    offer = judged(tree, rates=rates).offers[0]
    offer.follow([2], rates)
    assert rates.heard == [(offer.keys[0], False), (offer.keys[1], True)]
    offer.follow([4, 6], rates)  # what follows 4 was not guessed
    assert rates.heard[2:] == [(offer.keys[2], False), (offer.keys[3], True)]


def test_nodes_that_were_not_looked_at_are_followed_but_teach_nothing() -> None:
    rates = Pupil()
    draft = sure(Draft.chain([1, 2, 3], "a"), 0.27, 0.07, 0.02)
    offer = judged(draft, rates=rates, least=0.1).offers[0]
    assert offer.follow([1, 2, 3], rates) == (3, False)
    assert rates.heard == [(offer.keys[0], True), (offer.keys[1], True)]


def test_keys_go_from_general_to_specific() -> None:
    draft = sure(Draft.chain([1, 2], "a"), 0.9, 0.9 * 0.6)
    keys = judged(draft, record=(3, 2)).offers[0].keys
    assert [key[0] for key in keys.values()] == ["a", "a"]
    assert keys[0][1] != keys[1][1]  # how sure it is of the node, given the parent
    assert keys[0][4] == keys[1][4] == keys[0][1]  # and of the first token
    assert [len(key) for key in keys.values()] == [LEVELS[-1]] * 2
    assert all(shorter < longer for shorter, longer in pairwise(LEVELS))


def test_depths_beyond_the_last_bin_share_it() -> None:
    keys = judged(Draft.chain(list(range(40)), "a")).offers[0].keys
    depths = [keys[node][2] for node in range(40)]
    assert depths[0] != depths[1] != depths[2]
    assert len(set(depths[9:])) == 1
    assert depths == sorted(depths, key=str)


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_record_without_drafts_is_unknown() -> None:
    assert Record().bins(0) == Record().bins(1000) == UNKNOWN


@pytest.mark.parametrize(("right", "missed", "bins"), [(3, False, (5, 2)), (3, True, (5, 0)), (0, True, (1, 0))])
def test_the_first_draft_counts_in_full(right: int, missed: bool, bins: tuple[int, int]) -> None:
    record = Record()
    record.add(right, missed, 7)
    assert record.bins(7) == bins
    assert record.bins(7) != UNKNOWN


def test_a_record_follows_recent_drafts() -> None:
    record = Record()
    record.add(1, True, 0)
    assert record.hits == 1.0
    hits, bins = [], []
    for step in range(12):
        record.add(0, True, step)
        hits.append(record.hits)
        bins.append(record.bins(step)[0])
    assert hits == pytest.approx([(1.0 - PACE) ** (step + 1) for step in range(12)])
    assert bins[0] > bins[3] > bins[-1] == 1
    record.add(5, False, 12)  # how many does not matter
    assert record.hits == pytest.approx(hits[-1] + PACE * (1.0 - hits[-1]))


def test_a_streak_goes_on_until_a_miss() -> None:
    record, streaks = Record(), []
    for step, (right, missed) in enumerate([(2, False), (0, False), (3, False), (20, False), (4, True), (1, False)]):
        record.add(right, missed, step)
        streaks.append((record.streak, record.bins(step)[1]))
    assert streaks == [(2, 2), (2, 2), (5, 3), (25, 5), (0, 0), (1, 1)]


def test_an_old_record_counts_as_unknown() -> None:
    record = Record()
    record.add(2, False, 10)
    assert record.bins(10 + STALE) != UNKNOWN
    assert record.bins(10 + STALE + 1) == UNKNOWN
    record.add(1, False, 100)  # and comes back
    assert record.bins(100) != UNKNOWN


def test_luck_is_hits_over_those_expected_and_bounded() -> None:
    record = Record()
    assert record.luck == 1.0
    for _ in range(200):
        record.add(1, False, 1, told=1.0, came=1.0)
    assert record.luck == 1.0
    for _ in range(20):
        record.add(2, False, 1, told=1.0, came=2.0)
    assert 1.2 < record.luck < STEP**STEPS
    for _ in range(500):
        record.add(0, True, 1, told=9.0, came=0.0)
    assert record.luck == STEP**-STEPS
    for _ in range(500):
        record.add(9, False, 1, told=0.0, came=9.0)
    assert record.luck == STEP**STEPS


def test_a_request_s_luck_multiplies_the_odds_of_its_nodes_and_teaches_nobody_else() -> None:
    rates = Rates(LEVELS)
    draft = sure(Draft.chain([1, 2], "a"), 0.5, 0.3)
    usual = judged(draft, rates=rates)
    lucky = Beliefs(rates, 0.0)
    lucky.add(Offer("a", draft, UNKNOWN, luck=2.0))
    lucky.judge()
    first, favoured_first = usual.chances[0], lucky.chances[0]
    assert favoured_first / (1 - favoured_first) == pytest.approx(2 * first / (1 - first))
    assert lucky.offers[0].usual[0] == first
    lucky.offers[0].follow([1, 9], rates)
    assert lucky.offers[0].told == pytest.approx(first + lucky.offers[0].usual[1])
    assert lucky.offers[0].came == 1.0
