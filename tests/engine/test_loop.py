import itertools

import pytest

from bozza.core import Draft
from bozza.engine import Engine
from bozza.errors import ConfigError, PromptError
from bozza.leader import Fixed, Off
from bozza.params import SamplingParams
from bozza.rules import Coupled
from toy import Oracle, ToyModel, cycle

VOCAB = 50


def engine(model=None, drafters=(), k=4, **options):
    model = model or cycle(VOCAB)
    leader = Fixed({drafter.name: k for drafter in drafters}) if drafters else Off()
    return Engine(model, drafters, Coupled(), leader, **options)


def run(served, *requests):
    steps = 0
    while not all(request.finished for request in requests):
        served.step()
        steps += 1
        assert steps < 1000, "the engine hangs"
    return steps


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_report_1_max_tokens_is_kept_and_at_most_remaining_less_one_is_drafted(k, max_tokens):
    oracle = Oracle(VOCAB)
    served = engine(drafters=[oracle], k=k)
    asked = served.add([2, 3], SamplingParams(max_tokens=max_tokens), 0)
    left = []
    while not asked.finished:
        if asked.decoding:
            left.append(asked.remaining)
        served.step()
    assert asked.output == [(4 + i) % VOCAB for i in range(max_tokens)]
    assert asked.finish_reason == "length"
    assert oracle.budgets == [min(k, n - 1) for n in left if n > 1]


@pytest.mark.parametrize("wrong_at", [(), (1,), (2,), (3, 4), (4,)])
def test_wrong_drafts_cost_passes_never_tokens(wrong_at):
    oracle = Oracle(VOCAB, wrong_at)
    served = engine(drafters=[oracle])
    asked = served.add([0], SamplingParams(max_tokens=30), 0)
    run(served, asked)
    assert asked.output == [(1 + i) % VOCAB for i in range(30)]
    good = min(wrong_at, default=5) - 1
    assert asked.stats.passes == -(-30 // (good + 1))  # a prompt of one token is drafted for at once
    assert asked.stats.accepted["oracle"] == sum(name == "oracle" for name in asked.credits)
    assert asked.stats.committed == 30 == len(asked.credits)


@pytest.mark.parametrize("end", range(2, 9))
def test_report_2_an_end_token_inside_an_accepted_block_ends_the_request(end):
    served = engine(drafters=[Oracle(VOCAB)], end_ids=frozenset([end]))
    asked = served.add([0], SamplingParams(max_tokens=40), 0)
    run(served, asked)
    assert asked.output == list(range(1, end + 1))
    assert asked.finish_reason == "stop"
    assert asked.stats.committed == end


def test_ignore_eos_goes_on_and_stop_token_ids_still_stop():
    served = engine(drafters=[Oracle(VOCAB)], end_ids=frozenset([5]))
    goes_on = served.add([0], SamplingParams(max_tokens=10, ignore_eos=True), 0)
    stops = served.add([0], SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=(7,)), 0)
    run(served, goes_on, stops)
    assert goes_on.output == list(range(1, 11))
    assert stops.output == list(range(1, 8))


@pytest.mark.parametrize("prompt", [1, 10, 28, 29])
def test_report_17_20_the_context_is_filled_to_the_last_position(prompt):
    model = cycle(VOCAB)
    model.context_length = 30  # ToyModel asserts that no pass goes beyond it
    served = engine(model, [Oracle(VOCAB)], k=8)
    asked = served.add([1] * prompt, SamplingParams(max_tokens=100), 0)
    run(served, asked)
    assert len(asked.tokens) == 30
    assert asked.finish_reason == "length"


def test_requests_join_and_leave_between_steps():
    alone = engine(drafters=[Oracle(VOCAB, (3,))])
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    expected = []
    for i, prompt in enumerate(prompts):
        asked = alone.add(prompt, SamplingParams(max_tokens=5 + i), 0)
        run(alone, asked)
        expected.append(asked.output)
    oracle = Oracle(VOCAB, (3,))
    served = engine(drafters=[oracle], max_running=4, token_budget=16)
    asked = []
    for i, prompt in enumerate(prompts):
        asked.append(served.add(prompt, SamplingParams(max_tokens=5 + i), 0))
        if i % 3 == 2:
            served.step()
    run(served, *asked)
    assert [request.output for request in asked] == expected
    assert served.idle
    assert not oracle.live
    assert not served.model.tokens


def test_aborted_requests_leave_nothing_behind():
    oracle = Oracle(VOCAB)
    served = engine(drafters=[oracle], max_running=2)
    running, kept, waiting = (served.add([i], SamplingParams(max_tokens=20), 0) for i in range(3))
    served.step()
    served.step()
    served.abort(running)
    served.abort(waiting)
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert 0 < len(running.output) < 20
    run(served, kept)
    assert kept.output == [(2 + i) % VOCAB for i in range(20)]
    assert not oracle.live
    assert not served.model.tokens
    served.abort(kept)
    assert kept.finish_reason == "length"


def test_an_interrupted_pass_has_not_happened():
    model = cycle(VOCAB)
    served = engine(model, [Oracle(VOCAB)])
    asked = served.add([0], SamplingParams(max_tokens=20), 0)
    served.step()
    forward = model.forward

    def interrupt(rows, hidden_layers=()):
        model.forward = forward
        raise KeyboardInterrupt

    model.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        served.step()
    run(served, asked)
    assert asked.output == [(1 + i) % VOCAB for i in range(20)]


