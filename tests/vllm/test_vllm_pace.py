"""How long steps take."""

from __future__ import annotations

import pytest

from bozza.leader import Adaptive, CostModel
from bozza.vllm.options import DEFAULT_COSTS
from bozza.vllm.pace import AGAIN, DRAFTED, LEAST, PATIENCE, PLAIN, SELDOM, WARM, Pace


def leader() -> Adaptive:
    return Adaptive({"suffix": 16}, (), CostModel.from_document(DEFAULT_COSTS))


def settled(rows: int = 2) -> tuple[Adaptive, Pace]:
    """A pace that knows how long plain steps take: 0.05 s."""
    led = leader()
    pace = Pace(led, follow=True, known=False)
    for _ in range(PLAIN):
        pace.seconds(rows, 0, 0, 0.05)
    return led, pace


def test_plain_steps_set_the_level_and_leave_the_shape() -> None:
    led = leader()
    pace = Pace(led, follow=True, known=False)
    before = [led.costs.pass_seconds(1, tokens, 0) for tokens in (1, 5, 17)]
    for _ in range(PLAIN - 1):
        assert pace.quiet
        assert pace.seconds(1, 0, 0, 0.05 * before[0]) == before[0]
    assert pace.seconds(1, 0, 0, 99.0) == pytest.approx(0.05 * before[0])  # a stall among them moves nothing
    assert not pace.quiet
    after = [led.costs.pass_seconds(1, tokens, 0) for tokens in (1, 5, 17)]
    assert after == pytest.approx([0.05 * seconds for seconds in before])
    assert pace.seconds(1, 0, 0, 0.123) == 0.123  # from here on plain steps are learned from


@pytest.mark.parametrize("each", [0.0002, 0.05])
def test_steps_with_drafts_set_what_a_token_costs_on_top(each: float) -> None:
    led, pace = settled()
    guess = led.costs.pass_seconds(2, 10, 0)
    for _ in range(WARM):
        pace.seconds(2, 3, 0, 20.0)  # kernels are built
    for drafted in range(1, DRAFTED):
        pace.seconds(2, drafted, 0, 0.05 + each * drafted)
    assert led.costs.pass_seconds(2, 10, 0) == guess
    pace.seconds(2, 4, 0, 7.0)
    assert led.costs.pass_seconds(2, 2, 0) == pytest.approx(0.05)
    for drafted in (1, 8, 40):
        assert led.costs.pass_seconds(2, 2 + drafted, 0) == pytest.approx(0.05 + each * drafted)
    assert led.costs.pass_seconds(1, 1, 0) < 0.05
    assert pace.seconds(2, 9, 40, 0.25) == 0.25  # from here on all steps are learned from


def test_no_token_is_taken_to_cost_nothing() -> None:
    led, pace = settled()
    for _ in range(WARM + DRAFTED):
        pace.seconds(2, 5, 0, 0.04)
    assert led.costs.pass_seconds(2, 12, 0) == pytest.approx(0.05 * (1 + 10 * LEAST))


def test_drafts_are_not_held_back_for_ever() -> None:
    led = leader()
    pace = Pace(led, follow=True, known=False)
    for _ in range(PATIENCE):
        assert pace.quiet
        pace.seconds(2, 0, 0, None)
    assert not pace.quiet
    before = led.costs.document()
    for _ in range(WARM + DRAFTED):
        pace.seconds(2, 5, 0, 0.04)
    assert led.costs.document() == before  # without a level, what drafts cost on top is not known


def test_first_drafts_that_wait_for_kernels_say_nothing() -> None:
    led, pace = settled()
    for step in range(WARM + DRAFTED):
        pace.seconds(2, 4, 0, 3.0 if step < WARM + DRAFTED // 2 else 0.07)
    assert led.costs.pass_seconds(2, 6, 0) == pytest.approx(0.07)


def dear() -> tuple[Adaptive, Pace]:
    """A pace that found out in a bad moment that a token costs ten steps."""
    led, pace = settled()
    for _ in range(WARM + DRAFTED):
        pace.seconds(2, 1, 0, 0.55)
    assert led.costs.pass_seconds(2, 3, 0) == pytest.approx(0.55)
    return led, pace


def test_what_is_too_dear_to_be_tried_is_found_out_again() -> None:
    led, pace = dear()
    for step in range(AGAIN):
        assert led.costs.pass_seconds(2, 3, 0) > 0.5
        pace.seconds(2, 3 * (step < SELDOM), 0, 0.05)
    assert led.costs.pass_seconds(2, 2, 0) == pytest.approx(0.05)
    assert led.costs.pass_seconds(2, 3, 0) < 0.051
    for _ in range(WARM + DRAFTED):
        pace.seconds(2, 4, 0, 0.05 + 4 * 0.002)
    assert led.costs.pass_seconds(2, 3, 0) == pytest.approx(0.052)


def test_what_is_tried_now_and_then_is_left_to_the_leader() -> None:
    led, pace = dear()
    before = led.costs.document()
    for step in range(AGAIN):
        pace.seconds(2, int(step <= SELDOM), 0, 0.05)
    assert led.costs.document() == before
    for _ in range(AGAIN):
        pace.seconds(2, 0, 0, 0.05)
    assert led.costs.document() != before


@pytest.mark.parametrize(("follow", "known"), [(True, True), (False, False)])
def test_costs_that_were_given_are_never_doubted(follow: bool, known: bool) -> None:
    led = leader()
    pace = Pace(led, follow, known)
    before = led.costs
    for _ in range(2 * AGAIN):
        pace.seconds(2, 0, 0, 0.05)
    assert led.costs is before


def test_costs_that_are_known_are_followed_at_once() -> None:
    pace = Pace(leader(), follow=True, known=True)
    assert not pace.quiet
    assert pace.seconds(2, 7, 40, 0.25) == 0.25


def test_a_step_that_was_not_measured_costs_what_was_expected() -> None:
    led = leader()
    pace = Pace(led, follow=True, known=True)
    assert pace.seconds(2, 7, 40, None) == led.costs.pass_seconds(2, 9, 40)
    assert pace.seconds(2, 7, 40, 0.0) == led.costs.pass_seconds(2, 9, 40)


def test_times_may_be_left_out() -> None:
    led = leader()
    pace = Pace(led, follow=False, known=False)
    for _ in range(2 * (PLAIN + DRAFTED)):
        assert not pace.quiet
        assert pace.seconds(1, 3, 0, 5.0) == led.costs.pass_seconds(1, 4, 0)
