"""The adaptive leader, in simulated time on invented traces and on the toy model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from bozza.core import Draft, Load, Request, StepStats
from bozza.leader import Adaptive, CostModel
from bozza.leader.adaptive import FEW
from bozza.params import SamplingParams
from bozza.study.guesses import Guesser, make_drafters, parse_guessers
from bozza.study.replay import Simulation, speedups
from bozza.study.traces import Trace

CAP = 8
# Like two cores and a model of 135M parameters: eight more tokens cost a fifth of a pass.
COSTS: dict[str, Any] = {
    "verify": {"base": 0.025, "per_token": 0.0006, "per_cached": 1e-6},
    "drafters": {"eagle": {"base": 0.0015, "per_token": 0.0008}},
}
DEAR = COSTS | {"verify": {"knots": [[1, 0.025], [2, 0.055], [64, 2.0]]}}  # a further token costs more than a pass


class Watched:
    """An adaptive leader, and what it decided."""

    def __init__(self, guessers: Sequence[Guesser], costs: Mapping[str, Any] = COSTS) -> None:
        self.records: list[dict[str, Any]] = []
        most = {guesser.name: guesser.tokens for guesser in guessers}
        paid = [guesser.name for guesser in guessers if guesser.spec is None]
        self.leader = Adaptive(most, paid, CostModel.from_document(costs), log=self.records.append)


def simulate(
    traces: Sequence[Trace], costs: Mapping[str, Any] = COSTS, draft: Sequence[str] | None = None
) -> tuple[Watched, float]:
    """Decode the traces; returns the leader and the speedup in all."""
    guessers = parse_guessers(draft, traces)
    watched = Watched(guessers, costs)
    runs = Simulation(traces, guessers, CostModel.from_document(costs), watched.leader).run()
    return watched, speedups(runs)["speedup_total"]


def trace(prompt: Sequence[int], output: Sequence[int], right: Callable[[int], int]) -> Trace:
    """A trace in which drafter eagle is right as often as `right` says of each place."""
    accept = tuple(min(right(place), CAP, len(output) - place) for place in range(len(output)))
    return Trace(tuple(prompt), tuple(output), {"eagle": accept}, {"eagle": CAP})


def prose(count: int, start: int) -> list[int]:
    """Tokens that never come again."""
    return list(range(start, start + count))


def asked(record: Mapping[str, Any]) -> list[str]:
    drafters: list[str] = record["choice"]["drafters"]
    return drafters


def lucky(seed: int, chance: float) -> Callable[[int], int]:
    """A drafter whose every token is right with some chance."""
    coins = random.Random(seed)

    def right(place: int) -> int:
        count = 0
        while coins.random() < chance and count < CAP:
            count += 1
        return count

    return right


@pytest.mark.parametrize("eagle", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_within_eight_steps_of_a_change_of_phase_the_choice_is_right(eagle: bool, seed: int) -> None:
    passage = prose(120, 1000)
    output = [*prose(60, 2000), *passage, *prose(60, 3000)]
    one = trace([*passage, *prose(40, 5000)], output, lucky(seed, 0.5))
    watched, speedup = simulate([one], draft=["suffix:k=16", *["recorded:eagle"] * eagle])
    steps = [(record["output_len"], asked(record), record["choice"]["tokens"]) for record in watched.records]
    # A copy begins when its first token is committed, and ends when one is that was not copied.
    first, copying, last = (
        [s for s in steps if begin < s[0] <= end] for begin, end in ((0, 60), (60, 180), (180, 238))
    )
    assert all("suffix" not in drafters for _, drafters, _ in first + last)
    assert all("suffix" in drafters and tokens >= 7 for _, drafters, tokens in copying[4:8])
    assert len(copying) <= 14
    if eagle:  # worth its time in prose: 0.9 tokens more for 2 to 4 ms of 25
        assert sum("eagle" in drafters for _, drafters, _ in last[:8]) >= 6
        assert sum("eagle" in drafters for _, drafters, _ in copying[-4:]) <= 1  # a try
    assert speedup > (1.9 if eagle else 1.6)


@pytest.mark.parametrize("draft", [["suffix"], ["ngram"], ["suffix", "recorded:eagle"], ["recorded:eagle"]])
@pytest.mark.parametrize("costs", [COSTS, DEAR])
def test_where_nothing_can_be_guessed_it_loses_less_than_three_percent(
    draft: list[str], costs: Mapping[str, Any]
) -> None:
    coins = random.Random(0)
    traces = [  # of 300 different tokens: one of two repeats by chance, and what follows it does not
        trace(*([coins.randrange(300) for _ in range(128)] for _ in range(2)), lambda place: 0) for _ in range(6)
    ]
    watched, speedup = simulate(traces, costs, draft)
    assert speedup > 0.97
    late = watched.records[len(watched.records) // 2 :]
    assert sum(record["choice"]["tokens"] > 0 for record in late) < len(late) / 20


def test_what_costs_as_much_as_it_may_gain_is_not_drafted_however_sure_it_is() -> None:
    output = prose(20, 100) * 8
    easy = trace([5], output, lambda place: CAP)
    watched, speedup = simulate([easy], DEAR)
    assert speedup >= 0.99
    assert {record["choice"]["tokens"] for record in watched.records[20:]} == {0}
    assert simulate([easy])[1] > 4.0


def test_a_paid_drafter_that_was_useless_is_found_again_when_it_is_good() -> None:
    bad = trace([1], prose(400, 1000), lambda place: 0)
    good = trace([2], prose(400, 5000), lambda place: 5)
    watched, _ = simulate([bad, good, bad])
    by_request: list[list[dict[str, Any]]] = [[r for r in watched.records if r["request"] == n] for n in range(3)]
    used = [[bool(asked(record)) for record in records] for records in by_request]
    assert sum(used[0][30:]) < 0.05 * len(used[0])
    assert sum(used[1][-40:]) == 40  # at the end of the good text it is used throughout
    assert used[1].index(True) < 40  # and it was tried soon
    assert sum(used[2][40:]) < 0.08 * len(used[2])


def test_a_free_drafter_that_is_sure_makes_a_paid_one_superfluous() -> None:
    copied = trace([*prose(30, 0)], prose(30, 0) * 14, lambda place: 3)
    watched, speedup = simulate([copied, copied])
    late = watched.records[len(watched.records) // 2 :]
    assert sum("eagle" in asked(record) for record in late) < len(late) / 10
    assert speedup > simulate([copied, copied], draft=["recorded:eagle"])[1]


def test_confidences_decide_how_much_of_a_draft_is_verified() -> None:
    """The drafter says how far it will be right, and it is true."""
    right = lucky(3, 0.7)
    one = trace([1], prose(500, 1000), right)
    sure = tuple(tuple(0.95 if node < a else 0.02 for node in range(CAP)) for a in one.accept["eagle"])
    told = Trace(one.prompt, one.output, one.accept, one.cap, None, {"eagle": sure})
    costs = COSTS | {"verify": COSTS["verify"] | {"per_token": 0.004}}
    blind, seeing = simulate([one], costs), simulate([told], costs)
    assert seeing[1] > 1.05 * blind[1]
    wasted = [
        sum(record["drafted"] - record["accepted"] for record in watched.records) / len(watched.records)
        for watched, _ in (blind, seeing)
    ]
    assert wasted[1] < wasted[0] / 2


def test_expectations_are_kept_on_the_whole() -> None:
    traces = [trace([n], prose(300, 1000 * n), lucky(n, 0.6)) for n in range(1, 5)]
    watched, _ = simulate(traces)
    late = watched.records[len(watched.records) // 3 :]
    expected, got = sum(r["expected"] for r in late), sum(r["committed"] for r in late)
    assert 0.93 * got < expected < 1.07 * got
    for row in watched.leader.reliability():
        assert abs(row["predicted"] - row["observed"]) < 0.1 or row["nodes"] < 60


def request(id_: int, tokens: Sequence[int], room: int = 100) -> Request:
    size = len(tokens)
    return Request(id_, list(tokens), size, SamplingParams(max_tokens=room), 0, frozenset(), size + room, slot=0)


def stats(seconds: float, nodes: int) -> StepStats:
    return StepStats(1, 1 + nodes, 0, 1, {"suffix": nodes}, {}, {}, {"verify": seconds}, {})


class Scripted:
    """Drafters that say what they are told."""

    def __init__(self, drafts: Mapping[str, Draft]) -> None:
        self.drafts = drafts
        self.budgets: dict[str, Mapping[int, int]] = {}

    def ask(self, name: str, budgets: Mapping[int, int]) -> dict[int, Draft]:
        assert name not in self.budgets, "asked twice in a step"
        self.budgets[name] = dict(budgets)
        return {id_: self.drafts[name].head(budget) for id_, budget in budgets.items() if budget > 0}


def certain(tokens: Sequence[int], name: str) -> Draft:
    chain = Draft.chain(tokens, name)
    return Draft(chain.tokens, chain.parents, chain.drafters, confidences=(0.99,) * len(tokens))


@pytest.mark.parametrize("count", [1, 3])
def test_no_draft_exceeds_a_request_s_room_and_one_without_room_is_decoded_plainly(count: int) -> None:
    leader = Adaptive({"suffix": 40}, (), CostModel.from_document(COSTS))
    requests = [request(n, [1, 2, 3]) for n in range(count + 1)]
    rooms = {n: 3 + n for n in range(count)} | {count: 0}
    script = Scripted({"suffix": certain(range(40), "suffix")})
    plan = leader.plan(requests, Load(count + 1, count + 1, 3 * (count + 1), rooms), script.ask)
    assert {id_: len(draft) for id_, draft in plan.drafts.items()} == {n: 3 + n for n in range(count)}
    assert plan.expected[count] == 1.0
    assert all(1.0 < plan.expected[n] <= 4.0 + n for n in range(count))


def test_only_the_likeliest_chain_is_taken_where_chains_are_verified() -> None:
    leader = Adaptive({"suffix": 8}, (), CostModel.from_document(COSTS))
    tree = Draft((1, 2, 3, 4), (-1, -1, 1, 0), ("suffix",) * 4, confidences=(0.3, 0.65, 0.6, 0.25))
    plan = leader.plan([request(0, [1])], Load(1, 1, 0, {0: 9}, chains=True), Scripted({"suffix": tree}).ask)
    assert plan.drafts[0].tokens == (2, 3)
    wide = Adaptive({"suffix": 8}, (), CostModel.from_document(COSTS))
    plan = wide.plan([request(0, [1])], Load(1, 1, 0, {0: 9}), Scripted({"suffix": tree}).ask)
    assert plan.drafts[0].tokens == (1, 2, 3, 4)


def test_of_drawn_tokens_none_is_dropped_and_what_stands_beside_them_does_not_depend_on_them() -> None:
    """Law and likelihood: a draft with laws is verified as it was drawn, however unlikely the leader takes it."""
    free = Draft((1, 2, 9), (-1, 0, -1), ("suffix",) * 3, confidences=(0.9, 0.8, 0.01))
    seen = set()
    for drawn in ((1, 5), (7, 8), (1, 2)):
        leader = Adaptive({"suffix": 8, "model": 2}, ["model"], CostModel.from_document(COSTS))
        chain = Draft(drawn, (-1, 0), ("model",) * 2, ("law", "law"), confidences=(0.001, 0.0001))
        script = Scripted({"suffix": free, "model": chain})
        plan = leader.plan([request(0, [1])], Load(1, 1, 0, {0: 20}), script.ask)
        assert script.budgets["model"] == {0: 2}
        paths = plan.drafts[0].paths()
        assert drawn in paths
        seen.add(frozenset(path for path in paths if path in {(1,), (1, 2), (9,)} and path not in {drawn, drawn[:1]}))
    assert seen == {frozenset({(1,), (1, 2)}), frozenset({(1, 2)}), frozenset()}


def test_requests_that_are_gone_are_forgotten_and_memory_does_not_grow() -> None:
    leader = Adaptive({"suffix": 8}, (), CostModel.from_document(COSTS))
    script = certain(range(8), "suffix")
    for step in range(300):
        requests = [request(step + n, [step, 2, 3]) for n in range(4)]
        plan = leader.plan(requests, Load(4, 4, 12, {r.id: 20 for r in requests}), Scripted({"suffix": script}).ask)
        leader.learn(stats(0.03, sum(map(len, plan.drafts.values()))), {r.id: (0, 5) for r in requests})
    assert len(leader._states) == 4
    assert len(leader.ledger._depths) <= 4
    assert len(leader._rates._seen) < 200


def test_a_long_prompt_in_the_pass_makes_tokens_dearer() -> None:
    """The pass is then bound by arithmetic: each further token costs its share."""
    bent = {"verify": {"knots": [[1, 0.025], [32, 0.03], [64, 0.06], [512, 0.6]]}, "overhead": 0.0}
    sizes = []
    for tokens in (1, 400):
        leader = Adaptive({"suffix": 16}, (), CostModel.from_document(bent))
        chain = Draft.chain(range(16), "suffix")
        unsure = Draft(chain.tokens, chain.parents, chain.drafters, confidences=tuple(0.7**n for n in range(1, 17)))
        load = Load(2 if tokens > 1 else 1, tokens, 0, {0: 20})
        plan = leader.plan([request(0, [1])], load, Scripted({"suffix": unsure}).ask)
        sizes.append(len(plan.drafts.get(0, Draft())))
    assert sizes[1] < sizes[0]
    assert sizes[0] >= 5


def test_a_stalled_step_does_not_change_what_is_done() -> None:
    output = prose(25, 100) * 8
    guessers = parse_guessers(["suffix"], [trace([5], output, lambda place: 0)])
    plain, _ = simulate([trace([5], output, lambda place: 0)], draft=["suffix"])
    stalled = Watched(guessers)
    learn, steps = stalled.leader.learn, iter(range(1000))

    def stall(outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        factor = 40.0 if next(steps) % 10 == 5 else 1.0
        slow = {stage: spent * factor for stage, spent in outcome.seconds.items()}
        learn(StepStats(*outcome_fields(outcome, slow)), committed)

    stalled.leader.learn = stall  # type: ignore[method-assign]
    traces = [trace([5], output, lambda place: 0)]
    Simulation(traces, guessers, CostModel.from_document(COSTS), stalled.leader).run()
    sizes = [[record["choice"]["tokens"] for record in watched.records] for watched in (plain, stalled)]
    assert abs(len(sizes[0]) - len(sizes[1])) <= 2


def outcome_fields(outcome: StepStats, seconds: Mapping[Any, float]) -> list[Any]:
    names = ("rows", "new_tokens", "cached_tokens", "committed", "drafted", "tested", "accepted")
    return [*(getattr(outcome, name) for name in names), seconds, outcome.draft_seconds]


# What a drafter has missed has to be read


def reader(each: float) -> Adaptive:
    law = {"base": 0.002, "per_read": each}
    costs: dict[str, Any] = {"verify": {"base": 0.05, "per_token": 0.003}, "drafters": {"model": law}}
    return Adaptive({"model": 4}, ["model"], CostModel.from_document(costs))


def serve(leader: Adaptive, one: Request, steps: int, each: float, right: int) -> list[float]:
    """Seconds of drafter model in each step. It reads what it missed in so much a token, and has so many right."""
    one.cached = len(one.tokens) - 1
    read, spent = 0, []
    for step in range(steps):
        wrong, fresh = 10**6, 2000 + 10 * step
        said = [*range(fresh, fresh + right), *[wrong] * (4 - right)]
        script = Scripted({"model": Draft.chain(said, "model")})
        nodes = len(leader.plan([one], Load(1, 1, one.cached, {one.id: 20}), script.ask).drafts.get(one.id, ()))
        missed = one.cached - read if one.cached - read > FEW else 0
        spent.append(0.002 + each * missed if script.budgets.get("model") else 0.0)
        read = one.cached if spent[-1] else read
        committed = list(range(fresh, fresh + min(right, nodes) + 1))
        seconds: Any = {"verify": 0.05 + 0.003 * (1 + nodes), "draft": spent[-1]}
        drafting = {"model": spent[-1]} if spent[-1] else {}
        outcome = StepStats(1, 1 + nodes, one.cached, len(committed), {}, {}, {}, seconds, drafting)
        leader.learn(outcome, {one.id: committed})
        one.tokens += committed
        one.cached = len(one.tokens) - 1
    return spent


def test_a_prompt_that_takes_longer_to_read_than_its_drafts_can_save_is_not_read() -> None:
    assert all(serve(reader(0.001), request(0, range(10)), 10, 0.001, 2))
    assert not any(serve(reader(0.001), request(0, range(5000), 30), 10, 0.001, 2))
    assert all(serve(reader(0.001), request(0, range(300), 1000), 10, 0.001, 2))


def test_what_was_read_once_costs_nothing_more() -> None:
    leader = reader(0.001)
    assert all(serve(leader, request(0, range(300), 1000), 20, 0.001, 2))
    assert leader.costs.reading_seconds("model", 200) == pytest.approx(0.2, rel=0.1)


def test_what_reading_takes_is_learned() -> None:
    leader = reader(0.001)
    for id_ in range(60):
        assert serve(leader, request(id_, range(200)), 2, 0.0, 2)[0]
    assert leader.costs.reading_seconds("model", 200) < 0.1  # of 0.2
    assert leader.costs.draft_seconds("model", 1, 4, 4, 0) < 0.004


def test_a_dear_try_is_saved_for() -> None:
    leader = reader(0.0002)
    assert any(serve(leader, request(0, range(100), 10**5), 300, 0.0002, 0))  # it is of no use
    spent = serve(leader, request(1, range(1000), 10**5), 3000, 0.0002, 0)
    tries = [seconds for seconds in spent if seconds]
    assert max(tries) > 0.2
    assert sum(tries) < 0.02 * 3000 * 0.053


def test_each_decision_is_told_with_its_candidates_and_its_outcome() -> None:
    one = trace([1, 2, 3], prose(40, 100), lucky(1, 0.6))
    watched, _ = simulate([one])
    keys = {"step", "request", "output_len", "rate", "candidates", "choice", "expected", "seconds", "seconds_taken"}
    assert all(set(record) == keys | {"committed", "drafted", "accepted"} for record in watched.records)
    assert sum(record["committed"] for record in watched.records) == 40
    assert all(record["accepted"] == record["committed"] - 1 for record in watched.records)
    first = watched.records[0]["candidates"]
    assert first[0] == {"drafters": [], "tokens": 0, "gain": 0.0, "seconds": first[0]["seconds"]}
    assert {name for candidate in first for name in candidate["drafters"]} == {"eagle"}
    assert all(record["seconds"] > 0.0 < record["seconds_taken"] for record in watched.records)


def test_drafters_keep_their_own_records() -> None:
    """Two drafters of a kind are told apart by name: one is always right, the other never."""
    output = prose(200, 1000)
    both = Trace((1,), tuple(output), {"good": (4,) * 200, "bad": (0,) * 200}, {"good": 4, "bad": 4})
    costs = COSTS | {"drafters": dict.fromkeys(("good", "bad"), COSTS["drafters"]["eagle"])}
    guessers = parse_guessers(["recorded:bad", "recorded:good"], [both])
    watched = Watched(guessers, costs)
    Simulation([both], guessers, CostModel.from_document(costs), watched.leader).run()
    late = watched.records[len(watched.records) // 2 :]
    assert all("good" in asked(record) for record in late)
    assert sum("bad" in asked(record) for record in late) < len(late) / 10
    assert make_drafters(guessers, [both]).keys() == {"good", "bad"}
