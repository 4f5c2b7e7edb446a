import pytest

from bozza.core import Draft, Request
from bozza.engine.scheduler import Scheduler
from bozza.errors import ConfigError
from bozza.params import SamplingParams
from toy import cycle


def request(id_, length):
    return Request(id_, [1] * length, length, SamplingParams(), 0, frozenset(), 10_000)


def decoding(scheduler, ids):
    for id_ in ids:
        scheduler.add(request(id_, 4))
    for admitted in scheduler.admit():
        admitted.cached = 3


def test_first_come_first_served_within_the_batch_size():
    scheduler = Scheduler(cycle(5), max_running=2, token_budget=16)
    for id_ in range(3):
        scheduler.add(request(id_, 4))
    assert [r.id for r in scheduler.admit()] == [0, 1]
    assert scheduler.admit() == []
    scheduler.remove(scheduler.running[0])
    assert [r.id for r in scheduler.admit()] == [2]
    assert {r.slot for r in scheduler.running} == {0, 1}


def test_long_prompts_are_chunked_under_the_budget():
    scheduler = Scheduler(cycle(5), max_running=4, token_budget=10)
    scheduler.add(request(0, 25))
    scheduler.add(request(1, 3))
    scheduler.admit()
    batch = scheduler.batch({})
    assert [(len(row.tokens), row.wanted) for row in batch.rows] == [(10, False)]
    batch.requests[0].cached = 20
    batch = scheduler.batch({})
    assert [(len(row.tokens), row.wanted) for row in batch.rows] == [(5, True), (3, True)]


def test_decoding_requests_always_run_and_drafts_leave_room_for_prompts():
    scheduler = Scheduler(cycle(5), max_running=4, token_budget=16)
    decoding(scheduler, [0, 1])
    assert scheduler.load().room == {0: 7, 1: 7}
    scheduler.add(request(2, 100))
    scheduler.admit()
    assert scheduler.load().room == {0: 3, 1: 3}
    batch = scheduler.batch({id_: Draft.chain([2] * 3, "x") for id_ in (0, 1)})
    assert [len(row.draft) for row in batch.rows] == [3, 3, 0]
    assert len(batch.rows[2].tokens) == 8


@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_report_117_a_one_token_remainder_of_a_prompt_joins_drafting_rows(prompt):
    scheduler = Scheduler(cycle(5), max_running=4, token_budget=16)
    decoding(scheduler, [0])
    scheduler.add(request(1, prompt))
    scheduler.admit()[0].cached = prompt - 1
    batch = scheduler.batch({0: Draft.chain([2, 3], "x")})
    assert [(len(row.tokens), len(row.draft), row.wanted) for row in batch.rows] == [(1, 2, True), (1, 0, True)]


def test_sizes_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        Scheduler(cycle(5), 0, 16)
    with pytest.raises(ConfigError, match="too small"):
        Scheduler(cycle(5), 16, 16)
