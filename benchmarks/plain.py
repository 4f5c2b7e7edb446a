"""Plain decoding against transformers' own `generate`, taking turns on the same prompts and numbers of tokens.

usage: python benchmarks/plain.py [--model NAME] [--prompts FILE] [--tokens N] [--rounds N] [--dtype D ...] [--out FILE]

Both sides run the very same loaded model, greedy, batch 1, prompt included. With --peer prompt_lookup, transformers'
own prompt lookup (5 tokens) and Bozza's ngram drafter are measured too. The last line of standard output is the result
as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from bozza import LLM, SamplingParams
from bozza.bench import Case, environment, load_cases

HERE = Path(__file__).parent


def transformers_run(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """What transformers generates, with the end tokens out of the way."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def contestants(llm: LLM, tokens: int, peer: bool) -> dict[str, Callable[[Sequence[int]], list[int]]]:
    """Name -> decode one prompt."""
    model, params = llm._loaded.model, SamplingParams(max_tokens=tokens, ignore_eos=True)
    plain = llm.with_policy("off")
    runs: dict[str, Callable[[Sequence[int]], list[int]]] = {
        "transformers": lambda prompt: transformers_run(model, prompt, tokens),
        "bozza off": lambda prompt: plain.generate([prompt], params)[0].token_ids,
    }
    if peer:
        runs["transformers prompt lookup 5"] = lambda prompt: transformers_run(
            model, prompt, tokens, prompt_lookup_num_tokens=5
        )
        runs["bozza ngram"] = lambda prompt: llm.generate([prompt], params)[0].token_ids
    return runs


def measure(llm: LLM, cases: Sequence[Case], tokens: int, rounds: int, peer: bool) -> list[dict[str, Any]]:
    """Seconds of every contestant on every prompt; ratios are medians of paired runs against transformers."""
    runs = contestants(llm, tokens, peer)
    for run in runs.values():
        run(cases[0].prompt)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first_parts: dict[str, list[int | None]] = {name: [] for name in runs}
    for turn in range(rounds):
        for case in cases:
            outputs = {}
            names = list(runs) if turn % 2 == 0 else list(reversed(runs))
            for name in names:
                started = time.perf_counter()
                outputs[name] = runs[name](case.prompt)
                seconds[name].append(time.perf_counter() - started)
                assert len(outputs[name]) == tokens
            for name in runs:
                pairs = zip(outputs[name], outputs["transformers"], strict=True)
                first_parts[name].append(next((i for i, (a, b) in enumerate(pairs) if a != b), None))
    return [
        {
            "contestant": name,
            "tokens_per_s": tokens * len(spent) / sum(spent),
            "ratio_to_transformers": statistics.median(
                base / mine for base, mine in zip(seconds["transformers"], spent, strict=True)
            ),
            "equal_to_transformers": sum(part is None for part in first_parts[name]),
            "runs": len(spent),
        }
        for name, spent in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, default=HERE.parent / "examples" / "prompts.jsonl")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--peer", choices=["prompt_lookup"])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plain.json")
    options = parser.parse_args()
    logging.set_verbosity_error()
    rows, facts = [], {}
    for dtype in options.dtype:
        llm = LLM(options.model, draft=["ngram"], dtype=dtype, device="cpu")
        cases = load_cases(options.prompts, llm, options.limit)
        measured = measure(llm, cases, options.tokens, options.rounds, options.peer is not None)
        rows += [{"dtype": dtype, **row} for row in measured]
        facts = environment(llm)
    table = Table()
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    document = {"environment": facts | {"tokens": options.tokens, "prompts": options.prompts.name}, "rows": rows}
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
