"""Commands of `bozza`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from bozza.cli import options as o
from bozza.cli import show
from bozza.cli.chat import chat
from bozza.cli.generate import generate
from bozza.cli.models import models
from bozza.cli.replay import replay
from bozza.cli.trace import trace
from bozza.cli.train import train
from bozza.cli.tune import tune
from bozza.cli.verify import verify
from bozza.errors import BozzaError, ConfigError

app = typer.Typer(
    name="bozza",
    help="Lossless speculative decoding: the same output as your model alone, only sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(chat)
app.command()(verify)
app.command()(tune)
app.command()(trace)
app.command()(replay)
app.add_typer(models, name="models")
app.add_typer(train, name="train")


@app.command()
def bench(
    prompts: Annotated[Path, typer.Option("--prompts", help='JSON lines: {"workload": "...", "prompt": "..."}')],
    model: o.Model = "smollm2",
    draft: o.Draft = None,
    policy: o.Policy = "adaptive",
    max_tokens: o.MaxTokens = 128,
    ignore_eos: o.IgnoreEos = False,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    json_schema: o.JsonSchema = None,
    regex: o.Regex = None,
    grammar: o.Grammar = None,
    more: o.Set = None,
    rule: o.Rule = "coupled",
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quantize: o.Quantize = None,
    compile: o.Compile = False,
    threads: o.Threads = None,
    invariant: o.Invariant = False,
    shared_history: o.SharedHistory = False,
    history_file: o.HistoryFile = None,
    batch: o.Batch = 1,
    limit: Annotated[int | None, typer.Option("--limit", help="Most prompts of each workload.", min=1)] = None,
    repeat: Annotated[int, typer.Option("--repeat", help="How often to run everything.", min=1)] = 1,
    file: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write the JSON document; bench.json without --json."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Measure plain against speculative decoding, taking turns in one process, and check that outputs are equal.

    A fair comparison emits the same number of tokens: use --max-tokens N --ignore-eos.
    """
    shape = o.structured(json_schema, regex, grammar)
    params = o.sampling(max_tokens, temperature, top_p, top_k, seed, ignore_eos, more=more, stop=stop, structured=shape)
    if params.n > 1:
        raise ConfigError(f"n is {params.n}: a benchmark measures one output of each prompt, drop --set n")
    if temperature > 0.0 and seed is None and rule == "coupled":
        raise ConfigError("sampled outputs can only be compared with a seed: add --seed")
    if file is None and not as_json:
        file = Path("bench.json")
    if file is not None:
        _check_writable(file)
    if not prompts.is_file():
        raise ConfigError(f"--prompts {prompts}: there is no such file")
    history = history_file or shared_history
    on = o.On(dtype, device, quantize, compile, threads)
    llm = o.load_llm(model, draft, policy, on, batch, rule, invariant=invariant, history=history)
    from bozza.bench import load_cases, run_bench, runs_needed

    cases = load_cases(prompts, llm, limit)
    with Progress(console=o.err, transient=True) as progress:
        task = progress.add_task("decoding", total=runs_needed(llm, cases, batch, repeat))
        document = run_bench(llm, cases, params, batch=batch, repeat=repeat, on_run=lambda: progress.advance(task))
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        o.err.print(f"wrote {escape(str(file))}")
    if as_json:
        show.print_json(document)
    else:
        show.print_bench(document)


def _check_writable(file: Path) -> None:
    """Find out before a long measurement, not after."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--out {file}: there is no folder {folder}")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"--out {file}: this cannot be written to, name a file in a folder of yours")


def main() -> None:
    """Run a command; what a user can act on is one line and exit code 2."""
    try:
        app()
    except BozzaError as error:
        o.err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        o.err.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
