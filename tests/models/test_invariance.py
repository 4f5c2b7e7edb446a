"""Bits that do not depend on the shape of a pass: tiny models here, the default model in `make bench-invariant`."""

from __future__ import annotations

import pytest
import torch

from bozza import LLM, ModelError, SamplingParams
from bozza.models.invariance import check_invariant, differing_positions
from bozza.models.runner import RaggedRunner
from tiny import shallower, tiny, token_prompts

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "num_attention_heads": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_read_a_text_gives_the_same_bits(dtype):
    runner = RaggedRunner(tiny("llama", dtype=dtype, **WIDE), invariant=True)
    ids = [(7 * i * i) % 997 + 1 for i in range(160)]
    with torch.inference_mode():
        differing = differing_positions(runner, ids, sizes=(1, 3, 9, 40), requests=3)
    assert len(differing) == 8
    assert not any(differing.values()), differing


def test_negative_control_without_it_float32_depends_on_the_shape():
    runner = RaggedRunner(tiny("llama", **WIDE))
    ids = [(7 * i * i) % 997 + 1 for i in range(160)]
    with torch.inference_mode():
        assert any(differing_positions(runner, ids, sizes=(1, 3, 9, 40), requests=3).values())
        with pytest.raises(ModelError, match="depend on the shape of a pass"):
            check_invariant(runner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_equal_to_the_last_bit_in_any_batch_with_any_draft(tmp_path, dtype):
    model = tiny("llama", dtype=getattr(torch, dtype), **WIDE)
    shallower(model, 2).save_pretrained(tmp_path / "shallow")
    llm = LLM(model, policy="fixed", draft=["ngram:k=3", f"model:{tmp_path / 'shallow'},k=3"], invariant=True)
    params = [SamplingParams(max_tokens=40, logprobs=3, temperature=t, seed=1) for t in (0.0, 0.8) for _ in range(5)]
    prompts = token_prompts(10)
    plain = [llm.with_policy("off", max_batch=1).generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    accepted = 0
    for other in (llm, llm.with_policy("off"), llm.with_policy("fixed", ["ngram"], max_batch=3)):
        outputs = other.generate(prompts, params)
        assert [out.logprobs for out in outputs] == [out.logprobs for out in plain]
        accepted += sum(sum(out.stats.accepted.values()) for out in outputs)
    assert accepted > 20


def test_scope_is_stated():
    with pytest.raises(ModelError, match="known for bfloat16 and float32 on a CPU"):
        LLM(tiny("llama", dtype=torch.float16), invariant=True)
