"""The ledger: the going rate, what was expected, what came of it, and what is told about it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bozza.core import Draft, Load, Plan, Request, StepStats
from bozza.drafters.merge import merge
from bozza.leader.adaptive import Adaptive
from bozza.leader.choice import Bid, Prices
from bozza.leader.cost import CostModel
from bozza.leader.ledger import ROOM, Ledger
from bozza.params import SamplingParams

COSTS = CostModel.from_document(
    {"verify": {"base": 0.02, "per_token": 0.001, "per_cached": 1e-6}, "drafters": {"eagle": {"base": 0.005}}}
)
PRICE = Prices(50.0, 0.05)


def request(id_: int = 1, cached: int = 100) -> Request:
    tokens = list(range(cached + 1))
    return Request(id_, tokens, 1, SamplingParams(max_tokens=1000), 0, frozenset(), 2000, cached=cached)


def load(requests: Sequence[Request], prompts: int = 0) -> Load:
    """Of a pass with these requests, and one that reads so much of a prompt."""
    cached = sum(request.cached for request in requests)
    rows, tokens = len(requests) + (prompts > 0), len(requests) + prompts
    return Load(rows, tokens, cached, {request.id: 9 for request in requests})


def hoped(draft: Draft, *chances: float) -> Draft:
    return Draft(draft.tokens, draft.parents, draft.drafters, confidences=chances)


CHAIN = hoped(Draft.chain([1, 2, 3], "ngram"), 0.9, 0.6, 0.3)


def stats(
    of: Load, drafted: Mapping[str, int], drafting: float = 0.0, reading: float = 0.0, stall: float = 1.0
) -> StepStats:
    """A step that takes what it should, or that stalls."""
    seconds = COSTS.pass_seconds(of.rows, of.tokens + sum(drafted.values()), of.cached)
    stages: Any = {"verify": seconds * stall, "draft": drafting + reading}
    spent = {"eagle": drafting + reading} if drafting or reading else {}
    read = {"eagle": reading} if reading else {}
    return StepStats(of.rows, of.tokens, of.cached, 1, dict(drafted), {}, {}, stages, spent, read)


def step(
    ledger: Ledger,
    committed: Mapping[int, Sequence[int]],
    drafts: Mapping[int, Draft] | None = None,
    number: int = 1,
    prompts: int = 0,
    **timing: float,
) -> Plan:
    """Plan and settle a step of the requests that commit."""
    requests = [request(id_) for id_ in committed]
    drafts, of = drafts or {}, load(requests, prompts)
    plan = ledger.planned(number, requests, of, drafts, COSTS, PRICE)
    ledger.settle(stats(of, {"ngram": sum(map(len, drafts.values()))}, **timing), committed, COSTS)
    return plan


def plain(*requests: Request) -> float:
    """Tokens per second of plain decoding."""
    count = len(requests)
    return count / COSTS.pass_seconds(count, count, sum(request.cached for request in requests))


# --- the going rate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [0, 200])
def test_where_nothing_speeds_up_the_rate_is_that_of_plain_decoding(prompts: int) -> None:
    ledger, running = Ledger(None), [request(1), request(2, 500)]
    assert ledger.rate(COSTS, running) == pytest.approx(plain(*running))
    for _ in range(100):
        step(ledger, {1: [5], 2: [6]}, prompts=prompts)
    assert ledger.rate(COSTS, running) == pytest.approx(plain(*running))
    assert ledger.rate(COSTS, running[:1]) == pytest.approx(plain(running[0]))


def test_the_rate_is_never_less_than_that_of_plain_decoding() -> None:
    ledger = Ledger(None)
    for _ in range(200):  # nothing stands, and it takes time
        step(ledger, {1: [9]}, {1: CHAIN}, drafting=0.03)
    assert ledger.rate(COSTS, [request()]) == pytest.approx(plain(request()))


def copied(ledger: Ledger, steps: int, **timing: float) -> float:
    """The rate after steps in which all of a draft of three stands."""
    for _ in range(steps):
        step(ledger, {1: [1, 2, 3, 4]}, {1: CHAIN}, **timing)
    return ledger.rate(COSTS, [request()]) / plain(request())


def test_the_rate_follows_a_speedup_and_forgets_it() -> None:
    ledger = Ledger(None)
    speedup = 4.0 * COSTS.pass_seconds(1, 1, 100) / COSTS.pass_seconds(1, 4, 100)
    assert 3.0 < speedup < 4.0
    early = copied(ledger, 2)
    assert 1.0 < early < copied(ledger, 100)
    assert copied(ledger, 0) == pytest.approx(speedup, rel=0.1)
    for _ in range(100):
        step(ledger, {1: [9]})
    assert copied(ledger, 0) == pytest.approx(1.0, abs=0.2)


def test_a_prompt_in_the_pass_is_time_that_plain_decoding_would_spend_too() -> None:
    ledger = Ledger(None)
    for _ in range(150):
        step(ledger, {1: [1, 2, 3, 4]}, {1: CHAIN}, prompts=200)
    assert copied(ledger, 0) == pytest.approx(4.0 * 0.221 / 0.224, rel=0.05)


@pytest.mark.parametrize("count", [2, 16])
def test_the_rate_of_many_requests_changes_as_fast_as_that_of_one(count: int) -> None:
    flat, speedups = CostModel({1: 0.02}), []
    for ids in ([0], range(count)):
        ledger, running = Ledger(None), [request(id_) for id_ in ids]
        for tokens in [[1, 2, 3, 4]] * 40 + [[9]] * 20:
            ledger.planned(1, running, load(running), {}, flat, PRICE)
            ledger.settle(stats(load(running), {}), dict.fromkeys(ids, tokens), flat)
        speedups.append(ledger.rate(flat, running) * 0.02 / len(running))
    assert speedups[0] == pytest.approx(speedups[1], rel=0.05)
    assert 1.5 < speedups[0] < 3.0


def test_time_of_drafters_counts_and_reading_is_part_of_the_pass() -> None:
    fast, slow, reading = (
        copied(Ledger(None), 150, **timing) for timing in ({}, {"drafting": 0.0241}, {"reading": 0.0241})
    )
    assert slow == pytest.approx(fast / 2, rel=0.05)
    assert reading == pytest.approx(fast)


@pytest.mark.parametrize("stall", [20.0, 0.05])
def test_a_step_that_stalls_does_not_move_the_rate(stall: float) -> None:
    calm, shaken = Ledger(None), Ledger(None)
    copied(shaken, 10)
    assert copied(shaken, 10, stall=stall) == copied(calm, 20)


def test_text_that_is_copied_has_a_rate_of_its_own() -> None:
    ledger = Ledger(None)
    for _ in range(100):
        ledger.sort({1: 0.95, 2: 0.05})
        step(ledger, {1: [1, 2, 3, 4], 2: [9]}, {1: CHAIN})
    ledger.sort({1: 0.95, 2: 0.05})
    fast, slow = (ledger.rate(COSTS, [request(id_)]) / plain(request(id_)) for id_ in (1, 2))
    assert fast > 2.5
    assert slow == pytest.approx(1.0, abs=0.05)
    both = [request(1), request(2)]
    assert ledger.rate(COSTS, both) / plain(*both) == pytest.approx((fast + slow) / 2)
    ledger.sort({1: 0.05, 2: 0.95})  # they change places
    assert ledger.rate(COSTS, [request(2)]) / plain(request(2)) == pytest.approx(fast)


def test_a_step_in_which_nobody_commits_changes_nothing() -> None:
    ledger = Ledger(None)
    before = copied(ledger, 50)
    nodes = ledger.nodes
    of = Load(1, 200, 0, {})
    ledger.planned(51, [], of, {}, COSTS, PRICE)
    ledger.settle(stats(of, {}), {}, COSTS)
    assert copied(ledger, 0) == before
    assert ledger.nodes == nodes


# --- how much is verified ---------------------------------------------------------------------------------------------


def test_free_drafters_may_draft_more_than_is_verified_of_late() -> None:
    ledger = Ledger(None)
    assert ledger.reach(1) > ROOM
    for _ in range(100):
        step(ledger, {1: [1, 2, 3, 4], 2: [5]}, {1: CHAIN})
    assert (ledger.reach(1), ledger.reach(2)) == (2 * 3 + ROOM, ROOM)
    assert ledger.nodes == pytest.approx(3.0, abs=0.01)
    long = hoped(Draft.chain(list(range(40)), "ngram"), *[0.5] * 40)
    for _ in range(100):
        step(ledger, {1: [0], 2: [5]}, {1: long, 2: CHAIN})
    assert (ledger.reach(1), ledger.reach(2)) == (2 * 40 + ROOM, 2 * 3 + ROOM)
    assert ledger.nodes == pytest.approx(43.0, abs=0.1)


def test_a_request_that_has_ended_is_forgotten() -> None:
    ledger = Ledger(None)
    fresh = ledger.reach(1)
    for _ in range(50):
        step(ledger, {1: [5], 2: [5]})
    assert ledger.reach(1) == ROOM != fresh
    step(ledger, {2: [5]})
    assert ledger.reach(1) == fresh
    assert ledger.reach(2) == ROOM


# --- what was expected, and what came of it ---------------------------------------------------------------------------


def test_a_plan_expects_the_sum_of_chances_and_one_more() -> None:
    ledger = Ledger(None)
    tree = hoped(Draft((1, 2), (-1, -1), ("ngram",) * 2), 0.5, 0.25)
    plan = step(ledger, {1: [1], 2: [5], 3: [2]}, {1: CHAIN, 3: tree})
    assert plan.drafts == {1: CHAIN, 3: tree}
    assert plan.expected == pytest.approx({1: 2.8, 2: 1.0, 3: 1.75})


def test_without_drafts_there_is_nothing_to_be_reliable_about() -> None:
    ledger = Ledger(None)
    step(ledger, {1: [5]})
    assert ledger.reliability() == []


def test_rows_hold_each_node_that_was_compared() -> None:
    ledger = Ledger(None)
    step(ledger, {1: [1, 2, 9]}, {1: CHAIN})  # right, right, wrong
    step(ledger, {1: [9]}, {1: CHAIN})  # wrong, and so is what came below
    rows = ledger.reliability()
    assert [row.keys() for row in rows] == [{"predicted", "observed", "nodes"}] * 3
    assert [(row["predicted"], row["observed"], row["nodes"]) for row in rows] == [
        (pytest.approx(0.3), 0.0, 2),
        (pytest.approx(0.6), 0.5, 2),
        (pytest.approx(0.9), 0.5, 2),
    ]


@pytest.mark.parametrize(("tokens", "seen"), [([1], 1), ([1, 2], 2), ([1, 2, 3], 3), ([1, 9], 3), ([9], 3), ([], 0)])
def test_nodes_beyond_the_end_of_a_request_are_not_counted(tokens: list[int], seen: int) -> None:
    ledger = Ledger(None)
    step(ledger, {1: tokens}, {1: CHAIN})
    assert sum(row["nodes"] for row in ledger.reliability()) == seen


def test_branches_are_judged_by_their_whole_path() -> None:
    ledger = Ledger(None)
    tree = hoped(Draft((1, 2, 3, 3), (-1, -1, 0, 1), ("ngram",) * 4), 0.51, 0.41, 0.31, 0.21)
    step(ledger, {1: [2, 3, 9]}, {1: tree})
    assert [row["observed"] for row in ledger.reliability()] == [1.0, 0.0, 1.0, 0.0]  # 0.21, 0.31, 0.41, 0.51


def test_what_is_predicted_right_looks_right() -> None:
    ledger, rng = Ledger(None), random.Random(3)
    for _ in range(3000):
        chances = sorted((rng.random() for _ in range(3)), reverse=True)
        luck = rng.random()
        right = sum(luck < chance for chance in chances)
        step(ledger, {1: [*range(1, right + 1), 9]}, {1: hoped(CHAIN, *chances)})
    rows = ledger.reliability()
    assert sum(row["nodes"] for row in rows) == 9000
    assert all(abs(row["predicted"] - row["observed"]) < 0.08 for row in rows if row["nodes"] > 100)
    assert [row["predicted"] for row in rows] == sorted(row["predicted"] for row in rows)


def test_drawn_tokens_have_no_chances_to_be_judged_by() -> None:
    drawn = Draft.chain([1, 2], "model", laws=[[0.5, 0.5], [0.5, 0.5]])
    ledger = Ledger(None)
    step(ledger, {1: [1, 2, 9]}, {1: drawn})
    assert ledger.reliability() == []
    beside = hoped(Draft.chain([7], "ngram"), 0.4)
    step(ledger, {1: [1, 2, 9]}, {1: merge([beside, drawn], 9)})
    assert [(row["predicted"], row["nodes"]) for row in ledger.reliability()] == [(pytest.approx(0.4), 1)]


# --- what is told -----------------------------------------------------------------------------------------------------


def told() -> tuple[Ledger, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    return Ledger(records.append), records


def test_each_decision_is_told_with_its_outcome() -> None:
    ledger, records = told()
    ledger.weigh("eagle", Bid(0.3, 0.8, 0.005, {1: 4}))
    ledger.weigh("mtp", Bid(0.0, 0.0, 0.0, {}))
    step(ledger, {1: [1, 2, 9], 2: [5]}, {1: CHAIN}, number=7)
    first, second = records
    assert (first["step"], first["request"], first["output_len"], first["rate"]) == (7, 1, 100, 50.0)
    bare, full = COSTS.pass_seconds(2, 2, 200), COSTS.pass_seconds(2, 5, 200)
    assert first["candidates"] == [
        {"drafters": [], "tokens": 0, "gain": 0.0, "seconds": bare},
        {"drafters": ["eagle"], "tokens": 4, "gain": 0.8, "seconds": 0.005},
        {"drafters": ["mtp"], "tokens": 0, "gain": 0.0, "seconds": 0.0},
    ]
    assert first["choice"] == {"drafters": ["ngram"], "tokens": 3}
    assert (first["expected"], first["committed"]) == (pytest.approx(2.8), 3)
    assert (first["seconds"], first["seconds_taken"]) == (pytest.approx(full), pytest.approx(full))
    assert (first["drafted"], first["accepted"]) == (3, 2)
    assert second["request"] == 2
    assert second["choice"] == {"drafters": [], "tokens": 0}
    assert (second["expected"], second["committed"], second["drafted"], second["accepted"]) == (1.0, 1, 0, 0)
    assert [candidate["tokens"] for candidate in second["candidates"]] == [0, 0, 0]  # not asked for this one


@pytest.mark.parametrize(("tokens", "accepted"), [([1, 2], 2), ([1, 2, 3, 4], 3), ([9], 0), ([3, 2, 1], 0)])
def test_accepted_nodes_are_told(tokens: list[int], accepted: int) -> None:
    ledger, records = told()
    step(ledger, {1: tokens}, {1: CHAIN})
    assert (records[0]["drafted"], records[0]["accepted"]) == (3, accepted)


def test_a_decision_is_told_once() -> None:
    ledger, records = told()
    for number in range(3):
        ledger.weigh("eagle", Bid(0.3, 0.8, 0.005, {1: 4}))
        step(ledger, {1: [1]}, {1: CHAIN}, number=number)
    ledger.settle(stats(load([request()]), {}), {1: [5]}, COSTS)  # of which nothing was decided
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [len(record["candidates"]) for record in records] == [2, 2, 2]


def test_a_decision_that_came_to_nothing_is_not_told() -> None:
    ledger, records = told()
    running = [request()]
    ledger.weigh("eagle", Bid(0.3, 0.8, 0.005, {1: 4}))
    ledger.planned(1, running, load(running), {1: CHAIN}, COSTS, PRICE)  # the step was interrupted
    ledger.weigh("eagle", Bid(0.3, 0.8, 0.005, {1: 4}))
    step(ledger, {1: [1]}, number=2)
    assert [(record["step"], len(record["candidates"])) for record in records] == [(2, 2)]


def test_a_step_without_room_is_told_and_not_taken_for_the_one_before() -> None:
    records: list[dict[str, Any]] = []
    leader = Adaptive({"ngram": 3}, (), COSTS, log=records.append)
    running, of = [request()], load([request()])
    for room in (9, 0, 0):
        now = replace(of, room={1: room})
        plan = leader.plan(running, now, lambda *_: {1: Draft.chain([1], "ngram")})
        leader.learn(stats(of, {"ngram": len(plan.drafts.get(1, ()))}), {1: [1, 2][: room + 1]})
    assert [(record["step"], record["drafted"], record["committed"]) for record in records] == [
        (1, 1, 2),
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert sum(row["nodes"] for row in leader.reliability()) == 1


def test_a_request_that_was_aborted_in_the_step_committed_nothing() -> None:
    ledger, records = told()
    running = [request(1), request(2)]
    of = load(running)
    ledger.planned(1, running, of, {2: CHAIN}, COSTS, PRICE)
    ledger.settle(stats(of, {"ngram": 3}), {1: [5]}, COSTS)
    assert [(record["request"], record["committed"]) for record in records] == [(1, 1), (2, 0)]
    assert ledger.reliability() == []
