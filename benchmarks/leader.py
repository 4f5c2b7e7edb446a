"""The adaptive leader against every fixed choice and against plain decoding, in turns, on the same prompts.

usage: python benchmarks/leader.py --prompts FILE [--parts stream hard load] [--model NAME] [--tokens N] [--limit N]
       [--out FILE]

stream: all workloads of the prompt file mixed, batch 1, greedy. `adaptive` has all drafters; each fixed choice is one
        set of drafters with its number of tokens. What `adaptive` learns from one prompt serves the next.
hard:   what nobody can guess: the prompts of workload "prose" at temperature 1 with drafter ngram alone, and prompts of
        random tokens with all drafters.
load:   groups of 1, 4, 16 and 32 requests at once.

A fixed number of tokens is decoded for each prompt; times are wall times of whole requests, prompts included. Each
run is kept beside the result as soon as it is done: started again, the script goes on where it stopped. What is stored
last is shown in README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from bozza import LLM, SamplingParams
from bozza.bench import Case, environment, load_cases, mixed

HERE = Path(__file__).parent
ALL = "grammar prediction suffix recycling:k=12 eagle:k=12"
FIXED = [
    "ngram", "suffix", "recycling:k=8", "eagle:k=6", "suffix recycling:k=8", "ngram eagle:k=6", "suffix eagle:k=6",
    "suffix recycling:k=8 eagle:k=6",
]  # fmt: skip
UNDER_LOAD = ["ngram", "suffix", "eagle:k=6", "suffix eagle:k=6"]
LEVELS = (1, 4, 16, 32)
REPEAT = 3  # times that each prompt of part hard is run


class Job(NamedTuple):
    """Prompts that are decoded together, by everybody in turn."""

    key: str
    group: str  # what it is counted under
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    contestants: Sequence[str]  # "off", "adaptive", "adaptive DRAFT ...", or a fixed choice


def stream_jobs(cases: Sequence[Case], tokens: int) -> Iterator[Job]:
    """One prompt of each workload after the other."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for number, case in enumerate(mixed(cases)):
        yield Job(f"stream {number}", case.workload, [case.prompt], params, ["off", "adaptive", *FIXED])


def hard_jobs(cases: Sequence[Case], tokens: int, vocab: int) -> Iterator[Job]:
    """Text at temperature 1, and random tokens."""
    prose = [case.prompt for case in cases if case.workload == "prose"]
    coins = random.Random(0)
    noise = [[coins.randrange(vocab) for _ in range(64)] for _ in range(len(prose) or 5)]
    for turn in range(REPEAT):
        for number, prompt in enumerate(prose):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=turn)
            yield Job(
                f"hot {turn} {number}", "prose at temperature 1, ngram", [prompt], params, ["off", "adaptive ngram"]
            )
        for number, prompt in enumerate(noise):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=turn)
            yield Job(f"noise {turn} {number}", "random tokens", [prompt], params, ["off", "adaptive"])


