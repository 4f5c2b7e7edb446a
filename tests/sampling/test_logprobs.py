"""Log-probabilities are the model's own, one entry for each token that is given out, whatever was drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bozza import LLM, SamplingParams
from bozza.sampling.logprobs import token_logprobs
from tiny import VOCAB, token_prompts

PROMPTS = token_prompts(6)


def noise(rows, vocab=50):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.parametrize("top", [0, 1, 5, 50, 1000])
def test_entries_are_the_log_softmax_the_rank_and_the_likeliest(top):
    logits, tokens = noise(7), [0, 3, 49, 7, 7, 20, 11]
    entries = token_logprobs(logits, tokens, top)
    assert [entry.token for entry in entries] == tokens
    for row, entry in enumerate(entries):
        law = logits[row].double().log_softmax(dim=0)
        assert entry.logprob == pytest.approx(float(law[entry.token]), abs=1e-5)
        order = law.argsort(descending=True).tolist()
        assert entry.rank == order.index(entry.token) + 1
        assert [token for token, _ in entry.top] == order[:top]
        assert [value for _, value in entry.top] == pytest.approx(law[order[:top]].tolist(), abs=1e-5)
        assert len(entry.top) == min(top, 50)


def test_equally_likely_tokens_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert [token_logprobs(logits, [token], 0)[0].rank for token in range(4)] == [3, 1, 1, 4]


def test_a_removed_token_has_no_chance():
    entry = token_logprobs(torch.tensor([[0.0, -torch.inf]]), [1], 1)[0]
    assert (entry.logprob, entry.rank, entry.top) == (-torch.inf, 2, ((0, 0.0),))


def test_no_tokens_have_no_entries():
    assert token_logprobs(noise(0), [], 3) == []


DRAFTS = {
    "off": None,
    "ngram": ["ngram"],
    "model": ["model:{shallow}"],
    "both": ["ngram:k=3", "model:{target},k=5"],
}


@pytest.fixture(scope="module")
def drafting(folders):
    """Room for 8 tokens in a pass: longer prompts are read in chunks beside the others' drafts."""
    draft = [f"model:{folders[name]}" for name in ("target", "shallow")]
    return LLM(folders["target"], policy="fixed", draft=draft, max_batch=4, token_budget=8)


def make(drafting, folders, draft, **options):
    specs = DRAFTS[draft]
    if specs is None:
        return drafting.with_policy("off", **options)
    return drafting.with_policy("fixed", [text.format_map(folders) for text in specs], **options)


@torch.inference_mode()
def reference(model: Any, ids, top):
    """By transformers alone: (log-probability, the likeliest) of each token but the first."""
    laws = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(dim=1)
    best = laws.topk(top, dim=1)
    return [
        (float(law[token]), list(zip(names.tolist(), values.tolist(), strict=True)))
        for law, token, names, values in zip(laws, ids[1:], best.indices, best.values, strict=True)
    ]


def check(entries, tokens, expected, top):
    assert [entry.token for entry in entries] == list(tokens)
    for entry, (logprob, best) in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(logprob, abs=1e-4)
        assert len(entry.top) == top
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in best], abs=1e-4)
        for (token, value), (name, _) in zip(entry.top, best, strict=True):
            # Two that are equally likely but for rounding may change places.
            assert token == name or value == pytest.approx(dict(best)[token], abs=1e-4)


SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "seed": 4, "top_p": 0.9},
    "adjusted": {
        "temperature": 0.8,
        "seed": 4,
        "top_k": 30,
        "repetition_penalty": 1.3,
        "logit_bias": dict.fromkeys(range(3, VOCAB, 4), 5.0),
        "bad_words": [[9]],
    },
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", DRAFTS)
def test_report_92_93_94_95_logprobs_equal_a_plain_pass_of_transformers(drafting, target, folders, draft, sampling):
    """Of prompts that are read in chunks too, and under parameters that change the law that tokens are drawn from."""
    params = SamplingParams(max_tokens=20, logprobs=3, prompt_logprobs=2, **SAMPLING[sampling])
    outputs = make(drafting, folders, draft).generate(PROMPTS, params)
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        expected = reference(target, [*prompt, *out.token_ids], 3)
        check(out.logprobs, out.token_ids, expected[len(prompt) - 1 :], 3)
        assert out.prompt_logprobs[0] is None  # nothing comes before it
        halved = [(logprob, best[:2]) for logprob, best in expected[: len(prompt) - 1]]
        check(out.prompt_logprobs[1:], prompt[1:], halved, 2)
    if draft in ("model", "both"):  # report 93: they were not had by giving up drafts
        assert sum(out.stats.accepted.total() for out in outputs) > 0
    assert any(out.stats.prompt_passes > 3 for out in outputs)


