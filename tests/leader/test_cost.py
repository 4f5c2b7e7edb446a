"""The cost model: what it reads, predicts and learns."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza.core import StepStats
from bozza.errors import ConfigError
from bozza.leader.cost import GRID, Asked, CostModel

LINE: dict[str, Any] = {
    "verify": {"base": 0.02, "per_token": 0.0005, "per_cached": 1e-6},
    "overhead": 0.003,
    "drafters": {
        "eagle": {"base": 0.002, "per_depth": 0.001, "per_token": 0.0003, "per_cached": 1e-7, "per_read": 1e-4},
        "mtp": {"base": 0.001},
    },
    "cap": {"eagle": 8},
}
KNOTS: dict[str, Any] = {"verify": {"knots": [[8, 0.05], [1, 0.02], [4, 0.03]], "per_row": 0.001, "per_cached": 1e-6}}


def stats(
    tokens: int,
    seconds: float,
    rows: int = 1,
    cached: int = 0,
    drafting: Mapping[str, float] | None = None,
    reading: Mapping[str, float] | None = None,
) -> StepStats:
    """A step whose pass took so long, with what drafters took beside that and read in it."""
    reading = reading or {}
    spent = {name: s + reading.get(name, 0.0) for name, s in (drafting or {}).items()}
    stages: Any = {"verify": seconds - sum(reading.values()), "draft": sum(spent.values())}
    return StepStats(rows, tokens, cached, 1, {}, {}, {}, stages, spent, reading)


def drifted(costs: CostModel, truth: Callable[[int], float], tokens: int) -> float:
    return abs(costs.pass_seconds(1, tokens, 0) / truth(tokens) - 1.0)


@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 100, 511, 512, 513, 4000])
@pytest.mark.parametrize("cached", [0, 777])
def test_a_straight_line_is_read_as_it_stands(tokens: int, cached: int) -> None:
    costs = CostModel.from_document(LINE)
    expected = 0.02 + 0.003 + 0.0005 * tokens + 1e-6 * cached
    for rows in (1, 7):  # a straight line says nothing of rows
        assert costs.pass_seconds(rows, tokens, cached) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 0.02), (2, 0.07 / 3), (4, 0.03), (5, 0.035), (8, 0.05), (12, 0.07), (108, 0.55)]
)
def test_between_knots_the_curve_is_straight_and_goes_on_beyond_the_last(tokens: int, seconds: float) -> None:
    costs = CostModel.from_document(KNOTS)
    assert costs.pass_seconds(1, tokens, 0) == pytest.approx(seconds)
    assert costs.pass_seconds(5, tokens, 1000) == pytest.approx(seconds + 4 * 0.001 + 0.001)


def test_before_the_first_knot_and_with_a_single_one_the_curve_is_flat() -> None:
    costs = CostModel.from_document({"verify": {"knots": [[4, 0.03], [8, 0.05]]}})
    assert costs.pass_seconds(1, 1, 0) == costs.pass_seconds(1, 4, 0) == pytest.approx(0.03)
    single = CostModel.from_document({"verify": {"knots": [[4, 0.03]]}})
    assert [single.pass_seconds(1, tokens, 0) for tokens in (1, 4, 99)] == pytest.approx([0.03] * 3)


def test_a_call_of_a_drafter_is_linear_in_what_it_was_asked_for() -> None:
    costs = CostModel.from_document(LINE)
    assert costs.draft_seconds("eagle", 3, 5, 12, 4000) == pytest.approx(0.002 + 0.005 + 0.0036 + 0.0004)
    assert costs.draft_seconds("eagle", 3, 5, 12, 4000, 500) == pytest.approx(0.011 + 0.05)
    assert costs.reading_seconds("eagle", 500) == pytest.approx(0.05)
    assert costs.draft_seconds("mtp", 3, 5, 12, 4000, 500) == pytest.approx(0.001)
    assert costs.reading_seconds("mtp", 500) == costs.reading_seconds("nobody", 500) == 0.0
    assert costs.draft_seconds("nobody", 3, 5, 12, 4000) == 0.0


@pytest.mark.parametrize("document", [LINE, KNOTS])
@pytest.mark.parametrize("copies", [2, 32])
def test_copies_cost_what_so_many_requests_would(document: dict[str, Any], copies: int) -> None:
    one, many = CostModel.from_document(document), CostModel.from_document(document, copies)
    for rows, tokens, cached in [(1, 1, 0), (1, 9, 300), (3, 5, 90)]:
        expected = one.pass_seconds(rows * copies, tokens * copies, cached * copies)
        assert many.pass_seconds(rows, tokens, cached) == pytest.approx(expected)
        drafting = one.draft_seconds("eagle", rows * copies, 4, tokens * copies, cached * copies, 70 * copies)
        assert many.draft_seconds("eagle", rows, 4, tokens, cached, 70) == pytest.approx(drafting)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4]), st.sampled_from([LINE, KNOTS]))
def test_a_document_reads_back_as_the_same_model(seed: int, copies: int, document: dict[str, Any]) -> None:
    rng, costs = random.Random(seed), CostModel.from_document(document, copies)
    for _ in range(rng.randrange(30)):  # also after something was learned
        step = stats(rng.randint(1, 50), rng.uniform(0.01, 0.1), drafting={"eagle": rng.uniform(0.001, 0.01)})
        costs.learn(step, {"eagle": Asked(1, 4, 4, 100)})
    again = CostModel.from_document(json.loads(json.dumps(costs.document())), copies)
    for tokens in (1, 3, 8, 70, 600):
        expected = costs.pass_seconds(2, tokens, 50)
        assert again.pass_seconds(2, tokens, 50) == pytest.approx(expected, rel=1e-9)
        drafting = costs.draft_seconds("eagle", 2, 3, tokens, 50, 40)
        assert again.draft_seconds("eagle", 2, 3, tokens, 50, 40) == pytest.approx(drafting, rel=1e-9)
    assert again.document()["verify"].keys() == costs.document()["verify"].keys()


def verify(**entry: Any) -> dict[str, Any]:
    return {"verify": {"base": 0.01} | entry}


def knots(*given: Any) -> dict[str, Any]:
    return {"verify": {"knots": list(given)}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "costs: this is an object of cap, drafters, overhead, verify"),
        ({"verfy": {}}, "costs: unknown key 'verfy', use cap, drafters, overhead, verify"),
        ({}, "costs: write {"),
        ({"verify": 0.01}, "costs: write {"),
        ({"verify": {"per_token": 0.01}}, "costs: write {"),
        (verify(per_tokn=1), "costs, verify: unknown key 'per_tokn', use base, knots, per_cached, per_row, per_token"),
        (verify(base=-1.0), "costs, verify: base is -1.0, use seconds of at least 0"),
        (verify(base="0.1"), "costs, verify: base is '0.1', use seconds"),
        (verify(base=True), "costs, verify: base is True, use seconds"),
        (verify(base=None), "costs, verify: base is None, use seconds"),
        (verify(per_token=math.nan), "costs, verify: per_token is nan, use seconds"),
        (verify(per_cached=math.inf), "costs, verify: per_cached is inf, use seconds"),
        (verify(per_row=-0.5), "costs, verify: per_row is -0.5, use seconds"),
        (verify() | {"overhead": -0.1}, "costs: overhead is -0.1, use seconds"),
        (verify() | {"drafters": {"a": 0.1}}, "costs, drafter a: this is an object of base, per_cached, per_depth"),
        (verify() | {"drafters": {"a": {"cost": 1}}}, "costs, drafter a: unknown key 'cost', use base, per_cached"),
        (verify() | {"drafters": {"a": {"base": [1]}}}, r"costs, drafter a: base is \[1\], use seconds"),
        (verify() | {"drafters": {"a": {"per_depth": -1}}}, "costs, drafter a: per_depth is -1, use seconds"),
        (verify() | {"drafters": ["a"]}, "costs, drafters: "),
        (verify() | {"drafters": None}, "costs, drafters: "),
        (knots(), r"knots are \[\[tokens, seconds\], ...\], each at least 1 and above 0"),
        (knots([0, 0.01]), "each at least 1"),
        (knots([1, 0.0]), "above 0"),
        (knots([1, -0.1]), "above 0"),
        (knots([1, math.nan]), "above 0"),
        (knots([1, math.inf]), "above 0"),
        (knots([math.inf, 0.1]), "each at least 1"),
        (knots([1]), "knots are"),
        (knots([1, 2, 3]), "knots are"),
        (knots(["x", 0.1]), "knots are"),
        (knots([1, None]), "knots are"),
        ({"verify": {"knots": 0.1}}, "knots are"),
        ({"verify": {"knots": [[1, 0.1]], "base": 0.1}}, "knots take the place of base and per_token"),
    ],
)
def test_what_is_no_cost_is_refused_in_a_line(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        CostModel.from_document(document)
    assert "\n" not in str(refusal.value)


def test_a_slower_machine_is_followed() -> None:
    costs, line, rng = CostModel.from_document(LINE), CostModel.from_document(LINE), random.Random(1)

    def truth(tokens: int) -> float:
        return 1.7 * line.pass_seconds(1, tokens, 0)

    for _ in range(100):
        tokens = rng.choice([1, 2, 4, 6, 8, 10, 12, 16])
        costs.learn(stats(tokens, truth(tokens) * rng.uniform(0.95, 1.05)), {})
    assert max(drifted(costs, truth, tokens) for tokens in range(1, 17)) < 0.05
    # What is never run gets slower with the rest: closer to the truth than to what was calibrated.
    assert 1.35 < costs.pass_seconds(1, 512, 0) / line.pass_seconds(1, 512, 0) < 1.75


@pytest.mark.parametrize("factor", [20.0, 0.001])
@pytest.mark.parametrize("size", [1, 4, 5, 5000])
def test_one_step_that_stalls_moves_little(size: int, factor: float) -> None:
    costs, before = CostModel.from_document(LINE), CostModel.from_document(LINE)
    costs.learn(stats(size, factor * costs.pass_seconds(1, size, 0)), {})
    for tokens in (1, 2, 4, 5, 16, 512, 5000):
        moved = costs.pass_seconds(1, tokens, 0) / before.pass_seconds(1, tokens, 0)
        assert 0.95 < moved < 1.05
        assert moved != 1.0
    assert (moved > 1.0) == (factor > 1.0)


def test_a_bend_that_calibration_missed_is_learned_where_it_is_visited() -> None:
    costs, visited = CostModel.from_document(LINE), (1, 8, 12, 16)

    def truth(tokens: int) -> float:
        return 0.02 + 0.0001 * tokens + (0.012 if tokens > 8 else 0.0)

    before = dict(costs.document()["verify"]["knots"])
    for number in range(600):
        tokens = visited[number % len(visited)]
        costs.learn(stats(tokens, truth(tokens)), {})
    assert max(drifted(costs, truth, tokens) for tokens in visited) < 0.02
    after = dict(costs.document()["verify"]["knots"])
    ratios = [after[tokens] / before[tokens] for tokens in GRID if tokens not in visited]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))  # the others move together, so they stay in order


def test_a_step_between_two_knots_bends_the_nearer_one_more() -> None:
    costs, before = CostModel.from_document(LINE), dict(CostModel.from_document(LINE).document()["verify"]["knots"])
    costs.learn(stats(17, 1.2 * costs.pass_seconds(1, 17, 0)), {})
    after = dict(costs.document()["verify"]["knots"])
    moved = {tokens: after[tokens] / before[tokens] for tokens in GRID}
    assert moved[16] > moved[24] > moved[12] == pytest.approx(moved[32])


def test_steps_of_copies_teach_about_all_of_them() -> None:
    costs, before = CostModel.from_document(LINE, 8), dict(CostModel.from_document(LINE).document()["verify"]["knots"])
    costs.learn(stats(2, 1.2 * costs.pass_seconds(1, 2, 0)), {})
    after = dict(costs.document()["verify"]["knots"])
    moved = {tokens: after[tokens] / before[tokens] for tokens in GRID}
    assert max(moved, key=lambda tokens: moved[tokens]) == 16
    assert moved[2] == pytest.approx(moved[512])


def test_reading_a_pass_is_part_of_its_time_and_drafting_is_not() -> None:
    costs = CostModel.from_document(LINE)
    before = costs.pass_seconds(1, 4, 0)
    costs.learn(stats(4, before, drafting={"eagle": 0.5}), {})
    assert costs.pass_seconds(1, 4, 0) == pytest.approx(before)
    costs.learn(stats(4, before, drafting={"eagle": 0.0}, reading={"eagle": before / 2}), {})
    assert costs.pass_seconds(1, 4, 0) == pytest.approx(before)
    assert costs.document()["drafters"] == CostModel.from_document(LINE).document()["drafters"]


def test_what_a_drafter_costs_is_learned() -> None:
    line: Any = {"base": 0.002, "per_depth": 0.001, "per_token": 0.0003, "per_cached": 1e-7, "per_read": 1e-5}
    costs = CostModel.from_document(verify() | {"drafters": {"eagle": line}})
    rng = random.Random(2)

    def truth(call: Asked) -> float:
        return 0.005 + 0.0005 * call.depth + 0.0006 * call.tokens + 2e-7 * call.cached + 4e-5 * call.unread

    def calls() -> Asked:
        requests, depth = rng.choice([1, 2, 8]), rng.randint(1, 8)
        unread = rng.randint(0, 1000) if rng.random() < 0.1 else 0
        return Asked(requests, depth, requests * depth, requests * rng.randint(10, 2000), unread)

    for _ in range(1000):
        call = calls()
        costs.learn(stats(4, 0.01, drafting={"eagle": truth(call) * rng.uniform(0.9, 1.1)}), {"eagle": call})
    off = [abs(costs.draft_seconds("eagle", *call) / truth(call) - 1.0) for call in (calls() for _ in range(200))]
    assert max(off) < 0.25
    assert sum(off) / len(off) < 0.08


@pytest.mark.parametrize("factor", [20.0, 0.0])
def test_one_call_that_stalls_moves_little(factor: float) -> None:
    costs, call = CostModel.from_document(LINE), Asked(2, 4, 8, 500)
    before = costs.draft_seconds("eagle", *call)
    costs.learn(stats(4, 0.01, drafting={"eagle": factor * before}), {"eagle": call})
    moved = costs.draft_seconds("eagle", *call) / before
    assert 0.94 < moved < 1.06
    assert moved != 1.0


def test_a_drafter_that_was_never_seen_costs_what_it_took_first() -> None:
    costs = CostModel.from_document(verify())
    costs.learn(stats(4, 0.01, drafting={"eagle": 0.004}), {})  # not asked: that was no draft
    costs.learn(stats(4, 0.01), {"eagle": Asked(1, 4, 4, 0)})  # no time was taken for it
    assert costs.draft_seconds("eagle", 1, 4, 4, 0) == 0.0
    costs.learn(stats(4, 0.01, drafting={"eagle": 0.006}, reading={"eagle": 0.002}), {"eagle": Asked(1, 4, 4, 0)})
    assert costs.draft_seconds("eagle", 9, 9, 9, 9) == pytest.approx(0.006)
    for _ in range(100):
        costs.learn(stats(4, 0.01, drafting={"eagle": 0.009}), {"eagle": Asked(1, 4, 4, 0)})
    assert costs.draft_seconds("eagle", 1, 4, 4, 0) == pytest.approx(0.009, rel=0.01)


def test_what_is_free_stays_free() -> None:
    costs = CostModel.from_document(LINE)
    for _ in range(50):
        costs.learn(stats(4, 0.01, drafting={"mtp": 0.02}), {"mtp": Asked(2, 4, 8, 500)})
    learned = costs.document()["drafters"]["mtp"]
    assert learned["base"] > 0.003
    assert all(seconds == 0.0 for key, seconds in learned.items() if key != "base")


def test_weights_do_not_become_negative() -> None:
    costs, call = CostModel.from_document(LINE), Asked(1, 8, 8, 4000)
    for _ in range(300):
        costs.learn(stats(4, 0.01, drafting={"eagle": 1e-9}), {"eagle": call})
    assert all(weight >= 0.0 for weight in costs.document()["drafters"]["eagle"].values())
    assert 0.0 <= costs.draft_seconds("eagle", *call) < 5e-4


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_stands_still_teaches_nothing(seconds: float) -> None:
    costs = CostModel.from_document(LINE)
    costs.learn(stats(4, seconds), {})
    assert costs.document() == CostModel.from_document(LINE).document()
