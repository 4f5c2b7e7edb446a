"""`bozza tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from bozza.cli import options as o
from bozza.cli import show
from bozza.errors import ConfigError

SETS = {"merged": "all together", "adaptive": "adaptive", "oracle": "best possible"}


def tune(
    prompts: Annotated[Path, typer.Option("--prompts", help='JSON lines: {"workload": "...", "prompt": "..."}')],
    model: o.Model = "smollm2",
    draft: o.Draft = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Predict for 1, 4, 16, ... up to this.", min=1)] = 16,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Most tokens of each output.", min=4)] = 64,
    limit: Annotated[int | None, typer.Option("--limit", help="Most prompts of each workload.", min=1)] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quantize: o.Quantize = None,
    compile: o.Compile = False,
    threads: o.Threads = None,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, and predict what each drafter is worth on your prompts.

    Costs are measured anew and kept for later runs. Speedups are predictions from them and from what the model wrote.
    """
    from bozza.study.recorder import check_recorded
    from bozza.study.tuning import batch_sizes, drafters_to_tune, tune

    draft = drafters_to_tune() if draft is None else draft
    check_recorded(draft)
    if not prompts.is_file():
        raise ConfigError(f"--prompts {prompts}: there is no such file")
    on = o.On(dtype, device, quantize, compile, threads)
    llm = o.load_llm(model, draft, "fixed", on, batch)
    from bozza.bench import environment, load_cases

    cases = load_cases(prompts, llm, limit)
    with o.err.status("") as status:
        found = tune(
            llm,
            cases,
            tokens=tokens,
            batches=batch_sizes(batch),
            on_part=lambda part: status.update(part),
        )
    if as_json:
        show.print_json({"environment": environment(llm)} | found)
    else:
        _print(llm, found)
    if found["profile"] is not None:
        o.err.print(f"wrote the costs to {escape(found['profile'])}", soft_wrap=True)


def _print(llm: Any, found: dict[str, Any]) -> None:
    o.out.print(
        f"[bold]{escape(llm.name)}[/bold] · predicted speedup over plain decoding of "
        f"{found['requests']} outputs, {found['tokens']} tokens",
        soft_wrap=True,
    )
    o.out.print(card(found))
    for entry in found["drafters"]:
        o.out.print(f"[bold]{escape(entry['name'])}[/bold]: {reason(entry)}")
    o.out.print("Predictions: chains, replayed with measured costs. Measure with `bozza bench`.")


def card(found: dict[str, Any]) -> Table:
    """Drafters and sets against batch sizes; k is the best number of tokens to draft."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("drafter")
    for batch in found["batches"]:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for place, entry in enumerate(found["drafters"], 1):
        cells = [_cell(entry["speedup"][batch], entry["best"][batch]) for batch in found["batches"]]
        table.add_row(escape(entry["name"]), *cells, end_section=place == len(found["drafters"]))
    for name, title in SETS.items():
        if name != "merged" or len(found["drafters"]) > 1:
            table.add_row(title, *(f"{found['sets'][name][batch]:.2f}x" for batch in found["batches"]))
    return table


def _cell(speedup: float, k: int) -> str:
    return f"{speedup:.2f}x k={k:<2}" if k else f"[dim]{speedup:.2f}x off [/dim]"


def reason(entry: dict[str, Any]) -> str:
    """Why a drafter is worth what it is, in a line."""
    draft = "free" if entry["free"] else f"{entry['draft_ms']:.1f} ms"
    return (
        f"{entry['tokens_per_step']:.2f} tokens a step · first right {entry['first_token']:.0%} · "
        f"draft {draft} · token {entry['token_ms']:.1f} ms"
    )