@pytest.mark.parametrize("draft", ["ngram", "both"])
def test_report_92_logprobs_equal_plain_decoding(drafting, folders, draft):
    params = [SamplingParams(max_tokens=25, logprobs=4, temperature=1.0, seed=s) for s in range(len(PROMPTS))]
    for out, plain in zip(
        make(drafting, folders, draft).generate(PROMPTS, params),
        make(drafting, folders, "off").generate(PROMPTS, params),
        strict=True,
    ):
        check(out.logprobs, plain.token_ids, [(entry.logprob, entry.top) for entry in plain.logprobs], 4)
        assert [entry.rank for entry in out.logprobs] == [entry.rank for entry in plain.logprobs]
        assert len({round(entry.logprob, 6) for entry in out.logprobs}) > 1  # not 0.0 for every token


@pytest.mark.parametrize("budget", [8, 13, 64, 512])
def test_report_95_prompt_logprobs_do_not_depend_on_how_a_prompt_is_read(folders, target, budget):
    llm = LLM(folders["target"], policy="fixed", draft=["ngram:k=3"], max_batch=4, token_budget=budget)
    prompts = [[(7 * i * i + i) % 200 + 3 for i in range(length)] for length in (2, budget, budget + 1, 150, 251)]
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    for prompt, out in zip(prompts, llm.generate([p[:250] for p in prompts], params), strict=True):
        check(out.prompt_logprobs[1:], prompt[1:250], reference(target, prompt[:250], 1), 1)


def test_report_97_asking_changes_no_output_and_not_asking_gives_none(drafting, folders):
    llm = make(drafting, folders, "both")
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    asked = llm.generate(PROMPTS, replace(params, logprobs=2, prompt_logprobs=0))
    free = llm.generate(PROMPTS, params)
    assert [out.token_ids for out in asked] == [out.token_ids for out in free]
    assert all(out.logprobs is None and out.prompt_logprobs is None for out in free)
    assert all(entry.top == () for out in asked for entry in out.prompt_logprobs[1:])
    # Each is asked for alone, too, and by some requests of a batch only.
    mixed = llm.generate(PROMPTS[:3], [replace(params, logprobs=0), params, replace(params, prompt_logprobs=0)])
    assert [(out.logprobs is None, out.prompt_logprobs is None) for out in mixed] == [
        (False, True),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize("end", range(12))
def test_report_94_a_block_that_crosses_the_end_gives_no_entry_too_many(drafting, folders, end):
    llm = drafting.with_policy("fixed", [f"model:{folders['target']},k=5"])
    params = SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True)
    ids = llm.generate([PROMPTS[2]], params)[0].token_ids
    for chosen in (replace(params, stop_token_ids=(ids[end],)), replace(params, max_tokens=end + 1)):
        out = llm.generate([PROMPTS[2]], chosen)[0]
        assert [entry.token for entry in out.logprobs] == out.token_ids
        assert len(out.token_ids) <= end + 1


def test_streams_bring_the_entries_of_their_tokens(drafting, folders):
    llm = make(drafting, folders, "both")
    params = SamplingParams(max_tokens=20, logprobs=2)
    expected = llm.generate([PROMPTS[2]], params)[0].logprobs
    chunks = list(llm.stream(PROMPTS[2], params))
    assert all([entry.token for entry in chunk.logprobs] == chunk.token_ids for chunk in chunks)
    streamed = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in expected]
    assert all(chunk.logprobs is None for chunk in llm.stream(PROMPTS[2], replace(params, logprobs=None)))
