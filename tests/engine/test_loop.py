import itertools

import pytest
import torch

from bozza.core import Draft
from bozza.drafters.grammar import GrammarDrafter
from bozza.engine import Engine
from bozza.errors import ConfigError, PromptError
from bozza.leader import Fixed, Off
from bozza.params import SamplingParams, Structured
from bozza.rules import Coupled
from grammars import OneOf
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

    def checked(rows, hidden_layers=()):
        for request in served.scheduler.running:
            assert model.tokens[request.slot] == request.tokens[: request.cached]
        return forward(rows, hidden_layers)

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
    assert all(second.seconds[stage] > 0 for stage in ("plan", "draft", "verify", "sample", "other"))
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


def random_table():
    return ToyModel(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2)


@pytest.mark.parametrize("wrong_at", [(), (1,), (3,)])
@pytest.mark.parametrize("end", [None, 5, 6, 7])
def test_report_94_one_logprob_for_each_committed_token_from_the_row_before_it(wrong_at, end):
    """Also where a block is cut by an end token."""
    model = cycle(VOCAB)
    model.table = model.table + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 0.1
    served = engine(model, [Oracle(VOCAB, wrong_at)], end_ids=frozenset([] if end is None else [end]))
    asked = served.add([0], SamplingParams(max_tokens=20, logprobs=2), 0)
    run(served, asked)
    laws = model.table.log_softmax(dim=1)
    assert [entry.token for entry in asked.logprobs] == asked.output
    for before, entry in zip([0, *asked.output], asked.logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(laws[before, entry.token]))
        assert entry.rank == 1
        assert [token for token, _ in entry.top] == laws[before].topk(2).indices.tolist()


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_report_95_prompt_logprobs_do_not_depend_on_how_the_prompt_was_chunked(budget):
    model = random_table()
    served = engine(model, [Oracle(VOCAB)], max_running=2, token_budget=budget)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], [2, 7, 1, 8, 2, 8]]
    asked = [served.add(p, SamplingParams(max_tokens=5, prompt_logprobs=1, logprobs=0), 0) for p in prompts]
    plain = served.add([3, 1, 4], SamplingParams(max_tokens=5), 0)
    run(served, *asked, plain)
    laws = model.table.log_softmax(dim=1)
    for prompt, request in zip(prompts, asked, strict=True):
        assert request.prompt_logprobs[0] is None
        assert [entry.token for entry in request.prompt_logprobs[1:]] == prompt[1:]
        for before, entry in itertools.pairwise(prompt):
            found = [e for e in request.prompt_logprobs[1:] if e.token == entry]
            assert any(e.logprob == pytest.approx(float(laws[before, entry])) for e in found)
        assert [entry.token for entry in request.logprobs] == request.output
    assert plain.prompt_logprobs == plain.logprobs == []


def test_report_136_tested_are_the_drafted_tokens_whose_parent_stood():
    served = engine(drafters=[Oracle(VOCAB, (3,))], k=4)
    asked = served.add([0], SamplingParams(max_tokens=30), 0)
    steps = []
    while not asked.finished:
        steps.append(served.step())
    # Of four, two are accepted, the third is compared and fails, the fourth is not looked at.
    assert [step.tested["oracle"] for step in steps[:-1]] == [3] * (len(steps) - 1)
    assert sum(step.tested["oracle"] for step in steps) == asked.stats.tested["oracle"]
    assert asked.stats.accepted["oracle"] == 2 * len(steps)


def test_chains_only_keeps_the_branch_of_the_first_drafter():
    right, wrong = Oracle(VOCAB, name="right"), Oracle(VOCAB, (2,), name="wrong")
    served = engine(drafters=[wrong, right], chains_only=True)
    asked = served.add([0], SamplingParams(max_tokens=30), 0)
    run(served, asked)
    drafts = [row.draft for rows in served.model.passes for row in rows if len(row.draft)]
    assert all(draft.parents == tuple(range(-1, len(draft) - 1)) for draft in drafts)
    assert asked.stats.accepted["right"] == 0
    assert asked.output == [(1 + i) % VOCAB for i in range(30)]


@pytest.mark.parametrize("forced", [True, False])
def test_a_constraint_moves_with_committed_tokens_only_and_ends_inside_a_block(forced):
    """Reports 86, 91: the drafter proposes what the constraint forbids, and goes on past its end."""
    words = [[4, 5, 6, 7], [4, 5, 9, 1, 2, 3]]
    drafters = [GrammarDrafter()] if forced else [Oracle(VOCAB)]
    served = engine(random_table(), drafters, k=6)
    params = SamplingParams(max_tokens=30, temperature=9.0, structured=Structured(regex="see the constraint"))
    asked = [served.add([i], params, i, constraint=OneOf(words, VOCAB)) for i in range(8)]
    free = served.add([3], SamplingParams(max_tokens=30), 0)
    run(served, *asked, free)
    assert {tuple(request.output) for request in asked} == {tuple(word) for word in words}
    assert {request.finish_reason for request in asked} == {"stop"}
    assert free.output_len == 30
    if forced:
        assert sum(request.stats.accepted["grammar"] for request in asked) > 8
        assert free.stats.drafted["grammar"] == 0


class Fragile:
    """A watch that breaks at one token."""

    def __init__(self, at):
        self.at = at
        self.heard = []

    def push(self, token):
        self.heard.append(token)
        if token == self.at:
            raise KeyboardInterrupt
        return False


def test_half_a_verdict_is_none_the_request_is_aborted_and_others_go_on():
    """The interrupt comes while tokens are being committed: watches have heard what is not in the output."""
    served = engine(cycle(VOCAB), [Oracle(VOCAB, (3,))])
    first, broken, last = (
        served.add([start], SamplingParams(max_tokens=20), 0, watches=[watch])
        for start, watch in ((0, Fragile(-1)), (10, Fragile(15)), (20, Fragile(-1)))
    )
    with pytest.raises(KeyboardInterrupt):
        run(served, first, broken, last)
    assert broken.finish_reason == "abort"
    assert broken.slot is None
    run(served, first, last)
    assert first.output == list(range(1, 21))
    assert last.output == list(range(21, 41))
    assert first.watches[0].heard == first.output
    assert broken.output == [11, 12, 13]
    assert served.idle


def test_a_request_that_is_aborted_while_its_pass_runs_is_left_alone():
    """As when a stream is let go by the garbage collector in the middle of another stream's step."""
    served = engine(cycle(VOCAB), [Oracle(VOCAB)])
    first, gone, last = (served.add([start], SamplingParams(max_tokens=20), 0) for start in (0, 10, 20))
    served.step()
    before = gone.output
    verify = served._rule.verify

    def abort_meanwhile(*arguments):
        served.abort(gone)
        return verify(*arguments)

    served._rule.verify = abort_meanwhile
    run(served, first, last)
    assert (gone.finish_reason, gone.output) == ("abort", before)
    assert (first.output, last.output) == (list(range(1, 21)), list(range(21, 41)))


def test_chains_only_gives_the_branch_that_is_kept_all_of_the_room():
    drafters = [Oracle(VOCAB, name="right"), Oracle(VOCAB, (1,), name="wrong")]
    served = engine(drafters=drafters, chains_only=True, max_running=1, token_budget=5)
    asked = served.add([0], SamplingParams(max_tokens=10), 0)
    run(served, asked)
    assert asked.stats.passes == 2
