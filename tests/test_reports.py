"""What broke for users of other systems, where no single module owns it. Numbers are those of our list of reports."""

from __future__ import annotations

import copy

import pytest
import torch

from bozza import LLM, SamplingParams
from bozza.core import Plan
from bozza.leader import Fixed
from bozza.models.runner import ForwardResult
from bozza.rules import RULES
from test_identity import DRAFTS, make, reference
from tiny import shallower, tiny, token_prompts

PHRASE = [9, 14, 23, 5]


@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "off"])
def test_report_13_115_rows_with_and_without_drafts_share_a_pass(target, folders, draft):
    """One repeats itself, one has no match, one has a single token left."""
    llm = make(target, folders, draft)
    prompts = [PHRASE * 6, [3], list(range(30, 50)), PHRASE * 3]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 30, 1, 2)]
    outputs = llm.generate(prompts, params)
    plain = llm.with_policy("off").generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("token", [5, 77, 210])
def test_report_26_a_prompt_of_one_token(target, folders, draft, token):
    out = make(target, folders, draft).generate([[token]], SamplingParams(max_tokens=30))[0]
    assert out.token_ids == reference(target, [token], 30)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
@pytest.mark.parametrize("start", range(3, 9))
def test_report_28_29_33_bursts_of_drafts_cross_a_sliding_window(tmp_path, architecture, start):
    """The window is 6: drafts begin before it is full and end after."""
    model = tiny(architecture)
    shallower(model, 2).save_pretrained(tmp_path / "shallow")
    llm = LLM(model, policy="fixed", draft=["ngram:k=5", f"model:{tmp_path / 'shallow'},k=5"])
    prompt = (PHRASE * 3)[:start]
    assert llm.generate([prompt], SamplingParams(max_tokens=20))[0].token_ids == reference(model, prompt, 20)


def test_report_38_65_a_prompt_that_only_repeats(target, folders):
    prompt = [42] * 48
    for draft in DRAFTS:
        out = make(target, folders, draft).generate([prompt], SamplingParams(max_tokens=32))[0]
        assert out.token_ids == reference(target, prompt, 32)


def test_report_44_118_each_row_accepts_its_own_number_from_none_to_all(target, folders):
    llm = LLM(target, policy="fixed", draft=[f"model:{folders['shallow']},k=4"], max_batch=12)
    seen = set()
    prompts = token_prompts(12)
    requests = [llm.engine.add(prompt, SamplingParams(max_tokens=60, ignore_eos=True), 0) for prompt in prompts]
    while not all(request.finished for request in requests):
        before = [request.stats.accepted["model"] for request in requests]
        running = [request.decoding and request.remaining > 4 for request in requests]
        llm.engine.step()
        gained = [r.stats.accepted["model"] - n for r, n, ran in zip(requests, before, running, strict=True) if ran]
        seen.add(tuple(sorted(set(gained))))
    assert {count for counts in seen for count in counts} == {0, 1, 2, 3, 4}
    assert any(len(counts) >= 3 for counts in seen)  # in one and the same pass
    plain = llm.with_policy("off").generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    assert [request.output for request in requests] == [out.token_ids for out in plain]


class OnAndOff(Fixed):
    """Drafts for three steps, then not for two."""

    step = 0

    def plan(self, requests, load, ask):
        self.step += 1
        return super().plan(requests, load, ask) if self.step % 5 < 3 else Plan()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_report_46_drafting_may_stop_and_start_again(target, folders, temperature):
    llm = make(target, folders, "both")
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    plain = llm.with_policy("off").generate([PHRASE * 4, [8]], params)
    llm.engine._leader = OnAndOff({"ngram": 4, "model": 4})
    outputs = llm.generate([PHRASE * 4, [8]], params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert all(out.stats.accepted["model"] > 5 for out in outputs)


@pytest.mark.parametrize("rule", RULES)
def test_report_53_a_sharp_law_at_every_position_leaves_nothing_but_the_likeliest(target, folders, rule):
    """Where only the last token of a block obeys temperature and top-p, the others would wander off."""
    llm = make(target, folders, "both", rule=rule)
    prompts = token_prompts(8)
    sharp = SamplingParams(max_tokens=40, temperature=0.01, top_p=0.1, seed=1)
    greedy = llm.generate(prompts, SamplingParams(max_tokens=40))
    assert [out.token_ids for out in llm.generate(prompts, sharp)] == [out.token_ids for out in greedy]


@pytest.mark.parametrize("rule", RULES)
def test_report_55_59_sampling_without_any_filter_and_a_seed_that_counts(target, folders, rule):
    llm = make(target, folders, "both", rule=rule)
    texts = [
        tuple(llm.generate([PHRASE], SamplingParams(max_tokens=30, temperature=2.0, seed=seed))[0].token_ids)
        for seed in (42, 42, 43)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_report_68_without_a_match_nothing_is_proposed(target):
    llm = LLM(target, policy="fixed", draft=["ngram:min=3"])
    out = llm.generate([list(range(20, 60))], SamplingParams(max_tokens=1))[0]
    assert out.stats.drafted == {}
    assert out.stats.passes == 1


def test_report_70_what_was_rejected_never_reaches_a_stream(target, folders):
    llm = make(target, folders, "both")
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=5, ignore_eos=True)
    stream = llm.stream(PHRASE * 3, params)
    seen = []
    for chunk in stream:
        seen += chunk.token_ids
        assert seen == stream.token_ids
    assert seen == llm.with_policy("off").generate([PHRASE * 3], params)[0].token_ids
    assert stream.stats.accepted.total() < stream.stats.drafted.total()


def test_report_124_nothing_is_left_behind_by_a_call(target, folders):
    before = copy.deepcopy(target.config.to_dict()), copy.deepcopy(target.generation_config.to_dict())
    llm = make(target, folders, "both")
    first, second = (llm.generate([PHRASE * 3], SamplingParams(max_tokens=30))[0] for _ in range(2))
    assert first.stats.drafted == second.stats.drafted
    assert first.stats.accepted == second.stats.accepted
    assert (target.config.to_dict(), target.generation_config.to_dict()) == before


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "coupled"])
def test_report_145_a_draft_model_of_nothing_but_nan_drafts_nothing(target, folders, rule):
    llm = LLM(target, policy="fixed", draft=[f"model:{folders['shallow']},k=4"], rule=rule)
    drafter = llm.engine._drafters["model"]
    forward = drafter._model.forward

    def broken(rows):
        return ForwardResult(torch.full_like(forward(rows).logits, torch.nan))

    drafter._model.forward = broken
    out = llm.generate([PHRASE], SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True))[0]
    assert len(out.token_ids) == 20
    assert out.stats.drafted.total() == 0
