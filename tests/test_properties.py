"""Any sampling parameters, any prompt: everything that a user can see is as with speculation off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bozza import LLM, SamplingParams, Structured
from bozza.llm import Output
from tiny import VOCAB

TOKENS = st.integers(3, VOCAB - 1)
TEXTS = st.text(alphabet="abcdeé🙂 \n", min_size=1, max_size=3)
SHAPES = st.sampled_from(
    [
        None,
        None,
        Structured(regex="[a-e]{2,9}(é|🙂)?"),
        Structured(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        Structured(regex="a+b", after="!"),
    ]
)


@st.composite
def parameters(draw: Any) -> SamplingParams:
    """Any of them, together."""
    temperature = draw(st.sampled_from([0.0, 0.6, 1.0, 1.8]))
    most = draw(st.integers(1, 24))
    structured = draw(SHAPES)
    allowed = draw(st.none() | st.lists(TOKENS, min_size=2, max_size=60)) if structured is None else None
    return SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 1, 7, 40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.9, -0.3])),
        logit_bias=draw(st.dictionaries(TOKENS, st.floats(-9.0, 9.0), max_size=4)),
        bad_words=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple) | TEXTS, max_size=3))),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        prediction=tuple(draw(st.lists(TOKENS, max_size=12))),
        structured=structured,
        stop=tuple(draw(st.lists(TEXTS, max_size=2))),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=2))),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2**63)),
        n=draw(st.integers(1, 2)) if temperature > 0.0 else 1,
        logprobs=draw(st.none() | st.integers(0, 3)),
        prompt_logprobs=draw(st.none() | st.integers(0, 2)),
    )


def visible(output: Output) -> list[Any]:
    """All that does not depend on how fast it was; log-probabilities to rounding."""

    def rounded(entries: Any) -> Any:
        if entries is None:
            return None
        return [entry and (entry.token, pytest.approx(entry.logprob, abs=1e-4), entry.rank) for entry in entries]

    return [
        (
            out.prompt_token_ids,
            out.token_ids,
            out.text,
            out.finish_reason,
            rounded(out.logprobs),
            rounded(out.prompt_logprobs),
            out.error,
            out.stats.committed,
        )
        for out in output.samples
    ]


@pytest.fixture(scope="module")
def llm(folders: Any) -> LLM:
    draft = [
        "grammar",
        "prediction",
        "ngram:k=4",
        "suffix:k=6",
        f"model:{folders['shallow']},k=3",
        f"model:{folders['target']},k=2",
    ]
    return LLM(folders["target"], policy="fixed", draft=draft, token_budget=40, max_batch=6, dtype="float32")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(parameters(), min_size=1, max_size=3),
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=50) | st.text("abc ", min_size=1, max_size=30), min_size=3),
)
def test_report_72_everything_visible_is_as_with_speculation_off(llm: LLM, params: Any, prompts: Any) -> None:
    plain_llm = llm.with_policy("off", max_batch=1)
    chosen = prompts[: len(params)]
    outputs = llm.generate(chosen, params)
    for prompt, asked, output in zip(chosen, params, outputs, strict=True):
        assert visible(output) == visible(plain_llm.generate([prompt], asked)[0])
        assert all(len(out.token_ids) == out.stats.committed <= asked.max_tokens for out in output.samples)
        if asked.n == 1:
            stream = llm.stream(prompt, asked)
            chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == output.text
            assert stream.token_ids == output.token_ids
    assert llm.engine.idle


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=parameters(), prompt=st.lists(TOKENS, min_size=1, max_size=20))
def test_under_rules_with_coins_what_may_not_differ_does_not(llm: LLM, params: SamplingParams, prompt: Any) -> None:
    """Greedy output is the same under all; sampled output keeps its bounds and repeats under its seed."""
    greedy = replace(params, temperature=0.0, n=1)
    expected = visible(llm.with_policy("off").generate([prompt], greedy)[0])
    for rule in ("rejection", "block"):
        coined = llm.with_policy("fixed", llm.draft, rule=rule)
        assert visible(coined.generate([prompt], greedy)[0]) == expected
        first, second = (coined.generate([prompt], params)[0] for _ in range(2))
        assert visible(first) == visible(second)
        for out in first.samples:
            assert len(out.token_ids) <= params.max_tokens
            assert params.allowed_token_ids is None or set(out.token_ids) <= {*params.allowed_token_ids}
