"""OpenVINO GenAI with continuous batching: plain and prompt lookup, of one exported model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor
from protocol import Decode, Offer, serve

LOOKUP = 5
NGRAM = 3  # the longest end of the text that is looked up


def scheduler() -> genai.SchedulerConfig:
    """Nothing is kept of earlier prompts."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.max_num_seqs = 64
    return config


def load(options: dict[str, Any]) -> Offer:
    """Variants "plain" and "lookup", a pipeline each."""
    properties = {"INFERENCE_NUM_THREADS": options["threads"]}

    def variant(lookup: bool) -> Decode:
        special = {"prompt_lookup": True} if lookup else {}
        pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler(), "CPU", properties | special)

        def decode(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            if lookup:
                config.num_assistant_tokens, config.max_ngram_size = LOOKUP, NGRAM
            ids = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
            results = pipeline.generate(ids, [config] * len(ids))
            return [list(result.m_generation_ids[0])[:tokens] for result in results]

        return decode

    offer = Offer(settings={"num_assistant_tokens": LOOKUP, "max_ngram_size": NGRAM, "prefix_caching": False})
    for name in options["variants"]:
        offer.add(name, lambda name=name: variant(name == "lookup"))
    return offer


if __name__ == "__main__":
    serve(load, ["openvino", "openvino-genai"])