@pytest.mark.parametrize("where", ["rule", "observe"])
def test_a_step_interrupted_after_its_pass_leaves_others_right(where):
    """Two requests run; the step breaks after the forward pass, and the caller goes on."""
    oracle, model = Oracle(VOCAB, (3,)), cycle(VOCAB)
    served = engine(model, [oracle])
    requests = [served.add([i], SamplingParams(max_tokens=20), 0) for i in (0, 10)]
    served.step()
    verify = served._rule.verify

    def interrupt(*_):
        served._rule.verify = verify
        if where == "observe":
            oracle.observe = lambda request, tokens: None  # it missed tokens: let it compare nothing
        raise KeyboardInterrupt

    if where == "rule":
        served._rule.verify = interrupt
    else:
        oracle.observe = interrupt
    with pytest.raises(KeyboardInterrupt):
        served.step()
    forward = model.forward

    def checked(rows):
        for request in served.scheduler.running:
            assert model.tokens[request.slot] == request.tokens[: request.cached]
        return forward(rows)

    model.forward = checked
    run(served, *requests)
    assert [request.output for request in requests] == [[(n + i) % VOCAB for i in range(20)] for n in (1, 11)]


def test_no_more_is_drafted_than_the_pass_has_room_for():
    oracle = Oracle(VOCAB)
    served = engine(drafters=[oracle], k=30, max_running=4, token_budget=16)
    requests = [served.add([i, i + 1], SamplingParams(max_tokens=25), 0) for i in range(4)]
    run(served, *requests)
    assert max(oracle.budgets) <= 15
    assert all(sum(len(r.tokens) + len(r.draft) for r in rows) <= 16 for rows in served.model.passes)
    assert sum(r.stats.drafted["oracle"] for r in requests) == sum(oracle.budgets)


def test_merged_drafters_hedge_and_the_first_gets_the_credit():
    right, wrong = Oracle(VOCAB, name="right"), Oracle(VOCAB, (2,), name="wrong")
    served = engine(drafters=[wrong, right])
    asked = served.add([0], SamplingParams(max_tokens=30), 0)
    for _ in range(4):
        served.step()
    assert asked.output == list(range(1, 21))  # five tokens a pass, as the better of the two alone
    assert asked.stats.accepted == {"wrong": 4, "right": 12}
    assert asked.credits[:6] == ["wrong", "right", "right", "right", None, "wrong"]
    run(served, asked)
    assert asked.output == list(range(1, 31))


def test_steps_say_what_they_did_and_took():
    ticks = itertools.count()
    served = engine(drafters=[Oracle(VOCAB, (3,))], clock=lambda: float(next(ticks)))
    asked = served.add([0, 1, 2], SamplingParams(max_tokens=9), 0)
    first, second = served.step(), served.step()
    assert (first.rows, first.new_tokens, first.cached_tokens, first.committed) == (1, 3, 0, 1)
    assert (second.rows, second.new_tokens, second.cached_tokens, second.committed) == (1, 5, 3, 3)
    assert second.drafted == {"oracle": 4}
    assert second.accepted == {"oracle": 2}
    assert second.draft_seconds == {"oracle": 1.0}
    assert second.total_seconds == sum(second.seconds.values())
    assert all(second.seconds[stage] > 0 for stage in ("draft", "verify", "sample", "other"))
    assert asked.stats.seconds["verify"] == first.seconds["verify"] + second.seconds["verify"]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "empty"),
        ([0] * 30, {}, "shorten it to 29"),
        ([0, VOCAB], {}, f"token id {VOCAB}"),
        ([-1], {}, "token id -1"),
        ([0], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids: there is no token {VOCAB}"),
    ],
)
def test_bad_prompts_are_refused_before_anything_starts(prompt, params, says):
    model = cycle(VOCAB)
    model.context_length = 30
    served = engine(model)
    with pytest.raises((PromptError, ConfigError), match=says):
        served.add(prompt, SamplingParams(**params), 0)
    assert served.idle


def test_negative_control_a_rule_that_accepts_everything_is_noticed():
    class Gullible(Coupled):
        def verify(self, logits, requests, drafts):
            verdicts = super().verify(logits, requests, drafts)
            return [
                type(v)(tuple(range(len(d))), (*d.tokens, v.tokens[-1])) for v, d in zip(verdicts, drafts, strict=True)
            ]

    oracle = Oracle(VOCAB, (2,))
    served = Engine(cycle(VOCAB), [oracle], Gullible(), Fixed({"oracle": 4}))
    asked = served.add([0], SamplingParams(max_tokens=20), 0)
    run(served, asked)
    assert asked.output != list(range(1, 21))


def test_a_tree_keeps_its_accepted_branch_only():
    class Fork:
        name = "fork"

        def start(self, request): ...
        def observe(self, request, tokens): ...
        def stop(self, request): ...

        def draft(self, requests, budgets):
            last = requests[0].tokens[-1]
            return [Draft((last + 7, last + 1, last + 8, last + 2), (-1, -1, 0, 1), ("fork",) * 4)]

    model = ToyModel(cycle(VOCAB).table)
    served = engine(model, [Fork()])
    asked = served.add([0], SamplingParams(max_tokens=9, ignore_eos=True), 0)
    while not asked.finished:
        served.step()
        if not asked.finished:
            assert model.tokens[asked.slot] == asked.tokens[:-1]
    assert asked.output == list(range(1, 10))
