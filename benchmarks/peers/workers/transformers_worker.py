"""transformers: plain, prompt lookup, and a smaller assistant model. Runs in the project's environment.

Plain decodes several prompts at once, padded on the left; the other two decode one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from protocol import Decode, Offer, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

LOOKUP = 5


def read(folder: str) -> Any:
    """A model that decodes greedily and knows no end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with zeros on the left, and the mask of what is a prompt."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def load(options: dict[str, Any]) -> Offer:
    """Variants "plain", "lookup" and "assistant", all of one target."""
    logging.set_verbosity_error()
    torch.set_num_threads(options["threads"])
    model = read(options["model"])

    def variant(**special: Any) -> Decode:
        def decode(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
            ids, mask = padded(prompts)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **special)
            return out[:, ids.shape[1] :].tolist()

        return decode

    makers = {
        "plain": variant,
        "lookup": lambda: variant(prompt_lookup_num_tokens=LOOKUP),
        "assistant": lambda: variant(assistant_model=read(options["assistant"])),
    }
    offer = Offer(settings={"dtype": "bfloat16", "prompt_lookup_num_tokens": LOOKUP})
    for name in options["variants"]:
        offer.add(name, makers[name])
    return offer


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
