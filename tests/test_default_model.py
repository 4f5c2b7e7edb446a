"""The default model, as a package delivers it: real text, real logits, a vocabulary of 49,152."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bozza import LLM, SamplingParams
from test_identity import reference, with_arrivals
from tiny import shallower

TEXTS = [
    "The", "Once upon a time", "def fibonacci(n):\n", "1 2 3 4 5 6 7 8 9 10 11 12", "ha " * 30,
    "The capital of France is", "import os\nimport sys\n\n\ndef main():\n    ", "Q: What is 17 + 25?\nA:",
    "List of fruits:\n- apple\n- banana\n- cherry\n", '{"name": "Ann", "age": 31}\n{"name": "Bob", "age": ',
    "Water boils at 100 degrees Celsius. Ice melts at", "<html>\n<body>\n<h1>", "SELECT name FROM users WHERE",
    "To be, or not to be, that is the question:", "Die Katze sitzt auf der Matte. Die Katze",
    "A B C A B C A B C A B", "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(",
    "Dear Sir or Madam,\n\nI am writing to", "The cat sat on the mat. The dog sat on the", "x = 1\ny = 2\nz = 3\n",
    "Monday, Tuesday, Wednesday,", "Roses are red,",
]  # fmt: skip
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def fp32(smollm2: Path) -> LLM:
    return LLM("smollm2", dtype="float32", device="cpu", policy="off")


@pytest.fixture(scope="module")
def prompts(fp32: LLM) -> list[list[int]]:
    return [fp32.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(fp32: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [reference(fp32._loaded.model, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def drafting(fp32: LLM, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same target with a draft model: its own first layers."""
    folder = tmp_path_factory.mktemp("draft") / "shallow"
    shallower(fp32._loaded.model, 12).save_pretrained(folder)
    return LLM(fp32._loaded.model, tokenizer=fp32.tokenizer, policy="fixed", draft=["ngram", f"model:{folder}"])


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("draft", ["off", "ngram", "model", "both"])
def test_greedy_fp32_equals_generate(fp32, drafting, prompts, expected, draft, batch):
    specs = {"off": None, "ngram": drafting.draft[:1], "model": drafting.draft[1:], "both": drafting.draft}[draft]
    llm = drafting.with_policy("off" if specs is None else "fixed", specs, max_batch=batch)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    if batch == 1 and draft in ("model", "both"):  # a draft model of this size costs most where it drafts for one
        prompts, expected = prompts[::3], expected[::3]
    if batch == 32:
        outputs = [request.output for request in with_arrivals(llm, prompts, [params] * len(prompts))]
    else:
        outputs = [out.token_ids for out in llm.generate(prompts, params)]
    assert outputs == expected


@pytest.fixture(scope="module")
def bf16(smollm2: Path) -> LLM:
    return LLM("smollm2", dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_p": 0.9, "seed": 6}])
def test_every_bf16_difference_is_a_near_tie(bf16, params):
    chosen = SamplingParams(max_tokens=48, **params)
    plain = bf16.with_policy("off").generate(TEXTS, chosen)
    for a, b in zip(plain, bf16.generate(TEXTS, chosen), strict=True):
        difference = bf16.first_difference(a, b, chosen)
        assert difference is None or difference.verdict == "tie"


def test_every_bf16_difference_from_generate_is_a_near_tie(bf16):
    """Here shapes do differ: transformers decodes single tokens, whose passes round otherwise."""
    params, texts = SamplingParams(max_tokens=48), TEXTS[::3]
    differences = []
    for text, out in zip(texts, bf16.generate(texts, params), strict=True):
        plain = replace(out, token_ids=reference(bf16._loaded.model, bf16.encode(text), 48))
        differences.append(bf16.first_difference(plain, out, params))
    assert all(difference is None or difference.verdict == "tie" for difference in differences)


def test_negative_control_a_wrong_token_is_no_near_tie(bf16):
    params = SamplingParams(max_tokens=24)
    plain, other = (bf16.with_policy("off").generate(["1 2 3 4 5 6 7 8 9 10 11 12"], params)[0] for _ in range(2))
    other.token_ids[10] = (other.token_ids[10] + 1) % 1000
    difference = bf16.first_difference(plain, other, params)
    assert difference.position == 10
    assert difference.verdict == "bug"
    assert difference.margin > difference.bound > 0
    del other.token_ids[5:]
    assert bf16.first_difference(plain, other, params).verdict == "bug"


def test_the_chat_template_and_both_end_tokens(bf16):
    answer = bf16.chat([{"role": "user", "content": "Say hello."}], SamplingParams(max_tokens=60))
    assert answer.finish_reason == "stop"
    assert answer.text
    assert "<|im_end|>" not in answer.text
    assert bf16.tokenizer.decode(answer.token_ids[-1]) == "<|im_end|>"
    ends = {bf16.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert bf16.engine._end_ids == ends


def test_transformers_can_load_the_folder_again(bf16):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(bf16.model_path)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(bf16.model_path).get_vocab() == bf16.tokenizer.get_vocab()


def test_drafting_on_real_text_saves_passes(bf16):
    out = bf16.generate(["ha " * 30], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert out.stats.committed_per_pass > 2.0
