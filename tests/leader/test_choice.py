"""Choice: what is picked, and what is bid for, against every other choice there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.core import Draft, Load
from bozza.leader.beliefs import LEVELS, Beliefs, Offer
from bozza.leader.choice import NO_BID, Bid, Prices, bid, loss, pick, prices
from bozza.leader.cost import CostModel
from bozza.leader.rates import Rates


def believed(parents: Sequence[int], chances: Sequence[float]) -> Beliefs:
    """A tree with these chances."""
    beliefs = Beliefs(Rates(LEVELS), 0.0)
    size = len(parents)
    beliefs.add(Offer("a", Draft(tuple(range(size)), tuple(parents), ("a",) * size), (0, 0)))
    beliefs.chances = list(chances)
    return beliefs


def chain(*chances: float) -> Beliefs:
    return believed(range(-1, len(chances) - 1), chances)


def load(room: Mapping[int, int], chains: bool = False, tokens: int = 0) -> Load:
    return Load(len(room), tokens or len(room), 100, room, chains)


def line(per_token: float = 0.01, **drafters: Any) -> CostModel:
    verify = {"base": 0.02, "per_token": per_token, "per_cached": 1e-6}
    return CostModel.from_document({"verify": verify, "drafters": drafters})


def curved(seconds: Sequence[float]) -> CostModel:
    """The first token, and each further one, take so long."""
    return CostModel({tokens: sum(seconds[:tokens]) for tokens in range(1, len(seconds) + 1)})


def worth(costs: CostModel, of: Load, rate: float, beliefs: Mapping[int, Beliefs], nodes: Mapping[int, Any]) -> float:
    count = sum(map(len, nodes.values()))
    gained = sum(beliefs[id_].chances[node] for id_, chosen in nodes.items() for node in chosen)
    bare = costs.pass_seconds(of.rows, of.tokens, of.cached)
    return gained - rate * (costs.pass_seconds(of.rows, of.tokens + count, of.cached) - bare)


def closed(beliefs: Beliefs, room: int) -> Iterator[tuple[int, ...]]:
    """All sets of nodes that hold the parent of each, and for which there is room."""
    for size in range(min(len(beliefs.parents), room) + 1):
        for nodes in combinations(range(len(beliefs.parents)), size):
            if all(beliefs.parents[node] in (-1, *nodes) for node in nodes):
                yield nodes


@st.composite
def forests(draw: st.DrawFn, most: int = 6) -> Beliefs:
    """A small tree in which no node is likelier than its parent; some are as likely."""
    parents: list[int] = []
    chances: list[float] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        share = draw(st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95, 1.0]))
        parents.append(parent)
        chances.append(share * (chances[parent] if parent >= 0 else 1.0))
    return believed(parents, chances)


SLOPES = st.lists(st.floats(0.0, 0.05), min_size=20, max_size=20)


@pytest.mark.parametrize("shape", ["convex", "any"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_other_choice_of_nodes_is_worth_more(shape: str, data: st.DataObject) -> None:
    slopes = data.draw(SLOPES)
    costs = curved([0.02, *(sorted(slopes) if shape == "convex" else slopes)])
    beliefs = {3: data.draw(forests()), 7: data.draw(forests(4))}
    of = load({3: data.draw(st.integers(0, 7)), 7: data.draw(st.integers(0, 5))})
    rate = data.draw(st.sampled_from([0.0, 5.0, 20.0, 60.0]))
    picked = pick(costs, of, rate, beliefs)
    for id_, nodes in picked.items():
        assert nodes
        assert tuple(sorted(nodes)) in set(closed(beliefs[id_], of.room[id_]))
    best = max(
        worth(costs, of, rate, beliefs, {3: first, 7: second})
        for first in closed(beliefs[3], of.room[3])
        for second in closed(beliefs[7], of.room[7])
    )
    assert worth(costs, of, rate, beliefs, picked) == pytest.approx(best, abs=1e-9)


def test_nodes_are_taken_until_the_next_one_costs_more_than_it_adds() -> None:
    tree = believed([-1, 0, 1, 2], [0.9, 0.7, 0.5, 0.2])
    for rate, count in [(0.0, 4), (19.0, 4), (21.0, 3), (49.0, 3), (51.0, 2), (71.0, 1), (91.0, 0)]:
        picked = pick(line(0.01), load({1: 9}), rate, {1: tree})
        assert picked == ({1: list(range(count))} if count else {})


def test_the_likeliest_nodes_of_all_requests_come_first() -> None:
    beliefs = {1: chain(0.9, 0.3), 2: chain(0.6, 0.55, 0.5), 3: chain(0.2)}
    assert pick(line(0.01), load({1: 9, 2: 9, 3: 9}), 52.0, beliefs) == {1: [0], 2: [0, 1]}
    assert pick(line(0.01), load({1: 9, 2: 0, 3: 9}), 52.0, beliefs) == {1: [0]}


def test_a_dear_token_is_crossed_if_what_comes_behind_pays() -> None:
    costs = curved([0.02, 0.03, 0.0, 0.0, 0.0])
    assert pick(costs, load({1: 9}), 20.0, {1: chain(0.5, 0.4, 0.3)}) == {1: [0, 1, 2]}
    assert pick(costs, load({1: 1}), 20.0, {1: chain(0.5, 0.4, 0.3)}) == {}


def test_prompts_in_the_pass_are_taken_into_account() -> None:
    costs = CostModel({1: 0.02, 8: 0.02, 9: 0.2})  # up to eight tokens are free, then they are not
    assert pick(costs, load({1: 9}), 10.0, {1: chain(0.5, 0.4)}) == {1: [0, 1]}
    assert pick(costs, load({1: 9}, tokens=7), 10.0, {1: chain(0.5, 0.4)}) == {1: [0]}
    assert pick(costs, load({1: 9}, tokens=8), 10.0, {1: chain(0.5, 0.4)}) == {}


def test_where_only_a_chain_is_verified_nothing_else_is_picked() -> None:
    tree = believed([-1, -1, 1, 0, 0], [0.4, 0.5, 0.1, 0.39, 0.38])
    assert pick(line(0.0), load({1: 9}), 1.0, {1: tree}) == {1: [1, 0, 3, 4, 2]}
    assert pick(line(0.0), load({1: 9}, chains=True), 1.0, {1: tree}) == {1: [1, 2]}
    assert pick(line(0.01), load({1: 9}, chains=True), 20.0, {1: tree}) == {1: [1]}
    assert pick(line(0.0), load({1: 1}, chains=True), 1.0, {1: tree}) == {1: [1]}


def test_what_cannot_stand_is_not_verified_even_for_nothing() -> None:
    assert pick(line(0.0), load({1: 9}), 0.0, {1: chain(0.5, 0.0, 0.0)}) == {1: [0]}
    assert pick(line(0.0), load({1: 9, 2: 9}), 0.0, {1: chain(0.0), 2: believed([], [])}) == {}
    strange = CostModel({1: 0.06, 8: 0.02})  # as a model may think for a while: more tokens cost less
    assert pick(strange, load({1: 9}), 10.0, {1: chain(0.5, 0.0, 0.0)}) == {1: [0]}


@pytest.mark.parametrize("nodes", [0.0, 1.4, 6.0, 40.0])
def test_the_price_of_a_node_is_what_its_time_is_worth(nodes: float) -> None:
    price = prices(line(0.003), load({1: 9, 2: 9}), 50.0, nodes)
    assert price == Prices(50.0, pytest.approx(50.0 * 0.003))  # type: ignore[arg-type]


def test_the_price_of_a_node_looks_as_far_as_nodes_are_verified_of_late() -> None:
    costs = CostModel({1: 0.02, 4: 0.02, 8: 0.06})
    assert prices(costs, load({1: 9}), 10.0, 3.0).node == 0.0
    assert prices(costs, load({1: 9}), 10.0, 7.2).node == pytest.approx(10.0 * 0.04 / 7)
    bent = CostModel({4: 0.02, 5: 0.02, 8: 0.06})  # and at least one for each request
    assert prices(bent, load(dict.fromkeys(range(4), 9)), 10.0, 1.0).node == pytest.approx(10.0 * 0.04 / 4)
    assert prices(CostModel({1: 0.06, 8: 0.02}), load({1: 9}), 10.0, 4.0).node == 0.0  # never a reward


# --- bids -------------------------------------------------------------------------------------------------------------

EAGLE = {"base": 0.004, "per_depth": 0.002, "per_token": 0.0005, "per_cached": 1e-7}
CACHED = {1: 100, 2: 2000, 3: 0}


def value(costs: CostModel, curves: Mapping[int, Sequence[float]], price: Prices, budgets: Mapping[int, int]) -> float:
    """What such budgets are worth, by the definition."""
    gained = sum(max(chance - price.node, 0.0) for id_, size in budgets.items() for chance in curves[id_][:size])
    cached = sum(CACHED[id_] for id_ in budgets)
    sizes = budgets.values()
    return gained - price.rate * costs.draft_seconds("eagle", len(budgets), max(sizes), sum(sizes), cached)


def uniform(curves: Mapping[int, Sequence[float]], ids: Sequence[int]) -> Iterator[dict[int, int]]:
    """One size for some requests, or as much of it as they have room for."""
    for size in (2, 4, 6):
        if budgets := {id_: min(size, len(curves[id_])) for id_ in ids if curves[id_]}:
            yield budgets


CURVE = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda chances: sorted(chances, reverse=True))


@settings(max_examples=80, deadline=None)
@given(CURVE, CURVE, CURVE, st.booleans(), st.sampled_from([0.0, 5.0, 30.0, 100.0]), st.sampled_from([0.0, 0.1, 0.4]))
def test_no_other_size_is_worth_more(
    first: list[float], second: list[float], third: list[float], alike: bool, rate: float, node: float
) -> None:
    costs, price = line(eagle=EAGLE | {"per_cached": 0.0}), Prices(rate, node)
    curves = {1: first, 2: first if alike else second, 3: third}
    made = bid(costs, "eagle", curves, CACHED, price)
    others = [budgets for count in (1, 2, 3) for ids in combinations(curves, count) for budgets in uniform(curves, ids)]
    best = max((value(costs, curves, price, budgets) for budgets in others), default=0.0)
    assert made.worth == pytest.approx(max(best, 0.0), abs=1e-9)
    if made.budgets:
        assert value(costs, curves, price, made.budgets) == pytest.approx(made.worth, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(CURVE, CURVE, CURVE)
def test_a_bid_says_what_it_brings_and_takes(first: list[float], second: list[float], third: list[float]) -> None:
    costs, curves = line(eagle=EAGLE), {1: first, 2: second, 3: third}
    made = bid(costs, "eagle", curves, CACHED, Prices(20.0, 0.1))
    if not made.budgets:
        assert made == NO_BID
        return
    sizes = made.budgets.values()
    assert made.gain == pytest.approx(sum(sum(curves[id_][:size]) for id_, size in made.budgets.items()))
    cached = sum(CACHED[id_] for id_ in made.budgets)
    assert made.seconds == costs.draft_seconds("eagle", len(made.budgets), max(sizes), sum(sizes), cached)
    assert made.worth > 0.0
    assert all(1 <= size <= len(curves[id_]) for id_, size in made.budgets.items())


def test_who_does_not_gain_is_left_out() -> None:
    costs = line(eagle=EAGLE | {"per_token": 0.002})
    curves = {1: [0.9, 0.8, 0.7, 0.6], 2: [0.05, 0.04, 0.03, 0.02], 3: []}
    made = bid(costs, "eagle", curves, CACHED, Prices(50.0, 0.01))
    assert made.budgets == {1: 4}
    assert 2 in bid(costs, "eagle", curves, CACHED, Prices(0.1, 0.01)).budgets


def test_what_free_drafts_lose_by_it_is_taken_off() -> None:
    costs, price = line(eagle={"base": 0.004}), Prices(50.0, 0.0)
    curves = {1: [0.6, 0.3], 2: [0.6, 0.3]}
    plain, losing = (bid(costs, "eagle", curves, CACHED, price, losses) for losses in (None, {1: 0.2}))
    assert plain.worth - losing.worth == pytest.approx(0.2) == plain.gain - losing.gain
    assert bid(costs, "eagle", curves, CACHED, price, {1: 0.95}).budgets == {2: 2}


def test_nodes_that_hardly_pay_are_no_loss() -> None:
    chances = [0.8, 0.3, 0.05]
    assert loss(chances, 0.0, 0.1) == 0.0
    assert loss(chances, 1.0, 0.1) == pytest.approx(0.7 + 0.2)
    assert loss(chances, 0.5, 0.1) == pytest.approx(0.4 + 0.15)
    assert loss(chances, 0.5, 0.2) == pytest.approx(0.4 + 0.1)  # half of 0.3 is not worth 0.2
    assert loss([], 0.5, 0.1) == 0.0


def test_what_all_share_can_be_paid_by_several_that_could_not_alone() -> None:
    costs, price = line(eagle={"base": 0.02}), Prices(50.0, 0.0)
    curves: dict[int, list[float]] = {id_: [0.6] for id_ in (1, 2, 3)}
    assert bid(costs, "eagle", {1: curves[1]}, CACHED, price) == NO_BID
    made = bid(costs, "eagle", curves, CACHED, price)
    assert made == Bid(pytest.approx(0.8), pytest.approx(1.8), pytest.approx(0.02), {1: 1, 2: 1, 3: 1})  # type: ignore


def test_a_rate_of_nothing_takes_all() -> None:
    curves = {1: [0.5] * 7, 2: [0.5] * 64, 3: [0.5]}
    made = bid(line(eagle=EAGLE), "eagle", curves, CACHED, Prices(0.0, 0.0))
    assert made.budgets == {1: 7, 2: 64, 3: 1}
    assert made.worth == made.gain == 36.0


def test_the_dearer_time_is_the_less_is_drafted() -> None:
    curve = {1: [0.9**rank for rank in range(1, 33)]}
    sizes = [
        bid(line(eagle=EAGLE), "eagle", curve, CACHED, Prices(rate, rate * 0.001)).budgets.get(1, 0)
        for rate in (0.0, 10.0, 50.0, 100.0, 200.0, 1000.0)
    ]
    assert all(more >= less for more, less in pairwise(sizes))
    assert sizes[0] == 32
    assert len(set(sizes)) >= 4
    assert sizes[-1] == 0


@pytest.mark.parametrize("curves", [{}, {1: []}, {1: [0.0, 0.0]}, {1: [0.2, 0.1]}])
def test_where_nothing_is_to_be_gained_there_is_no_bid(curves: dict[int, list[float]]) -> None:
    assert bid(line(eagle=EAGLE), "eagle", curves, CACHED, Prices(30.0, 0.2)) == NO_BID
