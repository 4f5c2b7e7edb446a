"""The main job on real prompts: each decoded plainly and speculatively, streamed, and compared.

usage: python examples/demo.py [--max-tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from bozza import LLM, Output, SamplingParams
from bozza.bench import environment

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DRAFT = ["suffix", "recycling:k=12", "eagle:k=12"]  # the leader takes what pays
TINTS = {"suffix": "green", "recycling": "yellow", "eagle": "cyan"}
console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """One prompt decoded once."""

    output: Output
    seconds: float

    @property
    def speed(self) -> float:
        return len(self.output.token_ids) / self.seconds


def decode(llm: LLM, messages: list[Mapping[str, str]], params: SamplingParams) -> Run:
    """Stream an answer to the terminal, each token that a drafter guessed in that drafter's colour."""
    started = time.perf_counter()
    prompt = llm.encode_chat(messages)
    text, reason = "", None
    chunks = llm.stream(prompt, params)
    for chunk in chunks:
        guesses = Counter(name for name in chunk.drafters if name)
        style = TINTS[guesses.most_common(1)[0][0]] if guesses else ""
        console.print(Text(chunk.text, style=style), end="", soft_wrap=True)
        text, reason = text + chunk.text, chunk.finish_reason
    seconds = time.perf_counter() - started
    console.print()
    return Run(Output(prompt, chunks.token_ids, text, reason or "abort", chunks.stats), seconds)


def compare(llm: LLM, plain: Run, fast: Run, params: SamplingParams) -> str:
    """Identical, or where the outputs part and why."""
    difference = llm.first_difference(plain.output, fast.output, params)
    if difference is None:
        return "yes"
    return f"{difference.verdict} at {difference.position}"  # the token


def row(name: str, plain: Run, fast: Run, identical: str) -> dict[str, object]:
    """One line of the final table."""
    stats = fast.output.stats
    return {
        "prompt": name,
        "tokens": len(fast.output.token_ids),
        "plain_tokens_per_s": plain.speed,
        "speculative_tokens_per_s": fast.speed,
        "ratio": fast.speed / plain.speed,
        "committed_per_pass": stats.committed_per_pass,
        "share": {drafter: accepted / stats.committed for drafter, accepted in stats.accepted.items()},
        "identical": identical,
    }


def card(rows: list[dict[str, object]]) -> Table:
    """The final table."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "plain", "spec.", "ratio", "per pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("guessed", justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for entry in rows:
        share = entry["share"]
        assert isinstance(share, dict)
        table.add_row(
            str(entry["prompt"]),
            str(entry["tokens"]),
            *(
                f"{entry[key]:.{digits}f}"
                for key, digits in {
                    "plain_tokens_per_s": 1,
                    "speculative_tokens_per_s": 1,
                    "ratio": 2,
                    "committed_per_pass": 2,
                }.items()
            ),
            f"{sum(share.values()):.0%}",  # by whom, the colours say
            str(entry["identical"]),
        )
    return table


def main() -> None:
    """Run every prompt both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()

    logging.disable_progress_bar()
    with console.status("fetching and loading the default model (once: about 100 MB)"):
        llm = LLM("smollm2", draft=DRAFT, dtype="bfloat16", device="cpu")
    plain = llm.with_policy("off")
    params = SamplingParams(max_tokens=options.max_tokens)
    for contestant in (plain, llm):  # nobody's first pass is measured
        contestant.generate("warm up", SamplingParams(max_tokens=4))
    rows = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        name = case["workload"]
        console.rule(f"[bold]{name}[/bold] · plain")
        slow = decode(plain, case["messages"], params)
        colours = "[green]green[/green]: copied, [cyan]cyan[/cyan]: from the head"
        console.rule(f"[bold]{name}[/bold] · speculative ({colours})")
        fast = decode(llm, case["messages"], params)
        rows.append(row(name, slow, fast, compare(llm, slow, fast, params)))
    console.rule("[bold]the same text, sooner[/bold] (tokens/s)")
    console.print(card(rows))
    if options.json:
        document = {"environment": environment(llm), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
