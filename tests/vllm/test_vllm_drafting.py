"""Drafting, against the calls that vLLM makes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Job, copying, drafted, prose

from bozza.drafters.history import SharedHistory
from bozza.vllm.drafting import Counts, Drafting, Limits
from bozza.vllm.options import Options
from bozza.vllm.rows import PATIENCE

LIMITS = Limits(drafted=16, context=512, budget=2048, vocabulary=20_000)
FIXED = Options(policy="fixed")


class Clock:
    """Time that passes when it is asked for, or as it is told to."""

    def __init__(self, tick: float = 0.01) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def engine(options: Options = FIXED, limits: Limits = LIMITS, **engine: Any) -> tuple[FakeEngine, Drafting]:
    drafting = Drafting(options, limits, Clock())
    return FakeEngine(drafting.propose, context=limits.context, **engine), drafting


def test_what_is_copied_is_drafted_and_accepted() -> None:
    fake, drafting = engine(Options())
    fake.add(copying("a", 1000))
    steps = fake.run()
    assert steps <= 18  # of 55 tokens
    assert drafting.counts.committed == 55
    assert drafting.counts.accepted["suffix"] >= 40
    assert drafting.counts.accepted["suffix"] <= drafting.counts.drafted["suffix"]
    assert drafting.counts.steps == steps


def test_where_nothing_repeats_nothing_is_drafted() -> None:
    fake, drafting = engine(Options())
    fake.add(Job("a", prose(50, 1000), prose(100, 3000)))
    assert fake.run() == 100
    assert drafting.counts.choices == {"off": 100}


def test_drafts_that_are_always_wrong_end() -> None:
    coins = random.Random(0)
    fake, _ = engine(Options(clock="steps"))
    fake.add(Job("a", [coins.randrange(8) for _ in range(60)], [coins.randrange(8) for _ in range(440)]))
    fake.run()
    costly = Options(costs={"verify": {"base": 1.0, "per_token": 1.0}}, clock="steps")
    strict, careful = engine(costly)
    strict.add(Job("a", [coins.randrange(8) for _ in range(60)], [coins.randrange(8) for _ in range(440)]))
    strict.run()
    assert sum(map(len, (call["a"] for call in strict.calls[-100:]))) < drafted(fake.calls[-100:], "a") / 4
    assert careful.counts.choices["off"] > 0.8 * careful.counts.steps


def alone(job: Job) -> dict[int, list[int]]:
    """What is drafted for a request that is served alone, by its length."""
    fake, _ = engine()
    mine = Job(job.name, job.prompt, job.output)
    fake.add(mine)
    drafts = {}
    while fake.running:
        told = fake.step()
        drafts[mine.done] = told[job.name]
    return drafts


@pytest.mark.parametrize("seed", range(5))
def test_batches_grow_shrink_and_move_and_every_request_keeps_its_own_drafts(seed: int) -> None:
    coins = random.Random(seed)
    jobs = [copying(f"r{number}", 1000 * number, coins.randrange(30, 90), coins.randrange(1, 9)) for number in range(9)]
    wanted = {job.name: alone(job) for job in jobs}
    waiting = list(jobs)
    fake, drafting = engine()
    while waiting or fake.running:
        while waiting and (not fake.running or coins.random() < 0.4):
            fake.add(waiting.pop())
        coins.shuffle(fake.running)
        batch = list(fake.running)
        told = fake.step()
        for job in batch:
            assert told[job.name] == wanted[job.name][job.done]
    assert drafting.counts.accepted["suffix"] > 200


def test_requests_of_one_text_are_told_apart_by_their_places() -> None:
    fake, _ = engine()
    twins = [copying("a", 1000), copying("b", 1000)]
    fake.add(*twins)
    assert fake.run() == len(alone(twins[0]))
    assert all(call["a"] == call["b"] for call in fake.calls)


def test_a_prompt_that_is_read_in_chunks_drafts_once_it_is_read() -> None:
    fake, drafting = engine(chunk=20)
    fake.add(copying("a", 1000))
    assert [fake.step()["a"] for _ in range(2)] == [[], []]
    assert drafting.counts.requests == 0
    fake.run()
    assert drafting.counts.accepted["suffix"] > 30


def test_prompts_beside_requests_that_decode() -> None:
    fake, _ = engine(chunk=7)
    fake.add(copying("a", 1000))
    while fake.running[0].read < 60:
        fake.step()
    fake.add(copying("b", 4000))
    told = [fake.step() for _ in range(6)]
    assert all(step["b"] == [] for step in told)
    assert drafted(told, "a") > 0


@pytest.mark.parametrize("most", [1, 3, 16])
def test_no_draft_is_longer_than_the_engine_allows(most: int) -> None:
    fake, _ = engine(limits=LIMITS._replace(drafted=most))
    fake.add(copying("a", 1000), copying("b", 5000))
    fake.run()
    lengths = {len(draft) for call in fake.calls for draft in call.values()}
    assert max(lengths) == most


def test_a_drafter_may_be_bounded_below_that() -> None:
    fake, _ = engine(Options(policy="fixed", draft=("suffix:k=2",)))
    fake.add(copying("a", 1000))
    fake.run()
    assert max(len(draft) for call in fake.calls for draft in call.values()) == 2


def test_at_the_end_of_the_context_no_more_is_drafted_than_fits() -> None:
    context = 100
    fake, _ = engine(limits=LIMITS._replace(context=context))
    passage = prose(60, 1000)
    job = Job("a", passage, passage)
    fake.add(job)
    left = []
    while fake.running:
        told = fake.step()
        left.append((context - len(job.tokens) - 1, len(told["a"])))
    assert all(length <= max(room, 0) for room, length in left)
    assert any(length == room > 0 for room, length in left)


def test_the_drafts_of_all_requests_fit_into_a_pass() -> None:
    fake, _ = engine(limits=LIMITS._replace(budget=40))
    fake.add(*(copying(f"r{number}", 1000 * number, before=1) for number in range(8)))
    for _ in range(10):
        told = fake.step()
        assert sum(1 + len(draft) for draft in told.values()) <= 40
    assert drafted(fake.calls, "r0") > 0


@pytest.mark.parametrize("strange", [-1, 20_000])
@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_no_draft_holds_a_number_that_is_no_token(strange: int, draft: str) -> None:
    fake, _ = engine(Options(policy="fixed", draft=(draft,)))
    passage = [*prose(12, 100), strange, strange, *prose(12, 300)]
    fake.add(Job("a", passage, [*prose(12, 100), *prose(12, 300)]))
    fake.run()
    told = [token for call in fake.calls for token in call["a"]]
    assert strange not in told
    assert {111, 311} <= set(told)  # what stands before and after it is copied


def test_requests_that_are_gone_are_forgotten() -> None:
    fake, drafting = engine()
    fake.add(copying("a", 1000), copying("b", 4000), copying("c", 8000))
    for _ in range(4):
        fake.step()
    fake.remove("a")
    fake.remove("c")
    fake.step()
    assert drafting.counts.requests == 3
    for _ in range(PATIENCE):
        fake.step()
    assert drafting.counts.requests == 1


def test_a_request_that_comes_back_in_time_goes_on() -> None:
    fake, drafting = engine()
    fake.add(copying("a", 1000), Job("b", prose(30, 9000), prose(60, 7000)))
    for _ in range(8):
        fake.step()
    paused = fake.remove("a")
    fake.step()
    fake.add(paused)
    paused.read = len(paused.tokens)
    before = drafting.counts.requests
    told = fake.step()
    assert drafting.counts.requests == before
    assert told["a"] == paused.output[paused.done :][: len(told["a"])] != []


def test_a_preempted_request_is_read_again_and_goes_on() -> None:
    fake, _ = engine(chunk=25)
    fake.add(copying("a", 1000), Job("b", prose(30, 9000), prose(90, 7000)))
    for _ in range(10):
        fake.step()
    paused = fake.remove("a")
    for _ in range(PATIENCE + 2):
        fake.step()
    paused.read = 0
    fake.add(paused)
    told = fake.step()
    while not told["a"]:
        told = fake.step()
    assert told["a"] == paused.output[paused.done :][: len(told["a"])]


def test_a_row_whose_past_has_changed_is_another_request() -> None:
    fake, drafting = engine()
    job = copying("a", 1000)
    fake.add(job)
    for _ in range(7):
        fake.step()
    known = drafting.counts.requests
    job.prompt = [*prose(10, 6000), *job.prompt[10:]]
    told = fake.step()
    assert drafting.counts.requests == known + 1
    assert told["a"] == job.output[job.done :][: len(told["a"])]


def test_steps_that_are_not_shown_do_no_harm() -> None:
    drafting = Drafting(FIXED, LIMITS, Clock())
    shown = [True]

    def propose(sampled: list[list[int]], lengths: Any, table: Any) -> list[list[int]]:
        return drafting.propose(sampled, lengths, table) if shown[0] else [[] for _ in sampled]

    fake = FakeEngine(propose)
    fake.add(copying("a", 1000), copying("b", 5000))
    for _ in range(8):
        fake.step()
    shown[0] = False
    fake.step()
    shown[0] = True
    told = fake.step()
    job = fake.running[0]
    assert told[job.name] == job.output[job.done :][: len(told[job.name])]


def test_outputs_enter_the_shared_history_and_prompts_do_not() -> None:
    history = SharedHistory()
    drafting = Drafting(FIXED, LIMITS, Clock(), history)
    fake = FakeEngine(drafting.propose)
    fake.add(Job("a", prose(40, 1000), prose(30, 2000)))
    fake.run()
    fake.add(Job("b", prose(20, 5000), prose(40, 6000)))
    for _ in range(PATIENCE + 2):
        fake.step()
    assert len(history) == 30
    assert not history.find(prose(10, 1000), 4)
    fake.add(Job("c", prose(20, 8000), [8500, *prose(30, 2000)]))
    fake.run()
    assert drafted(fake.calls, "c") > 0


def test_a_follow_up_that_begins_like_a_request_keeps_its_prompt_out_of_the_history() -> None:
    """The next turn of a conversation may take the row of the last one, which it goes on."""
    history = SharedHistory()
    drafting = Drafting(FIXED, LIMITS, Clock(), history)
    fake = FakeEngine(drafting.propose)
    first = Job("a", prose(40, 1000), prose(30, 2000))
    fake.add(first)
    fake.run()
    fake.add(Job("b", [*first.tokens, *prose(50, 3000)], prose(20, 4000)))
    fake.run()
    fake.add(Job("c", prose(20, 5000), prose(20, 6000)))
    fake.run()
    assert history.find(prose(10, 2000), 4)
    assert not history.find(prose(10, 3000), 4)


def timed(seconds: Callable[[int, int], float], options: Options = Options()) -> tuple[FakeEngine, Drafting]:  # noqa: B008
    """An engine whose steps take as long as `seconds(rows, drafted)` says."""
    clock = Clock(0.0)
    drafting = Drafting(options, LIMITS, clock)
    fake: FakeEngine

    def propose(sampled: list[list[int]], lengths: Any, table: Any) -> list[list[int]]:
        drafts = sum(len(job.draft) for job in fake.running)
        clock.now += seconds(len(sampled), drafts)
        return drafting.propose(sampled, lengths, table)

    fake = FakeEngine(propose)
    return fake, drafting


def noisy(name: str, seed: int, tokens: int = 400) -> Job:
    """Text in which a guess is right every other time."""
    coins = random.Random(seed)
    text = [0]
    while len(text) < tokens:
        last = text[-1]
        text.append((last * 7 + 3) % 40 if coins.random() < 0.6 else coins.randrange(40))
    return Job(name, text[:40], text[40:])


def test_what_steps_cost_is_learned_from_their_times() -> None:
    cheap, _ = timed(lambda rows, drafted: 0.03 + 0.00003 * drafted)
    dear, _ = timed(lambda rows, drafted: 0.03 + 0.03 * drafted)
    for fake in (cheap, dear):
        fake.add(*(noisy(str(number), number) for number in range(4)))
        fake.run()
    last = [sum(drafted(fake.calls[-60:], str(number)) for number in range(4)) for fake in (cheap, dear)]
    assert last[1] < last[0] / 3


def test_with_clock_steps_time_decides_nothing() -> None:
    calls: list[Sequence[dict[str, list[int]]]] = []
    for each in (0.0001, 0.2):
        fake, _ = timed(lambda rows, drafted, s=each: 0.1 + s * drafted, Options(clock="steps"))  # type: ignore[misc]
        fake.add(*(noisy(str(number), number) for number in range(3)))
        fake.run()
        calls.append(fake.calls)
    assert calls[0] == calls[1]
    assert drafted(calls[0], "1") > 0


def test_steps_that_read_prompts_teach_nothing_about_costs() -> None:
    records: list[dict[str, Any]] = []
    clock = Clock(0.0)
    drafting = Drafting(Options(), LIMITS, clock, log=records.append)
    fake: FakeEngine

    def propose(sampled: list[list[int]], lengths: Any, table: Any) -> list[list[int]]:
        clock.now += 0.03 if all(sampled) else 3.0
        return drafting.propose(sampled, lengths, table)

    fake = FakeEngine(propose, chunk=8)
    fake.add(Job("a", prose(8, 100), prose(120, 1000)))
    for _ in range(30):
        fake.step()
    fake.add(Job("b", prose(240, 5000), prose(20, 6000)))
    for _ in range(40):
        fake.step()
    assert records[-1]["seconds"] == pytest.approx(0.03, rel=0.1)


def test_what_vllm_did_not_verify_was_not_accepted() -> None:
    fake, drafting = engine()
    job = copying("a", 1000)
    fake.add(job)
    while len(job.draft) < 5:
        fake.step()
    before = drafting.counts.accepted["suffix"]
    assert job.draft[:3] == job.output[job.done : job.done + 3]
    job.draft = job.draft[:2]
    fake.step()
    assert drafting.counts.accepted["suffix"] == before + 2


def test_of_a_draft_with_branches_one_is_verified() -> None:
    fake, _ = engine()
    first, second = [1, 2, 3, *prose(12, 100)], [1, 2, 3, *prose(12, 200)]
    fake.add(Job("a", [*first, 50, *second, 51, 1, 2], [3, *prose(5, 300)]))
    (draft,) = fake.step().values()
    assert len(draft) > 3
    assert draft[0] in (100, 200)
    assert all(after == token + 1 for token, after in pairwise(draft) if token % 100 < 11)


def test_nodes_that_will_not_be_verified_are_not_chosen() -> None:
    records: list[dict[str, Any]] = []
    drafting = Drafting(Options(clock="steps"), LIMITS, Clock(), log=records.append)
    fake = FakeEngine(drafting.propose)
    fake.add(noisy("a", 3))
    fake.run()
    told = [record["choice"]["tokens"] for record in records]
    assert told == [len(call["a"]) for call in fake.calls[: len(told)]]


def test_while_prompts_are_read_drafts_leave_them_half_of_a_pass() -> None:
    fake, _ = engine(limits=LIMITS._replace(budget=20), chunk=30)
    fake.add(copying("a", 1000, length=30, before=1))
    for _ in range(3):
        fake.step()
    fake.add(Job("b", prose(200, 5000), prose(5, 9000)))
    told = [len(fake.step()["a"]) for _ in range(2)]
    assert told[0] == 9


def test_counts_are_shown_after_each_call() -> None:
    told: list[tuple[int, int]] = []

    def show(counts: Counts) -> None:
        told.append((counts.steps, counts.committed))

    drafting = Drafting(FIXED, LIMITS, Clock(), show=show)
    fake = FakeEngine(drafting.propose)
    fake.add(Job("a", prose(30, 1000), prose(5, 2000)))
    fake.run()
    assert told == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


def test_the_leader_tells_its_log_what_it_decided() -> None:
    records: list[dict[str, Any]] = []
    drafting = Drafting(Options(), LIMITS, Clock(), log=records.append)
    fake = FakeEngine(drafting.propose)
    fake.add(copying("a", 1000))
    steps = fake.run()
    assert len(records) == steps - 1  # what the last drafts would have come to is never seen
    assert sum(record["committed"] for record in records) == 54


def test_ngram_drafts_too() -> None:
    fake, drafting = engine(Options(policy="fixed", draft=("ngram:min=3,k=5",)))
    fake.add(copying("a", 1000))
    fake.run()
    assert drafting.counts.accepted["ngram"] > 20


def test_lists_and_other_arrays_do_as_a_table() -> None:
    drafting = Drafting(FIXED, LIMITS, Clock())
    text = [*prose(30, 100), *prose(20, 100)]
    table = np.zeros((1, 512), dtype=np.int64)
    table[0, :50] = text
    drafts = drafting.propose([[text[-1]]], [50], table)
    assert drafts[0][:10] == prose(10, 120)
