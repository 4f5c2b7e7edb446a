"""`bozza verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from bozza.cli import options as o
from bozza.cli import show
from bozza.errors import ConfigError

BATCH = 16
COLORS = {"ok": "green", "tie": "yellow", "bug": "red"}


def verify(
    model: o.Model = "smollm2",
    draft: o.Draft = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines as for bench; a few texts are built in.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens of each output.", min=1)] = 64,
    samples: Annotated[
        int, typer.Option("--samples", help="Least number of sampled tokens for each test of a law.", min=1)
    ] = 2048,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quantize: o.Quantize = None,
    compile: o.Compile = False,
    threads: o.Threads = None,
    invariant: o.Invariant = False,
    as_json: o.Json = False,
) -> None:
    """Check that speculation changes nothing: your model, your drafters, this machine. Exit code 1 if it does."""
    if prompts is not None and not prompts.is_file():
        raise ConfigError(f"--prompts {prompts}: there is no such file")
    on = o.On(dtype, device, quantize, compile, threads)
    llm = o.load_llm(model, draft, "fixed", on, BATCH, invariant=invariant)
    from bozza.bench import environment, load_cases

    cases = None if prompts is None else [case.prompt for case in load_cases(prompts, llm)]
    with o.err.status("") as status:
        report = llm.verify(
            cases, tokens=tokens, samples=samples, on_check=lambda name: status.update(f"checking {name}")
        )
    if as_json:
        show.print_json({"environment": environment(llm), "ok": report.ok, "checks": list(map(asdict, report.checks))})
    else:
        o.out.print(f"[bold]{escape(llm.name)}[/bold] · {', '.join(llm.draft)}")
        for check in report.checks:
            mark = f"[{COLORS[check.verdict]}]{check.verdict:<4}[/]"
            o.out.print(f"{mark} [bold]{check.name}[/bold]: {escape(check.detail)}")
    if not report.ok:
        raise typer.Exit(1)
