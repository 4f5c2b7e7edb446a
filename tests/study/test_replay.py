"""Replay in simulated time: small cases by hand, and what must hold for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bozza.core import Load, Plan, Request, StepStats
from bozza.errors import ConfigError
from bozza.leader import Fixed
from bozza.leader.base import Ask
from bozza.leader.cost import CostModel
from bozza.study.guesses import parse_guessers
from bozza.study.replay import Simulation, leader_of, replay
from bozza.study.traces import Trace
from invented import COSTS, invented, seconds

KEYS = ("speedup_mean_throughput", "speedup_total")
PROMPT = (8, 9, 8)
TRACE = Trace(PROMPT, (1, 2, 3, 4, 5), {"eagle": (2, 0, 0, 0, 0), "mtp": (1, 0, 0, 1, 0)}, {"eagle": 3, "mtp": 2})
DRAFT = ["recorded:eagle", "recorded:mtp"]


def one(policy: str, trace: Trace = TRACE, draft: Sequence[str] = DRAFT, **options: Any) -> dict[str, Any]:
    return replay([trace], COSTS, policy, draft=draft, **options)


@pytest.mark.parametrize("batch", [1, 32])
def test_off_is_plain_decoding_to_the_last_digit(batch: int) -> None:
    document = replay([invented(seed) for seed in range(5)], COSTS, "off", batch=batch)
    assert (document["speedup_mean_throughput"], document["speedup_total"]) == (1.0, 1.0)
    assert document["choices"] == {"off": 60}
    assert (document["steps"], document["tokens"], document["requests"]) == (60, 60, 5)
    assert all(run["seconds"] == run["plain_seconds"] for run in document["by_request"])


def test_one_drafter_by_hand() -> None:
    document = one("fixed:eagle=3")
    # Three of which two stand, then one step with room for one token, which is wrong, then one without room.
    by_hand = seconds(TRACE, 0, 3, eagle=3) + seconds(TRACE, 3, 1, eagle=1) + seconds(TRACE, 4, 0)
    (run,) = document["by_request"]
    assert run["seconds"] == pytest.approx(by_hand, rel=1e-12)
    assert run["plain_seconds"] == pytest.approx(sum(seconds(TRACE, place, 0) for place in range(5)), rel=1e-12)
    assert document["speedup_total"] == pytest.approx(run["plain_seconds"] / by_hand, rel=1e-12)
    assert run["speedup"] == document["speedup_total"] == document["speedup_mean_throughput"]
    assert document["choices"] == run["choices"] == {"eagle": 2, "off": 1}


def test_drafts_of_two_are_merged_and_both_are_paid() -> None:
    document = one("fixed")
    # Both say 1; then eagle goes on with 2 and a wrong token, mtp with another wrong one: four nodes, three committed.
    # At 3 eagle is wrong, mtp right, but there is room for one node only: eagle comes first.
    spent = seconds(TRACE, 0, 4, eagle=3, mtp=2) + seconds(TRACE, 3, 1, eagle=1, mtp=1) + seconds(TRACE, 4, 0)
    assert document["by_request"][0]["seconds"] == pytest.approx(spent, rel=1e-12)
    assert document["choices"] == {"eagle+mtp": 1, "eagle": 1, "off": 1}
    first = one("fixed", draft=DRAFT[::-1])
    assert first["choices"] == {"mtp+eagle": 1, "mtp": 1}


def test_wrong_tokens_of_two_drafters_are_not_the_same() -> None:
    trace = Trace(PROMPT, (1, 2, 3, 4), {"eagle": (0, 0, 0, 0), "mtp": (0, 0, 0, 0)}, {"eagle": 1, "mtp": 1})
    (run,) = one("fixed", trace)["by_request"]
    spent = [seconds(trace, place, 2, eagle=1, mtp=1) for place in (0, 1)]
    spent += [seconds(trace, 2, 1, eagle=1, mtp=1), seconds(trace, 3, 0)]
    assert run["seconds"] == pytest.approx(sum(spent), rel=1e-12)


def test_as_many_tokens_from_all() -> None:
    assert one("fixed:2")["by_request"] == one("fixed:eagle=2,mtp=2")["by_request"]
    assert one("fixed:3")["by_request"] == one("fixed:eagle=3,mtp=2")["by_request"]  # no more than what was recorded
    assert one("fixed:mtp=1,eagle=0")["choices"] == {"mtp": 3}
    assert one("fixed:eagle=0")["choices"] == {"off": 5}
    assert one("fixed", draft=["recorded:eagle,k=1"])["by_request"] == one("fixed:eagle=1")["by_request"]


def test_a_free_drafter_runs_on_the_tokens_and_is_free_unless_the_costs_say_otherwise() -> None:
    trace = Trace((1, 2, 3, 4), (1, 2, 3, 4, 1, 2), {}, {})
    (run,) = one("fixed:2", trace, ["suffix"])["by_request"]
    # Nothing is known of what follows 4; then 2 3, and 1 2 with one token to come after the pass.
    spent = seconds(trace, 0, 0) + seconds(trace, 1, 2) + seconds(trace, 4, 1)
    assert run["seconds"] == pytest.approx(spent, rel=1e-12)
    (run,) = one("fixed:2", trace, ["ngram"])["by_request"]
    spent = seconds(trace, 0, 0, ngram=0) + seconds(trace, 1, 2, ngram=2) + seconds(trace, 4, 1, ngram=1)
    assert run["seconds"] == pytest.approx(spent, rel=1e-12)


def test_copies_share_what_is_paid_once() -> None:
    (run,) = one("fixed:eagle=3", batch=10)["by_request"]
    spent = 0.0
    for place, drafted in ((0, 3), (3, 1), (4, 0)):
        cached = 10 * (len(PROMPT) + place - 1)
        spent += 11.0 + 0.5 * 10 * (1 + drafted) + 0.01 * cached
        spent += 0.25 + 1.0 * 10 * drafted + 0.002 * cached if drafted else 0.0
    assert run["seconds"] == pytest.approx(spent, rel=1e-12)
    assert run["tokens"] == 5


def test_the_speedups_are_of_mean_throughput_and_of_all_time() -> None:
    traces = [invented(seed, length=10 + 20 * seed) for seed in range(3)]
    document = replay(traces, COSTS, "fixed:2", draft=DRAFT)
    runs = document["by_request"]
    rates = [sum(run["tokens"] / run[key] for run in runs) for key in ("seconds", "plain_seconds")]
    times = [sum(run[key] for run in runs) for key in ("seconds", "plain_seconds")]
    assert document["speedup_mean_throughput"] == pytest.approx(rates[0] / rates[1])
    assert document["speedup_total"] == pytest.approx(times[1] / times[0])
    assert document["speedup_total"] != pytest.approx(document["speedup_mean_throughput"], rel=1e-6)
    assert [run["tokens"] for run in runs] == [10, 30, 50]
    assert sum(run["steps"] for run in runs) == document["steps"] == sum(document["choices"].values())


class Spy:
    """A leader that lets another one lead, and writes down what it is told."""

    def __init__(self) -> None:
        self.leader = Fixed({"eagle": 3, "mtp": 2})
        self.loads: list[Load] = []
        self.seen: list[tuple[int, int, int, list[int]]] = []
        self.outcomes: list[StepStats] = []
        self.committed: list[tuple[int, ...]] = []

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        (request,) = requests
        assert request.decoding
        self.loads.append(load)
        self.seen.append((request.id, request.cached, request.remaining, list(request.tokens)))
        return self.leader.plan(requests, load, ask)

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        self.outcomes.append(outcome)
        self.committed += [tuple(tokens) for tokens in committed.values()]


def test_the_leader_sees_what_it_sees_in_the_engine() -> None:
    spy = Spy()
    traces = [TRACE, Trace((7,), (6,), {"eagle": (0,), "mtp": (0,)}, {"eagle": 3, "mtp": 2})]
    Simulation(traces, parse_guessers(DRAFT, traces), CostModel.from_document(COSTS), spy).run()
    assert spy.committed == [(1, 2, 3), (4,), (5,), (6,)]
    assert spy.loads[0] == Load(1, 1, 2, {0: 4})
    assert spy.loads[3] == Load(1, 1, 0, {1: 0})
    assert spy.seen[1] == (0, 5, 2, [*PROMPT, 1, 2, 3])
    first = spy.outcomes[0]
    assert (first.rows, first.new_tokens, first.cached_tokens, first.committed) == (1, 5, 2, 3)
    assert (first.drafted, first.accepted) == ({"eagle": 3, "mtp": 1}, {"eagle": 2})
    assert first.tested == {"eagle": 3, "mtp": 1}
    assert first.draft_seconds == pytest.approx({"eagle": 0.25 + 3.0 + 0.004, "mtp": 2.0 + 0.25 + 0.002})
    assert first.total_seconds == pytest.approx(seconds(TRACE, 0, 4, eagle=3, mtp=2))


@pytest.mark.parametrize("batch", [1, 16])
def test_the_adaptive_leaders_share_of_the_best_is_told(batch: int) -> None:
    traces = [invented(seed, length=60, cap=6) for seed in range(6)]
    found = replay(traces, COSTS, "adaptive", batch=batch)
    best = replay(traces, COSTS, "oracle", batch=batch)
    assert found["oracle"] == {key: best[key] for key in KEYS}
    shares = (found["share_of_oracle"], found["share_of_oracle_total"])
    assert shares == pytest.approx([found[key] / best[key] for key in KEYS])
    assert max(shares) <= 1.0
    assert found == replay(traces, COSTS, "adaptive", batch=batch), "nothing may depend on chance or on the clock"


def test_the_leader_keeps_learning_from_one_request_to_the_next() -> None:
    traces = [invented(seed, length=60, cap=6) for seed in range(6)]
    together = replay(traces, COSTS, "adaptive")["by_request"]
    alone = [replay([trace], COSTS, "adaptive", draft=None)["by_request"][0] for trace in traces]
    assert together[0] == alone[0]
    assert together[1:] != alone[1:]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("best", "no policy 'best': use off, fixed"),
        ("fixed:", "no policy 'fixed:'"),
        ("off:3", "no policy 'off:3'"),
        ("fixed:0", "'0' is no number of tokens, use 1 to 64"),
        ("fixed:65", "'65' is no number of tokens"),
        ("fixed:eagle=-1", "'-1' is no number of tokens, use 0 to 64"),
        ("fixed:eagle", "'' is no number of tokens"),
        ("fixed:medusa=3", "write NAME=N once for some of eagle, mtp"),
        ("fixed:eagle=3,eagle=2", "write NAME=N once for some of eagle, mtp"),
    ],
)
def test_policies_that_are_none_are_refused(policy: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        leader_of(policy, parse_guessers(DRAFT, [TRACE]), CostModel.from_document(COSTS))


def test_costs_must_know_every_recorded_drafter() -> None:
    with pytest.raises(ConfigError, match="the costs say nothing of drafter mtp"):
        replay([TRACE], COSTS | {"drafters": {"eagle": {"base": 1.0}}}, "off", draft=DRAFT)
    with pytest.raises(ConfigError, match="a pass takes no time"):
        replay([TRACE], {"verify": {"base": 0.0}}, "off", draft=["suffix"])
    with pytest.raises(ConfigError, match="batch is 0"):
        replay([TRACE], COSTS, "off", batch=0)
