"""The eagle drafter: what it drafts is what the head says, however the work was divided."""

from __future__ import annotations

import torch

from bozza import LLM, SamplingParams
from bozza.core import Draft
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.runner import Row
from bozza.train.unrolled import unroll
from tiny import tiny, tiny_head, token_prompts


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_runner_computes_what_training_unrolls() -> None:
    """Slots read in chunks, then a chain of the head's own outputs, against the unrolled form of training."""
    head = tiny_head(tiny("llama").float())
    runner = HeadRunner(head)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 200, (14,), generator=generator)
    features = torch.randn(12, head.fc.in_features, generator=generator)
    steps = unroll(head, tokens[None, 1:], torch.nn.functional.pad(features, (0, 0, 0, 1))[None], 3)

    slot = runner.alloc()
    fused = runner.fuse(features)
    first, _ = runner.forward([HeadRow(Row(slot, tokens[1:8].tolist(), wanted=0), fused[:7])])
    second, _ = runner.forward([HeadRow(Row(slot, tokens[8:11].tolist()), fused[7:10])])
    close(torch.cat([first, second]), steps[0][0, :10])
    chain = Draft.chain(tokens[11:12].tolist(), "")
    third, logits = runner.forward([HeadRow(Row(slot, (), chain, fed=0), second[-1:])])
    close(third, steps[1][0, 10:11])
    close(logits, head.logits(third).float())
    chain = Draft.chain(tokens[11:13].tolist(), "")
    fourth, _ = runner.forward([HeadRow(Row(slot, (), chain, fed=1), third)])
    close(fourth, steps[2][0, 11:12])


def test_output_is_the_targets_own(tmp_path: object) -> None:
    model = tiny("llama")
    from bozza.models.heads import save_head

    save_head(tiny_head(model), tmp_path, "tiny", own_rows=True)  # type: ignore[arg-type]
    llm = LLM(model, draft=[f"eagle:{tmp_path},k=12,width=3"])
    prompts, params = token_prompts(6), SamplingParams(max_tokens=20)
    plain = llm.with_policy("off").generate(prompts, params)
    drafted = llm.generate(prompts, params)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert all(out.stats.drafted["eagle"] for out in drafted)
