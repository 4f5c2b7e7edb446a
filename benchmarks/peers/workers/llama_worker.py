"""llama.cpp through llama-cpp-python: plain and prompt lookup, one prompt at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Decode, Offer, serve

LOOKUP = 5


def load(options: dict[str, Any]) -> Offer:
    """Variants "plain" and "lookup". Each has a context of its own: prompt lookup keeps the logits of all tokens."""

    def variant(**special: Any) -> Decode:
        llama = Llama(
            options["gguf"],
            n_ctx=options["context"],
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            verbose=False,
            **special,
        )

        def one(prompt: Sequence[int], tokens: int) -> list[int]:
            llama.reset()  # nothing is kept of earlier prompts
            found = llama.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
            return list(itertools.islice(found, tokens))

        return lambda prompts, tokens: [one(prompt, tokens) for prompt in prompts]

    makers = {
        "plain": variant,
        # Told so, too, or it has room for the logits of 512 tokens only, and longer prompts fail.
        "lookup": lambda: variant(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP), logits_all=True),
    }
    offer = Offer(settings={"num_pred_tokens": LOOKUP, "context": options["context"]})
    for name in options["variants"]:
        offer.add(name, makers[name])
    return offer


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
