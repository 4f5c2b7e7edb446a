"""`bozza trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bozza.cli import options as o
from bozza.errors import ConfigError


def trace(
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines as for bench.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File of traces; one that exists goes on.")],
    draft: Annotated[
        list[str], typer.Option("--draft", "-d", help="Drafter to record, at its k; repeatable: eagle:width=1,k=8.")
    ],
    model: o.Model = "smollm2",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Most tokens of an output.", min=1)] = 256,
    limit: Annotated[int | None, typer.Option("--limit", help="Most prompts of each workload.", min=1)] = None,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = None,
    ignore_eos: o.IgnoreEos = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quantize: o.Quantize = None,
    compile: o.Compile = False,
    threads: o.Threads = None,
) -> None:
    """Record what drafters would have guessed at every place of a model's own outputs, for 'bozza replay'."""
    from bozza.study.recorder import check_recorded, record

    check_recorded(draft)
    params = o.sampling(tokens, temperature, None, None, seed, ignore_eos)
    if temperature > 0.0 and seed is None:
        raise ConfigError("sampled traces need a seed, so that they can be gone on with: add --seed")
    if not prompts.is_file():
        raise ConfigError(f"--prompts {prompts}: there is no such file")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    on = o.On(dtype, device, quantize, compile, threads)
    llm = o.load_llm(model, draft, "fixed", on)
    from bozza.bench import load_cases

    cases = load_cases(prompts, llm, limit)
    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=o.err) as progress:
        task = progress.add_task("recording", total=len(cases))
        added = record(llm, cases, params, out, lambda: progress.advance(task))
    o.err.print(f"{added} traces added to {escape(str(out))}", soft_wrap=True)
