"""The promise: the output is what the model alone would have produced, whatever drafts and batches there were.

Greedy fp32 is compared with transformers' own `generate`, sampling with plain decoding under the same seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bozza import LLM, SamplingParams
from bozza.core import Request
from bozza.drafters.spec import OPTIONS
from bozza.drafters.spec import RULES as RULE_NAMES
from bozza.rules import RULES
from bozza.verify import deviation, uniforms_of, views_of
from tiny import shallower, tiny, token_prompts

PROMPTS = token_prompts(22)
ALONE = (0, 1, 2, 3, 4, 5, *range(6, len(PROMPTS), 3))  # one by one they cost most: each kind, and some of the noise
DRAFTS = {
    "off": None,
    "ngram": ["ngram"],
    "model": ["model:{shallow}"],
    "both": ["ngram:k=5", "model:{shallow}"],
    "grammar": ["grammar", "ngram:k=3"],
    "suffix": ["suffix:k=9"],
    "prediction": ["prediction:k=6", "suffix:k=5"],
    "recycling": ["recycling:k=12"],
    "eagle": ["eagle:{head},k=9,width=3"],
    "mtp": ["mtp:{modules},k=6,width=2"],
    "many": ["suffix:k=4", "recycling:k=6", "eagle:{head},k=8,width=3", "model:{shallow},k=2"],
    "trees": ["model:{shallow},k=8,width=3"],
    "foreign": ["model:{foreign},k=4"],
    "foreign trees": ["model:{foreign},k=5,width=2", "ngram:k=2"],
    "two": ["model:{shallow},k=2", "model:{stranger},k=2"],
    "stranger": ["model:{stranger},k=3", "ngram:min=2,max=3,k=2"],
    "adaptive": ["suffix", "recycling:k=8", "eagle:{head},k=6,width=3", "model:{shallow},k=3"],
}
CHEAP = {"verify": {"base": 0.02, "per_token": 0.0001}}  # what the adaptive leader believes at first: drafts all it can


def make(model: Any, folders: Any, name: str, **options: Any) -> LLM:
    draft = DRAFTS[name]
    if draft is None:
        return LLM(model, policy="off", **options)
    if "foreign" in name:  # only with the target's tokenizer is it known to be one
        options["tokenizer"] = AutoTokenizer.from_pretrained(folders["target"])
    if name == "adaptive":  # from then on it goes by the clock, so no two runs do the same
        options["costs"] = CHEAP
        return LLM(model, draft=[text.format_map(folders) for text in draft], **options)
    return LLM(model, policy="fixed", draft=[text.format_map(folders) for text in draft], **options)


def reference(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers generates by itself."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def with_arrivals(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], cancel: bool = False
) -> list[Request]:
    """Requests that join a few at a time, while others run. With `cancel`, every third one is aborted on its way."""
    rng = random.Random(0)
    waiting, requests = list(zip(prompts, params, strict=True)), []
    while waiting or not all(request.finished for request in requests):
        for prompt, chosen in waiting[: rng.randint(0, 5)]:
            requests.append(llm.engine.add(prompt, chosen, chosen.seed or 0))
        waiting = waiting[len(requests) + len(waiting) - len(prompts) :]
        if not llm.engine.idle:
            llm.engine.step()
        for request in requests[::3] if cancel else ():
            if request.output_len > request.id % 17:
                llm.engine.abort(request)
    return requests


def decode(llm: LLM, batch: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    if batch == "arrivals":
        return [request.output for request in with_arrivals(llm, prompts, params)]
    if batch == "1":
        return [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    return [output.token_ids for output in llm.generate(prompts, params)]


def check(llm: LLM, batch: str, params: Sequence[SamplingParams], expected: Sequence[list[int]]) -> None:
    """Decode the prompts, or with "1" some of them, and compare."""
    if batch == "cancelled":
        requests = with_arrivals(llm, PROMPTS, params, cancel=True)
        aborted = [request.finish_reason == "abort" for request in requests]
        assert sum(aborted) >= 3
        for request, cut, ids in zip(requests, aborted, expected, strict=True):
            assert request.output == (ids[: request.output_len] if cut else ids)  # what was cancelled is a beginning
        return
    places = ALONE if batch == "1" else range(len(PROMPTS))
    prompts, chosen = [PROMPTS[place] for place in places], [params[place] for place in places]
    assert decode(llm, batch, prompts, chosen) == [expected[place] for place in places]


def test_every_drafter_and_rule_is_covered():
    """A new one is held to these tests as soon as it can be named."""
    assert tuple(RULES) == RULE_NAMES
    named = {text.partition(":")[0] for draft in DRAFTS.values() for text in draft or ()}
    assert named == set(OPTIONS)


@pytest.fixture(scope="module")
def greedy(target: Any) -> list[list[int]]:
    return [reference(target, prompt, 40) for prompt in PROMPTS]


def test_the_prompts_are_worth_testing(greedy):
    """Otherwise the tests below could pass for the wrong reason."""
    assert sum(ids[-1] == 2 for ids in greedy) >= 1  # some end early
    assert sum(len(ids) == 40 for ids in greedy) >= 10
    assert len({tuple(ids[:5]) for ids in greedy}) >= 15
    assert sum(greedy[place][-1] == 2 for place in ALONE) >= 1


BATCHES = {"1": 1, "8": 8, "arrivals": 32, "cancelled": 32}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_equals_generate(target, folders, greedy, rule, draft, batch):
    llm = make(target, folders, draft, rule=rule, max_batch=BATCHES[batch], token_budget=64)
    params = [SamplingParams(max_tokens=40)] * len(PROMPTS)
    check(llm, batch, params, greedy)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "mistral", "deepseek_v3", "gpt2"])
def test_greedy_equals_generate_on_other_architectures(architecture, tmp_path):
    model = tiny(architecture)
    shallower(model, 2).save_pretrained(tmp_path / "shallow")
    llm = LLM(model, policy="fixed", draft=["ngram", f"model:{tmp_path / 'shallow'}"], max_batch=8)
    outputs = llm.generate(PROMPTS[:10], SamplingParams(max_tokens=24))
    assert [out.token_ids for out in outputs] == [reference(model, prompt, 24) for prompt in PROMPTS[:10]]


@pytest.mark.parametrize("draft", ["ngram", "both"])
@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_report_1_every_limit_up_to_a_block_and_beyond(target, folders, greedy, draft, max_tokens):
    llm = make(target, folders, draft)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=max_tokens))
    assert [out.token_ids for out in outputs] == [ids[:max_tokens] for ids in greedy]
    for out, ids in zip(outputs, greedy, strict=True):
        assert out.finish_reason == ("stop" if ids[:max_tokens][-1] == 2 else "length")
        assert out.stats.committed == len(out.token_ids)


@pytest.mark.parametrize("draft", ["off", "ngram", "both"])
def test_report_2_an_end_token_inside_an_accepted_block(target, folders, greedy, draft):
    """Every token of a repetitive output becomes the end token once."""
    llm = make(target, folders, draft)
    prompt, ids = max(zip(PROMPTS, greedy, strict=True), key=lambda pair: len(pair[1]) - len(set(pair[1])))
    for end in set(ids):
        out = llm.generate([prompt], SamplingParams(max_tokens=40, stop_token_ids=(end,)))[0]
        assert out.token_ids == ids[: ids.index(end) + 1]
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("draft", ["off", "ngram", "model", "both"])
def test_report_17_20_the_context_is_filled_to_the_last_position(folders, draft):
    model = tiny("llama", max_position_embeddings=64)
    prompts = [[7, 8] * 10, [9] * 61, [9] * 62, [9] * 63, [5]]
    outputs = make(model, folders, draft).generate(prompts, SamplingParams(max_tokens=500, ignore_eos=True))
    for prompt, out in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(out.token_ids) == 64
        assert out.finish_reason == "length"
    plain = make(model, folders, "off").generate(prompts, SamplingParams(max_tokens=500, ignore_eos=True))
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_report_35_a_model_drafting_for_itself_is_always_right(target, folders, params, k):
    llm = LLM(target, policy="fixed", draft=[f"model:{folders['target']},k={k}"], max_batch=8)
    for out in llm.generate(PROMPTS[:8], SamplingParams(max_tokens=37, ignore_eos=True, **params)):
        assert out.stats.accepted == out.stats.drafted
        first = k + 1 if len(out.prompt_token_ids) == 1 else 1  # a longer prompt is read by a pass of its own
        assert out.stats.passes == 1 + -(-(37 - first) // (k + 1))


SAMPLED = [
    SamplingParams(max_tokens=30, temperature=t, top_p=p, top_k=k, seed=seed)
    for seed, (t, p, k) in enumerate(
        itertools.islice(itertools.cycle(itertools.product((0.7, 1.5), (1.0, 0.8), (0, 20))), len(PROMPTS))
    )
]


@pytest.fixture(scope="module")
def sampled(target: Any) -> list[list[int]]:
    return decode(LLM(target, policy="off"), "1", PROMPTS, SAMPLED)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_report_61_63_one_seed_one_text(target, folders, sampled, draft, batch):
    llm = make(target, folders, draft, max_batch=BATCHES[batch], token_budget=64)
    check(llm, batch, SAMPLED, sampled)


ONE_OF_EACH = {text.partition(":")[0]: text for draft in DRAFTS.values() for text in draft or ()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", itertools.combinations(sorted(ONE_OF_EACH), 2), ids="+".join)
def test_every_pair_of_drafters_merged(target, folders, greedy, sampled, pair, rule):
    llm = LLM(
        target, policy="fixed", draft=[ONE_OF_EACH[kind].format_map(folders) for kind in pair], rule=rule, max_batch=8
    )
    outputs = decode(llm, "8", PROMPTS[:6], [SamplingParams(max_tokens=40)] * 6)
    assert outputs == greedy[:6]
    if RULES[rule].coupled:
        assert decode(llm, "8", PROMPTS[:6], SAMPLED[:6]) == sampled[:6]


FREE = [SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3 * len(PROMPTS))]


@pytest.fixture(scope="module")
def coupled(target: Any) -> list[list[int]]:
    """What rules with coins of their own do not say; in any batch, see the test above."""
    return decode(LLM(target, policy="off", max_batch=8), "8", PROMPTS * 3, FREE)


def distance(llm: LLM, batch: str, coupled: Sequence[list[int]]) -> tuple[float, float]:
    """How far sampled tokens are from the target's law, and how far they may be once in a million runs."""
    prompts = PROMPTS * (1 if batch == "1" else 3)
    outputs = decode(llm, batch, prompts, FREE[: len(prompts)])
    assert outputs != coupled[: len(prompts)]
    generator = torch.Generator().manual_seed(0)
    uniforms = views_of([uniforms_of(llm.model, p, ids, generator) for p, ids in zip(prompts, outputs, strict=True)])
    bound = (math.log(2 * len(uniforms) / 1e-6) / (2 * uniforms.shape[1])) ** 0.5
    return max(map(deviation, uniforms)), bound


