"""Do whole outputs keep their bits in every batch and with every drafter? 10,240 tokens, in bfloat16 and in float32.

usage: python benchmarks/invariant.py [--dtype D ...] [--out FILE]

With `invariant=True` the default model continues 10 texts greedily and under 3 seeds, 256 tokens each: plainly one by
one, then in larger batches and with drafters. Token ids and log-probabilities, as floats, must be equal. Finished ways
are kept in the result file, and a second call goes on where the first one stopped; remove the file to measure anew. The
last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from bozza import LLM, SamplingParams
from bozza.bench import environment
from bozza.verify import PROMPTS

MESSAGES = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
TOKENS = 256
WAYS: dict[str, tuple[list[str] | None, int]] = {
    "plain, one by one": (None, 1),
    "plain, batch 16": (None, 16),
    "ngram k=16, batch 7": (["ngram:k=16"], 7),
    "ngram and the model itself, batch 5": (["ngram:k=3", "model:smollm2,k=4"], 5),
    "ngram, one by one": (["ngram"], 1),
}


def work(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of the 40 outputs."""
    lines = MESSAGES.read_text(encoding="utf-8").splitlines()
    texts = [llm.encode_chat(json.loads(line)["messages"]) for line in lines][:4] + [llm.encode(p) for p in PROMPTS]
    prompts = [text for text in texts[:10] for _ in range(4)]
    laws: list[dict[str, Any]] = [{}, *({"temperature": 0.8, "seed": seed} for seed in (1, 2, 3))]
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, **law) for _ in texts[:10] for law in laws]
    return prompts, params


def run(llm: LLM, draft: list[str] | None, batch: int) -> dict[str, Any]:
    """Digests of each output's token ids and log-probabilities."""
    chosen = llm.with_policy("fixed" if draft else "off", draft, max_batch=batch)
    prompts, params = work(llm)
    outputs = chosen.generate(prompts, params)
    return {
        "tokens": sum(len(out.token_ids) for out in outputs),
        "accepted": sum(sum(out.stats.accepted.values()) for out in outputs),
        "ids": [digest(out.token_ids) for out in outputs],
        "bits": [digest([entry.logprob.hex() for entry in out.logprobs or ()]) for out in outputs],
    }


def digest(values: list[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "invariant.json")
    options = parser.parse_args()
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    for dtype in options.dtype:
        found = document.setdefault(dtype, {"ways": {}})
        if len(found["ways"]) == len(WAYS):
            continue
        llm = LLM(
            "smollm2", draft=["ngram", "model:smollm2"], dtype=dtype, device="cpu", invariant=True, token_budget=256
        )
        found["environment"] = environment(llm)
        base = next(iter(WAYS))
        for name, (draft, batch) in WAYS.items():
            if name not in found["ways"]:
                found["ways"][name] = run(llm, draft, batch)
                options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            way, plain = found["ways"][name], found["ways"][base]
            for kind in ("ids", "bits"):
                way[f"differing_{kind}"] = sum(a != b for a, b in zip(way[kind], plain[kind], strict=True))
            Console().print(dtype, name, {k: v for k, v in way.items() if k not in ("ids", "bits")})
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
