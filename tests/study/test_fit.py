"""Medians, slopes and monotone curves from measured steps."""

from __future__ import annotations

import pytest

from bozza.study.fit import FAR, DraftTime, LateDraft, PassTime, cost_document, draft_law, non_decreasing


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 5.0, 4.0, 3.0, 9.0], [1.0, 4.0, 4.0, 4.0, 9.0]),
        ([2.0], [2.0]),
    ],
)
def test_non_decreasing(values: list[float], expected: list[float]) -> None:
    assert non_decreasing(values) == pytest.approx(expected)


def test_knots_are_medians_in_order_and_go_on_as_the_upper_half_does() -> None:
    passes = [PassTime(1, tokens, 0, 1.0 + tokens) for tokens in (16, 1, 4, 8) for _ in range(3)]
    passes.append(PassTime(1, 4, 0, 100.0))
    document = cost_document(passes, [], [])
    assert document["verify"]["knots"] == [[1, 2.0], [4, 5.0], [8, 9.0], [16, 17.0], [FAR, pytest.approx(513.0)]]


def test_a_flat_end_of_the_curve_does_not_make_more_tokens_free() -> None:
    knots = [(1, 1.0), (8, 2.0), (32, 4.0), (64, 3.0)]  # the last two become 3.5
    document = cost_document([PassTime(1, tokens, 0, seconds) for tokens, seconds in knots], [], [])
    assert document["verify"]["knots"][-2][1] == 3.5
    assert document["verify"]["knots"][-1][1] == pytest.approx(3.5 + (512 - 64) * 1.5 / 56)


def test_cached_tokens_are_taken_out_of_the_knots() -> None:
    near = [PassTime(1, 1, 10, 2.0 + 10 * 0.01), PassTime(1, 5, 20, 3.0 + 20 * 0.01)]
    document = cost_document(near, [PassTime(1, 1, 110, 2.0 + 110 * 0.01)], [])
    assert document["verify"]["per_cached"] == pytest.approx(0.01)
    assert document["verify"]["knots"][:2] == [[1, pytest.approx(2.0)], [5, pytest.approx(3.0)]]


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_long_passes_that_are_no_slower_cost_nothing_more(seconds: float) -> None:
    document = cost_document([PassTime(1, 1, 10, 2.0)], [PassTime(1, 1, 110, seconds)], [])
    assert document["verify"]["per_cached"] == 0.0


def test_rows_cost_what_passes_over_one_row_do_not() -> None:
    passes = [PassTime(1, 1, 0, 1.0), PassTime(1, 11, 0, 2.0)]
    many = [PassTime(4, 4, 0, 1.3 + 3 * 0.2), PassTime(9, 9, 0, 1.8 + 8 * 0.2)]
    assert cost_document(passes + many, [], [])["verify"]["per_row"] == pytest.approx(0.2)
    cheap = [PassTime(4, 4, 0, 1.2)]
    assert cost_document(passes + cheap, [], [])["verify"]["per_row"] == 0.0


NOTHING = {"per_cached": 0.0, "per_read": 0.0}


def calls(base: float, depth: float, token: float, shapes: list[tuple[int, int]]) -> list[DraftTime]:
    return [DraftTime("d", rows, k, base + depth * k + token * rows * k) for rows, k in shapes for _ in range(3)]


def test_a_draft_law_is_found_from_four_shapes() -> None:
    law = draft_law(calls(3.0, 0.5, 0.1, [(1, 1), (1, 8), (4, 1), (4, 8)]))
    assert law == pytest.approx({"base": 3.0, "per_depth": 0.5, "per_token": 0.1} | NOTHING)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(1, 1), (1, 8)], {"base": 3.0, "per_depth": 0.6, "per_token": 0.0}),
        ([(1, 1), (4, 1)], {"base": 3.5, "per_depth": 0.0, "per_token": 0.1}),
        ([(1, 1)], {"base": 3.6, "per_depth": 0.0, "per_token": 0.0}),
    ],
)
def test_what_was_not_varied_has_no_share(shapes: list[tuple[int, int]], expected: dict[str, float]) -> None:
    assert draft_law(calls(3.0, 0.5, 0.1, shapes)) == pytest.approx(expected | NOTHING)


@pytest.mark.parametrize(("seconds", "each"), [(3.6 + 400 * 0.02, 0.02), (3.6, 0.0), (1.0, 0.0)])
def test_what_a_late_draft_takes_longer_is_reading(seconds: float, each: float) -> None:
    shapes = [(1, 1), (1, 8), (4, 1), (4, 8)]
    law = draft_law(calls(3.0, 0.5, 0.1, shapes), [LateDraft("d", 400, seconds)])
    assert law == pytest.approx({"base": 3.0, "per_depth": 0.5, "per_token": 0.1} | NOTHING | {"per_read": each})
    both = [*calls(3.0, 0.5, 0.1, shapes), DraftTime("other", 1, 1, 1.0)]
    document = cost_document([PassTime(1, 1, 0, 1.0)], [], both, [LateDraft("d", 400, seconds)])
    assert document["drafters"]["d"]["per_read"] == pytest.approx(each)
    assert document["drafters"]["other"]["per_read"] == 0.0


def test_no_weight_is_negative() -> None:
    slower_alone = [DraftTime("d", 1, 1, 2.0), DraftTime("d", 1, 8, 3.0), DraftTime("d", 4, 1, 1.5)]
    law = draft_law([*slower_alone, DraftTime("d", 4, 8, 2.5)])
    assert min(law.values()) == 0.0
    assert law["base"] > 1.0
    assert law["per_depth"] > 0.1


def test_drafters_are_told_apart() -> None:
    passes = [PassTime(1, 1, 0, 1.0)]
    document = cost_document(passes, [], [DraftTime("a", 1, 1, 2.0), DraftTime("b", 1, 1, 5.0)])
    assert {name: entry["base"] for name, entry in document["drafters"].items()} == {"a": 2.0, "b": 5.0}
    assert document["verify"]["knots"] == [[1, 1.0]]