@pytest.mark.parametrize("batch", ["1", "8", "arrivals"])
@pytest.mark.parametrize("draft", [name for name in DRAFTS if name != "off"])
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.coupled])
def test_report_49_58_sampled_tokens_follow_the_targets_law(target, folders, coupled, rule, draft, batch):
    llm = make(target, folders, draft, rule=rule, max_batch=BATCHES[batch], token_budget=64)
    found, bound = distance(llm, batch, coupled)
    assert found < bound


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.coupled])
def test_negative_control_a_drafter_that_misstates_its_law_is_noticed(target, folders, coupled, rule, monkeypatch):
    """Report 50: drafted at one temperature, stated at another."""
    llm = make(target, folders, "model", rule=rule)
    drafter = llm.engine._drafters["model"]
    laws = drafter._sampler.laws

    class Liar:
        def pick(self, law):
            return int((law**4).argmax())

    monkeypatch.setattr("bozza.drafters.model.Coins", lambda request, stream: Liar())
    assert drafter._sampler.laws == laws
    found, bound = distance(llm, "8", coupled)
    assert found > bound


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16])
def test_the_number_of_drafted_tokens_changes_nothing(target, folders, sampled, k):
    llm = LLM(target, policy="fixed", draft=[f"ngram:k={k}", f"model:{folders['shallow']},k={k}"])
    assert decode(llm, "8", PROMPTS, SAMPLED) == sampled


