"""Bozza against its peers, on the same machine, in the same run, in turns on the same prompts.

usage: python benchmarks/peers/run.py --prompts FILE --model NAME [--assistant NAME] [--gguf FILE] [--setup]
       [--contestants NAME,...] [--tokens N] [--limit N] [--batch N ...] [--threads N] [--memory GIB] [--out FILE]

Peers: transformers, llama.cpp (llama-cpp-python), OpenVINO GenAI and vLLM's CPU backend, each plain and speculating.
`--setup` makes an environment for each in Bozza's cache folder, and exports the model for OpenVINO; it needs about
10 GB of disk and half an hour. A peer that is not there is left out with a line that says so.

Everybody decodes greedily exactly N tokens (end tokens count for nothing) of the same prompt ids; times are wall times
of whole requests, prompts included, after one request that is not timed. In a round, Bozza's processes and as many
peers as fit in memory do each prompt one after the other, in an order that rotates; whose turn it is not is stopped
(SIGSTOP). Ratios are medians of runs that are paired so. With --batch, groups of prompts are decoded at once by those
who can; nobody keeps anything of earlier groups.

Each run is kept beside the result (.runs.jsonl) as soon as it is done: started again, the script goes on where it
stopped, and what was measured for the same prompts and settings in earlier starts is in the result too. Delete the
file to start afresh. A round is measured again when its peers change, so keep --contestants and --memory the same.
fetch.py brings the models that the stored results were measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import environments
import report
from contestants import Worker, workers
from options import parse
from processes import Process
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging
from turns import Job, Kept, Round, Turns, jobs, plan

from bozza.bench import Case, _processor, load_cases
from bozza.errors import BozzaError
from bozza.intake import Intake
from bozza.models.loading import resolve

PEERS = ("transformers", "llama.cpp", "openvino", "vllm")
SCRIPTS = {"llama.cpp": "llama_worker.py"}
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Show a line on standard error."""
    CONSOLE.print(line, markup=False)


def read_prompts(given: argparse.Namespace) -> list[Case]:
    """The prompts as token ids; only the tokenizer of the model is loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    except (OSError, ValueError) as problem:
        raise SystemExit(f"{given.model} has no tokenizer: {str(problem).splitlines()[0]}") from problem
    intake = Intake(tokenizer, len(tokenizer), frozenset())
    reader: Any = SimpleNamespace(
        encode=intake.encode,
        encode_chat=intake.encode_chat,
        engine=SimpleNamespace(check_prompt=lambda ids: None),
    )
    return load_cases(given.prompts, reader, given.limit)


def chosen(given: argparse.Namespace, context: int) -> list[Worker]:
    """The workers that are wanted and can run."""
    known = workers(given, context, environments.exports(given.model))
    names = {name for worker in known for name in (worker.peer, worker.name, *worker.variants)}
    wanted = set(given.contestants or names)
    if unknown := wanted - names:
        raise SystemExit(f"no contestant {sorted(unknown)[0]!r}: use {', '.join(sorted(names))}")
    found = []
    for worker in known:
        taken = {
            name: variant for name, variant in worker.variants.items() if wanted & {worker.peer, worker.name, name}
        }
        if not taken:
            continue
        missing = worker.missing
        if not environments.is_ready(worker.peer):
            missing = f"no environment {environments.python_of(worker.peer).parent.parent}: run --setup"
        if missing:
            tell(f"{worker.name}: skipped, {missing}")
        else:
            found.append(worker.only(taken))
    return found


def starter(given: argparse.Namespace) -> Any:
    """Starts a worker's process."""

    def start(worker: Worker) -> Process:
        return Process(
            worker.name,
            environments.python_of(worker.peer),
            SCRIPTS.get(worker.peer, f"{worker.peer}_worker.py"),
            {**worker.options, "variants": list(worker.variants.values())},
            {**environments.variables(worker.peer, given.threads), **worker.variables},
            environments.root() / "logs" / f"{worker.name}.log",
            given.patience,
        )

    return start


def setup(given: argparse.Namespace) -> None:
    """Make what is missing; a peer that cannot be made is left out with a line."""
    for peer in PEERS:
        if not given.contestants or any(name.startswith(peer) for name in given.contestants):
            try:
                environments.make(peer, given.model)
                tell(f"{peer}: ready")
            except (OSError, subprocess.CalledProcessError) as problem:
                tell(f"{peer}: not made, {problem}")


def measure(given: argparse.Namespace) -> None:
    """Run what has not been run, and store and show what came out."""
    cases = read_prompts(given)
    longest = max(len(case.prompt) for case in cases) + given.tokens
    context = -(-(longest + 64) // 256) * 256  # room for drafts
    todo = jobs(cases, given.tokens, given.batch, given.groups, settings(given))
    rounds = plan(chosen(given, context), given.memory, tell)
    kept = Kept(given.out.with_suffix(".runs.jsonl"))
    for current in rounds:
        tell(f"round {current.name}: {', '.join(worker.name for worker in current.workers)}")
        Turns(current, kept, tell).play(todo, starter(given))
    document = summary(given, kept, todo, rounds)
    scratch = given.out.with_suffix(".tmp")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(given.out)
    console = Console()
    for table in [report.speed_table(document["rows"]), *report.ratio_tables(document["ratios"])]:
        console.print(table)


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What the measurement depends on beside prompts and tokens."""
    names = ("model", "assistant", "gguf", "head", "proposer")
    told: dict[str, Any] = {name: str(getattr(given, name) or "").rpartition("/")[2] or None for name in names}
    draft = [re.sub(r":/\S*/", ":", spec) for spec in given.draft]  # folders are nobody's business
    return told | {"draft": draft, "threads": given.threads, "eager": given.eager}


def summary(given: argparse.Namespace, kept: Kept, todo: Sequence[Job], rounds: Sequence[Round]) -> dict[str, Any]:
    """The document that is stored."""
    runs = report.measured(kept.records, todo)
    facts = settings(given) | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bozza": version("bozza"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "tokens": given.tokens,
        "prompts": given.prompts.name,
        "dtype": "bfloat16",
    }
    peers = {record["contestant"]: record["ready"] for record in kept.records if "ready" in record}
    return {
        "environment": facts,
        "workers": {name: {key: ready[key] for key in ("versions", "settings")} for name, ready in peers.items()},
        "rounds": [[worker.name for worker in current.workers] for current in rounds],
        "rows": report.rows(runs, todo),
        "ratios": report.ratios(runs, todo),
    }


def main() -> None:
    """See the module."""
    given = parse(__doc__)
    logging.set_verbosity_error()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that workers are ended
    try:
        if given.gguf is None and str(given.model).endswith(".gguf"):
            given.gguf = Path(given.model)
        given.model = resolve(given.model)
        given.assistant = resolve(given.assistant) if given.assistant else None
        if given.setup:
            setup(given)
        else:
            measure(given)
    except BozzaError as problem:
        raise SystemExit(str(problem)) from problem


if __name__ == "__main__":
    main()
