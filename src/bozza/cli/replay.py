"""`bozza replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from bozza.cli import options as o
from bozza.cli import show
from bozza.errors import ConfigError

Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        help="Drafter; repeatable: suffix:k=8 and ngram run for real, recorded:NAME,k=4 does as the traces say. "
        "Without any: suffix and all that were recorded.",
    ),
]


def replay(
    traces: Annotated[Path, typer.Argument(help="JSON lines, as 'bozza trace' writes them.")],
    costs: Annotated[Path, typer.Option("--costs", help="JSON file: what a step and each drafter take, in seconds.")],
    policy: Annotated[
        str,
        typer.Option("--policy", help="off, fixed (each drafter's k), fixed:4, fixed:NAME=8, adaptive, oracle."),
    ] = "adaptive",
    draft: Drafters = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Copies of each request, in lock step.", min=1)] = 1,
    as_json: o.Json = False,
) -> None:
    """Run the leader on recorded traces, without a model and in simulated time; 'oracle' is the best possible."""
    from bozza.study.replay import replay as run
    from bozza.study.traces import load_traces

    document = _costs(costs)
    cap = document.pop("cap", {})
    if not isinstance(cap, dict):
        raise ConfigError(f'--costs {costs}: cap is an object, as in {{"cap": {{"eagle": 8}}}}')
    with o.err.status("replaying"):
        found = run(load_traces(traces, cap), document, policy, batch=batch, draft=draft)
    if as_json:
        show.print_json(found)
    else:
        _print(found)


def _costs(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--costs {file}: cannot be read ({problem})") from problem
    if not isinstance(document, dict):
        raise ConfigError(f'--costs {file}: write {{"verify": {{"base": s, "per_token": s, "per_cached": s}}, ...}}')
    stored = document.get("costs")  # a profile, as `bozza tune` keeps it
    return stored if isinstance(stored, dict) else document


def _print(document: dict[str, Any]) -> None:
    """What a replay came to, on a terminal of 80 columns."""
    per_step = document["tokens"] / document["steps"]
    o.out.print(
        f"[bold]{escape(document['policy'])}[/bold] · batch {document['batch']} · {document['requests']} requests · "
        f"{document['tokens']} tokens · {per_step:.2f} per step"
    )
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("times as fast as plain")
    rows = {"mean throughput": "speedup_mean_throughput", "in all": "speedup_total"}
    columns = {"here": document} | ({"oracle": document["oracle"]} if "oracle" in document else {})
    for heading in (*columns, *(("share of oracle",) if "oracle" in document else ())):
        table.add_column(heading, justify="right")
    for row, key in rows.items():
        cells = [f"{column[key]:.3f}" for column in columns.values()]
        if "oracle" in document:
            cells.append(f"{document[key] / document['oracle'][key]:.1%}")
        table.add_row(row, *cells)
    o.out.print(table)
    shares = [f"{name} {count / document['steps']:.1%}" for name, count in document["choices"].items()]
    o.out.print(escape(f"steps by what was verified: {' · '.join(shares)}"), soft_wrap=True)
    if document.get("reliability"):
        _print_reliability(document["reliability"])


def _print_reliability(rows: Sequence[Mapping[str, float]]) -> None:
    """Whether nodes that were verified stood as often as the leader expected."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for heading in ("expected to stand", "stood", "nodes"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(f"{row['predicted']:.0%}", f"{row['observed']:.0%}", f"{row['nodes']:.0f}")
    o.out.print(table)
