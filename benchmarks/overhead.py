"""Engine time outside of model forwards, per step: planning, drafting, verifying the logits, committing.

usage: python benchmarks/overhead.py [--out FILE]

Runs the default model in bfloat16 at batch 1 and 16, plainly and with the ngram drafter, with ever more sampling
parameters, and prints the median milliseconds per step of each stage and which share of a step sampling takes. A second
table times the draw itself for vocabularies of 49,152 and 151,936. The last line of standard output is the result as
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bozza import LLM, SamplingParams
from bozza.bench import environment
from bozza.core import STAGES, StepStats
from bozza.sampling.sampler import Draw, draw_tokens

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
PARAMS = {
    "greedy": SamplingParams(max_tokens=96, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.8, seed=1),
    "top-p 0.95": SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.8, top_p=0.95, seed=1),
    "everything": SamplingParams(
        max_tokens=96,
        min_tokens=16,
        ignore_eos=True,
        temperature=0.8,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        logit_bias=dict.fromkeys(range(100, 120), -1.0),
        bad_words=("foo", "bar baz", "qux"),
        seed=1,
    ),
}


def steps(llm: LLM, batch: int, params: SamplingParams) -> list[StepStats]:
    """Steps of one run in which all requests were decoding."""
    messages = [json.loads(line)["messages"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [llm.encode_chat(messages[i % len(messages)]) for i in range(batch)]
    seen: list[StepStats] = []
    llm.generate(prompts, params, on_step=seen.append)
    return [step for step in seen if step.rows == batch and step.new_tokens < 256]


def engine_rows(llm: LLM) -> list[dict[str, Any]]:
    """Median milliseconds per step, stage by stage."""
    rows = []
    for batch, draft in itertools.product((1, 16), (None, ["ngram"])):
        served = llm.with_policy("fixed" if draft else "off", draft, max_batch=batch)
        for name, params in PARAMS.items():
            steps(served, batch, params)  # warm
            seen = steps(served, batch, params)
            stages = {stage: 1e3 * statistics.median(step.seconds[stage] for step in seen) for stage in STAGES}
            outside = 1e3 * statistics.median(step.total_seconds - step.seconds["verify"] for step in seen)
            share = statistics.median(step.seconds["sample"] / step.total_seconds for step in seen)
            facts = {"batch": batch, "drafter": draft[0] if draft else "none", "sampling": name, "steps": len(seen)}
            rows.append(facts | {"sample_share": share, "outside_ms": outside, **stages})
    return rows


def draw_rows() -> list[dict[str, Any]]:
    """Median milliseconds to draw from a peaked law, beside torch.multinomial and argmax on the same logits."""
    rows = []
    for vocab in (49_152, 151_936):
        for count in (1, 9, 64):
            logits = torch.randn(count, vocab) * 2
            logits.scatter_(1, torch.randint(0, vocab, (count, 20)), 14.0)
            draws = {name: [Draw(PARAMS[name], 1, i) for i in range(count)] for name in list(PARAMS)[:3]}
            contestants: dict[str, Callable[[], object]] = {
                name: lambda logits=logits, chosen=chosen: draw_tokens(logits, chosen) for name, chosen in draws.items()
            }
            contestants["torch.multinomial"] = lambda logits=logits: torch.multinomial((logits / 0.8).softmax(1), 1)
            rows.append({"vocab": vocab, "rows": count} | interleaved(contestants))
    return rows


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    options = parser.parse_args()
    llm = LLM("smollm2", draft=["ngram"], dtype="bfloat16", device="cpu")
    document = {"environment": environment(llm), "engine": engine_rows(llm), "draw": draw_rows()}
    show("engine, ms per step", document["engine"])
    show("drawing, ms per call", document["draw"])
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
