"""Bozza: plain and adaptive, from one loaded model. Runs in the project's environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from protocol import Decode, Offer, serve

from bozza import LLM, SamplingParams
from bozza.threads import use_threads


def load(options: dict[str, Any]) -> Offer:
    """Variants "off" and "adaptive", in bfloat16 or quantised."""
    use_threads(options["threads"])
    draft, quantize = options["draft"], options["quantize"]
    special = {"quantize": quantize, "compile": options["compile"]}
    llm = LLM(options["model"], draft=draft, policy="adaptive", dtype="bfloat16", **special)
    made: dict[str, LLM] = {}

    def forget() -> None:
        made["off"] = llm.with_policy("off")
        made["adaptive"] = llm.with_policy("adaptive", draft)
        for each in made.values():  # whatever is made at first use
            each.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))

    def variant(name: str) -> Decode:
        def decode(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            return [list(output.token_ids) for output in made[name].generate(list(prompts), params)]

        return decode

    forget()
    settings = {"dtype": "bfloat16", **special, "draft": [re.sub(r":/\S*/", ":", spec) for spec in draft]}
    return Offer({name: variant(name) for name in options["variants"]}, settings, forget=forget)


if __name__ == "__main__":
    serve(load, ["bozza", "torch", "transformers"])