def test_the_noise_shared_with_a_model_drafter_raises_agreement(target, folders):
    """Coupling is the point: independent draws of the same two models agree less."""
    llm = make(target, folders, "model")
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
    coupled = sum(out.stats.accepted["model"] for out in llm.generate(PROMPTS[:8], params))
    drafter = llm.engine._drafters["model"]
    draft = drafter.draft

    def independent(requests, budgets):
        for request in requests:
            request.seed += 1000
        drafts = draft(requests, budgets)
        for request in requests:
            request.seed -= 1000
        return drafts

    drafter.draft = independent
    outputs = llm.generate(PROMPTS[:8], params)
    assert sum(out.stats.accepted["model"] for out in outputs) < 0.8 * coupled
    assert [out.token_ids for out in outputs] == decode(make(target, folders, "off"), "1", PROMPTS[:8], params)


def test_report_62_unseeded_requests_differ_and_seeded_ones_do_not(target):
    llm = LLM(target, policy="off")
    free = SamplingParams(max_tokens=20, temperature=1.0)
    outputs = [llm.generate([[5, 6, 7]], free)[0].token_ids for _ in range(8)]
    assert len({tuple(ids) for ids in outputs}) == 8
    fixed = SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    assert len({tuple(out.token_ids) for out in llm.generate([[5, 6, 7]] * 4, fixed)}) == 1


def test_negative_control_a_store_that_keeps_the_wrong_branch_is_noticed(target, folders, greedy, monkeypatch):
    llm = make(target, folders, "both")
    keep = llm.runner.store.keep
    monkeypatch.setattr(llm.runner.store, "keep", lambda slot, base, kept: keep(slot, base, range(len(kept))))
    params = SamplingParams(max_tokens=40)
    try:
        changed = [out.token_ids for out in llm.generate(PROMPTS, params)]
    except RuntimeError:
        return
    assert changed != greedy