def load_jobs(cases: Sequence[Case], tokens: int) -> Iterator[Job]:
    """Several requests at once, of mixed workloads."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = [case.prompt for case in mixed(cases)]
    for level in LEVELS:
        for turn in range(max(2, min(4, len(prompts) // level))):
            chosen = [prompts[(turn * level + place) % len(prompts)] for place in range(level)]
            yield Job(f"load {level} {turn}", f"{level} at once", chosen, params, ["off", "adaptive", *UNDER_LOAD])


def run(llm: LLM, jobs: Iterable[Job], kept: Path, console: Console) -> list[dict[str, Any]]:
    """Run what has not been run; returns the records of all jobs.

    What happens between two prompts is the same for all: one engine for each contestant, as in a running process.
    """
    records = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(record["job"], record["contestant"]): record for record in records}
    engines: dict[str, LLM] = {}
    wanted: list[dict[str, Any]] = []
    with kept.open("a") as out:
        for turn, job in enumerate(jobs):
            order = [*job.contestants[turn % len(job.contestants) :], *job.contestants[: turn % len(job.contestants)]]
            for contestant in order:
                if (record := done.get((job.key, contestant))) is None:
                    engine = engines.get(contestant) or engines.setdefault(contestant, _engine(llm, contestant))
                    record = _measure(engine, job, contestant)
                    out.write(json.dumps(record) + "\n")
                    out.flush()
                wanted.append(record)
            mine = {record["contestant"]: record for record in wanted[-len(order) :]}
            off = mine["off"]["seconds"]
            told = " ".join(
                f"{name.replace(' ', '+')} {off / mine[name]['seconds']:.2f}" for name in job.contestants[1:]
            )
            console.print(f"{job.key} {job.group}: {told}", highlight=False)
    return wanted


def _engine(llm: LLM, contestant: str) -> LLM:
    policy, _, draft = contestant.partition(" ")
    if policy == "off":
        made = llm.with_policy("off")
    elif policy == "adaptive":
        made = llm.with_policy("adaptive", (draft or ALL).split())
    else:
        made = llm.with_policy("fixed", contestant.split())
    made.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))  # whatever is made at first use
    return made


def _measure(llm: LLM, job: Job, contestant: str) -> dict[str, Any]:
    started = time.perf_counter()
    outputs = llm.generate(job.prompts, job.params)
    seconds = time.perf_counter() - started
    return {
        "job": job.key,
        "group": job.group,
        "contestant": contestant,
        "seconds": seconds,
        "tokens": sum(len(output.token_ids) for output in outputs),
        "passes": sum(output.stats.passes for output in outputs),
        "expected": sum(output.stats.expected for output in outputs),
        "plan_seconds": outputs[0].stats.seconds["plan"],
        "choices": dict(sum((output.stats.choices for output in outputs), type(outputs[0].stats.choices)())),
        "ids": [output.token_ids for output in outputs],
    }


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each group and contestant, and for all of the stream together.

    "ratio" is tokens per second of all runs over those of plain decoding; "median_ratio" the median over prompts.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["group"], record["contestant"]].append(record)
        if record["job"].startswith("stream"):
            groups["all", record["contestant"]].append(record)
    rows = []
    for (group, contestant), mine in groups.items():
        plain = {record["job"]: record for record in groups[group, "off"]}
        choices: dict[str, int] = defaultdict(int)
        for record in mine:
            for name, count in record["choices"].items():
                choices[name] += count
        rows.append(
            {
                "group": group,
                "contestant": contestant,
                "runs": len(mine),
                "ratio": sum(r["seconds"] for r in plain.values()) / sum(r["seconds"] for r in mine),
                "median_ratio": statistics.median(plain[r["job"]]["seconds"] / r["seconds"] for r in mine),
                "tokens_per_s": sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine),
                "committed_per_pass": sum(r["tokens"] for r in mine) / sum(r["passes"] for r in mine),
                "expected_per_pass": sum(r["expected"] for r in mine) / sum(r["passes"] for r in mine),
                "identical": sum(r["ids"] == plain[r["job"]]["ids"] for r in mine),
                "choices": dict(choices),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=["stream", "hard", "load"], default=["stream", "hard", "load"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "leader.json")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    specs = list(dict.fromkeys(spec for draft in [ALL, "ngram", *FIXED] for spec in draft.split()))
    llm = LLM(options.model, draft=specs, policy="fixed")
    cases = load_cases(options.prompts, llm, options.limit)
    jobs: list[Job] = []
    if "stream" in options.parts:
        jobs += stream_jobs(cases, options.tokens)
    if "hard" in options.parts:
        jobs += hard_jobs(cases, options.tokens, llm.runner.vocab_size)
    if "load" in options.parts:
        jobs += load_jobs(cases, options.tokens // 2)
    kept = options.out.with_suffix(".runs.jsonl")
    rows = summary(run(llm, jobs, kept, Console(stderr=True)))
    document = {"environment": environment(llm), "tokens": options.tokens, "all": ALL, "rows": rows}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    table = Table("group", "contestant", "ratio", "median", "per pass", "expected", "identical")
    for row in rows:
        numbers = [f"{row[key]:.2f}" for key in ("ratio", "median_ratio", "committed_per_pass", "expected_per_pass")]
        table.add_row(row["group"], row["contestant"], *numbers, f"{row['identical']} of {row['runs']}")
    Console().print(table)


if __name__ == "__main__":
    main()
