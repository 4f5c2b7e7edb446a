"""Forced tokens as drafts, on languages of token ids: no text, no grammar package."""

import itertools

import pytest
import torch

from bozza.core import NO_DRAFT, Request
from bozza.drafters.grammar import GrammarDrafter
from bozza.engine import Engine
from bozza.leader import Fixed
from bozza.params import SamplingParams, Structured
from bozza.rules import RULES
from grammars import OneOf
from toy import Oracle, ToyModel, cycle

VOCAB = 20
BOUND = SamplingParams(max_tokens=30, structured=Structured(regex="the constraint is given beside it"))


def request(constraint=None, id_=0):
    params = SamplingParams() if constraint is None else BOUND
    return Request(id_, [1], 1, params, 0, frozenset(), 100, constraint=constraint)


def test_what_is_forced_is_drafted_up_to_the_budget():
    asked = request(OneOf([(3, 4, 5, 6), (3, 4, 5, 7)], VOCAB))
    drafter = GrammarDrafter()
    assert drafter.draft([asked], [9])[0].tokens == (3, 4, 5)
    assert drafter.draft([asked], [2])[0].tokens == (3, 4)
    assert drafter.draft([asked], [2])[0].drafters == ("grammar", "grammar")
    asked.constraint.push(3)
    assert drafter.draft([asked], [9])[0].tokens == (4, 5)
    for token in (4, 5):
        asked.constraint.push(token)
    assert drafter.draft([asked], [9])[0] is NO_DRAFT  # a choice
    asked.constraint.push(7)
    assert drafter.draft([asked], [9])[0] is NO_DRAFT  # the end


def test_requests_without_a_language_get_nothing():
    asked = [request(), request(OneOf([(3, 4)], VOCAB), 1), request(id_=2)]
    drafts = GrammarDrafter("mine").draft(asked, [4, 4, 4])
    assert [draft.tokens for draft in drafts] == [(), (3, 4), ()]
    assert drafts[1].drafters == ("mine", "mine")


def test_the_drafter_keeps_nothing():
    drafter, asked = GrammarDrafter(), request(OneOf([(3, 4)], VOCAB))
    before = dict(vars(drafter))
    drafter.start(asked)
    drafter.draft([asked], [4])
    drafter.observe(asked, [3])
    drafter.stop(asked)
    assert vars(drafter) == before
    assert asked.constraint.taken == ()


def engine(model, rule, drafters, **budgets):
    return Engine(model, drafters, RULES[rule](), Fixed(budgets), end_ids=frozenset([0]))


def run(served, *requests):
    for _ in range(1000):
        if all(request.finished for request in requests):
            return
        served.step()
    raise AssertionError("the engine hangs")


def add(served, sequences, params=BOUND, prompt=(1,)):
    constraint = OneOf(sequences, VOCAB) if sequences else None
    return served.add(list(prompt), params, params.seed or 0, constraint=constraint)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("length", range(1, 10))
def test_report_91_forced_tokens_stand_and_the_end_of_the_language_is_the_end(rule, k, length):
    """The target alone would say 2, 3, 4, ...: the language has the last word."""
    sequence = [(7 * i + 3) % 19 + 1 for i in range(length)]
    served = engine(cycle(VOCAB), rule, [GrammarDrafter()], grammar=k)
    asked = add(served, [sequence])
    run(served, asked)
    assert asked.output == sequence
    assert asked.finish_reason == "stop"
    assert asked.stats.committed == length
    assert asked.stats.accepted["grammar"] == asked.stats.drafted["grammar"]
    assert asked.stats.passes == -(-length // (k + 1))


@pytest.mark.parametrize("rule", RULES)
def test_report_86_drafts_that_the_language_bans_cost_nothing_but_time(rule):
    """The oracle drafts what the target would say, the language says otherwise, now and then."""
    sequence = (2, 3, 4, 9, 10, 11, 5, 6, 7, 0)
    served = engine(cycle(VOCAB), rule, [GrammarDrafter(), Oracle(VOCAB)], grammar=2, oracle=4)
    asked = add(served, [sequence, (2, 3, 4, 9, 10, 12, 1)])
    run(served, asked)
    assert tuple(asked.output) == sequence
    assert asked.stats.accepted["oracle"] > 0
    assert asked.stats.accepted["grammar"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_report_89_other_requests_of_the_batch_are_untouched(rule):
    served = engine(cycle(VOCAB), rule, [GrammarDrafter(), Oracle(VOCAB, (3,))], grammar=3, oracle=4)
    bound = add(served, [(9, 8, 7, 6, 5)])
    free = add(served, None, SamplingParams(max_tokens=12), prompt=(4,))
    late = add(served, [(9, 8), (9, 7, 7)])
    run(served, bound, free, late)
    assert bound.output == [9, 8, 7, 6, 5]
    assert free.output == list(range(5, 17))
    assert free.stats.drafted["grammar"] == 0
    assert late.output in ([9, 8], [9, 7, 7])


@pytest.mark.parametrize("k", [1, 4])
def test_sampled_output_is_the_same_with_and_without_forced_drafts(k):
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    ways = [w for w in itertools.product((3, 4), (5,), (6, 7), (8,), (9,), (10, 11)) if w != (3, 5, 7, 8, 9, 11)]
    seen = set()
    for seed in range(20):
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, structured=BOUND.structured)
        outputs = []
        for budgets in ({}, {"grammar": k}):
            served = engine(ToyModel(table), "coupled", [GrammarDrafter()], **budgets)
            asked = add(served, ways, params)
            run(served, asked)
            outputs.append(tuple(asked.output))
        assert outputs[0] == outputs[1]
        assert outputs[0] in ways
        seen.add(outputs[0])
    assert len(seen) > 3
