"""How results look on a terminal, and as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from bozza.cli.options import out
from bozza.core import RequestStats


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def write(text: str) -> None:
    """Model text on standard output exactly as it is: nothing in it is markup."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stats_document(stats: RequestStats) -> dict[str, Any]:
    """Statistics of one request as JSON."""
    known = {entry.name: getattr(stats, entry.name) for entry in fields(stats)}
    return known | {"committed_per_pass": stats.committed_per_pass}


def output_document(output: Any) -> dict[str, Any]:
    """One output as JSON; log-probabilities only if they were asked for."""
    document = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stats": stats_document(output.stats),
    }
    if output.error is not None:
        document["error"] = output.error
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(output, name)) is not None:
            document[name] = [entry and asdict(entry) for entry in entries]
    return document


def stats_line(stats: RequestStats) -> str:
    """Statistics of one request in a line."""
    seconds = sum(stats.seconds.values())
    parts = [f"{stats.committed} tokens in {seconds:.2f} s", f"{stats.committed / seconds:.1f} tokens/s"]
    parts.append(f"{stats.committed_per_pass:.2f} per pass")
    parts += [f"{name}: {stats.accepted[name]} of {drafted} accepted" for name, drafted in stats.drafted.items()]
    return " · ".join(parts)


def bench_card(rows: list[dict[str, Any]]) -> Table:
    """The rows of a benchmark document as a table that fits a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for heading in ("workload", "policy"):
        table.add_column(heading)
    for heading in ("tokens/s", "ratio", "per pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("guessed", "identical"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            escape(row["workload"]),
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_off']:.2f}",
            f"{row['committed_per_pass']:.2f}",
            drafted_share(row),
            identity(row),
            end_section=row["policy"] != "off",
        )
    return table


def stage_shares(row: dict[str, Any]) -> str:
    """Where the time went."""
    total = sum(row["seconds_by_stage"].values())
    return " · ".join(f"{stage} {seconds / total:.1%}" for stage, seconds in row["seconds_by_stage"].items())


def drafted_share(row: dict[str, Any]) -> str:
    """Which part of the output each drafter guessed."""
    return ", ".join(f"{name} {entry['share']:.0%}" for name, entry in row["drafters"].items()) or "-"


def identity(row: dict[str, Any]) -> str:
    """Whether the outputs equal the plain ones, in a word or two; "in law" where no more is promised."""
    if row["policy"] == "off":
        return "-"
    if row["identical"] is None:
        return "in law"
    verdicts = [difference["verdict"] for difference in row["differences"]]
    if "bug" in verdicts:
        return f"[red]NO, {verdicts.count('bug')} beyond rounding[/red]"
    if verdicts:
        return f"[yellow]{len(verdicts)} near-tie(s)[/yellow]"
    return "[green]yes[/green]"


def theory_line(row: dict[str, Any]) -> str:
    """What a model drafter should have gained, and what it did."""
    found = row["theory"]
    return (
        f"model drafter, {row['workload']}: alpha {found['alpha']:.2f} · c {found['c']:.2f} · gamma {found['gamma']} · "
        f"expected {found['expected']:.2f}x · measured {found['measured']:.2f}x · best gamma {found['best_gamma']}"
    )


def print_bench(document: dict[str, Any]) -> None:
    """The card of a benchmark document; below it what theory says of a model drafter, and where the time went."""
    facts = document["environment"]
    out.print(
        f"[bold]{escape(str(facts['model']))}[/bold] · {facts['dtype']} on {facts['device']} · "
        f"{facts['threads']} threads · batch {facts['batch']} · {facts['params']['max_tokens']} tokens each"
    )
    out.print(bench_card(document["rows"]))
    for row in document["rows"]:
        if row["theory"] is not None:
            out.print(escape(theory_line(row)), soft_wrap=True)
    out.print(f"time ({document['rows'][-1]['policy']}): {stage_shares(document['rows'][-1])}")
