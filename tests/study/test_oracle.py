"""The oracle against a search over everything that could be done, and against every policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import pytest

from bozza.core import Draft
from bozza.drafters.merge import merge
from bozza.leader.cost import CostModel
from bozza.study.guesses import make_drafters, parse_guessers, request_of, standing
from bozza.study.oracle import Oracle
from bozza.study.replay import replay
from bozza.study.traces import Trace
from invented import COSTS, invented, seconds

DRAFT = ["recorded:eagle", "recorded:mtp", "ngram:k=4"]


def least(trace: Trace, draft: Sequence[str]) -> float:
    """The least time to the end over all sets of drafters, each with all numbers of tokens, by trying them."""
    guessers = parse_guessers(draft, [trace])

    def drafts_at(place: int, tokens: Sequence[int]) -> list[Draft]:
        drafts = []
        for guesser, count in zip(guessers, tokens, strict=True):
            if not count:
                continue
            drafter = make_drafters(guessers, [trace])[guesser.name]
            request = request_of(trace, 0)
            request.tokens += trace.output[:place]
            drafter.start(request)
            drafts += drafter.draft([request], [count])
        return [drafted for drafted in drafts if len(drafted)]

    @cache
    def after(place: int) -> float:
        left = len(trace.output) - place
        if not left:
            return 0.0
        times = []
        for tokens in itertools.product(*(range(min(guesser.tokens, left - 1) + 1) for guesser in guessers)):
            drafts = drafts_at(place, tokens)
            merged = merge(drafts, sum(map(len, drafts)))
            asked = {drafted.drafters[0]: len(drafted) for drafted in drafts}
            spent = seconds(trace, place, len(merged), **asked)
            times.append(spent + after(place + len(standing(merged, trace.output, place)) + 1))
        return min(times)

    return after(0)


@pytest.mark.parametrize("seed", range(12))
def test_it_equals_a_search_over_all_sets_and_lengths(seed: int) -> None:
    trace = invented(seed, length=9)
    guessers = parse_guessers(DRAFT, [trace])
    run = Oracle([trace], guessers, CostModel.from_document(COSTS)).run(0)
    assert run.seconds == pytest.approx(least(trace, DRAFT), rel=1e-12)
    assert run.plain_seconds == pytest.approx(sum(seconds(trace, place, 0) for place in range(9)), rel=1e-12)
    assert sum(run.choices.values()) == run.steps


def test_the_search_finds_work_for_every_drafter() -> None:
    chosen: set[str] = set()
    for seed in range(12):
        trace = invented(seed, length=9)
        chosen |= set(Oracle([trace], parse_guessers(DRAFT, [trace]), CostModel.from_document(COSTS)).run(0).choices)
    assert chosen == {"off", "eagle", "mtp", "ngram"}


@pytest.mark.parametrize("batch", [1, 8])
def test_no_policy_is_better(batch: int) -> None:
    traces = [invented(seed, length=40, cap=5) for seed in range(10)]
    best = replay(traces, COSTS, "oracle", batch=batch, draft=DRAFT)
    policies = ("off", "fixed", "fixed:1", "fixed:4", "fixed:eagle=2", "fixed:ngram=4,mtp=3", "adaptive")
    for policy in policies:
        found = replay(traces, COSTS, policy, batch=batch, draft=DRAFT)
        for mine, ideal in zip(found["by_request"], best["by_request"], strict=True):
            assert mine["seconds"] >= ideal["seconds"] * (1 - 1e-12)
            assert mine["plain_seconds"] == ideal["plain_seconds"]
    assert best["speedup_total"] > 1.0


def test_it_drafts_no_more_than_it_may() -> None:
    trace = Trace((1,), (5, 6, 7, 8, 9), {"eagle": (4, 4, 4, 4, 4)}, {"eagle": 4})
    for most, steps in ((1, 3), (2, 2), (4, 1)):
        run = Oracle([trace], parse_guessers([f"recorded:eagle,k={most}"], [trace]), CostModel.from_document(COSTS))
        assert run.run(0).steps == steps


def test_a_drafter_that_costs_more_than_it_saves_is_left_alone() -> None:
    costs = COSTS | {"drafters": {"eagle": {"base": 100.0}}}
    trace = Trace((1,), (5, 6, 7), {"eagle": (2, 2, 2)}, {"eagle": 2})
    run = Oracle([trace], parse_guessers(["recorded:eagle"], [trace]), CostModel.from_document(costs)).run(0)
    assert run.choices == {"off": 3}
    assert run.seconds == run.plain_seconds
