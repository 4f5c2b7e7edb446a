"""`bozza train`: from a target to a working drafter, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bozza.cli import options as o
from bozza.errors import ConfigError

if TYPE_CHECKING:
    from bozza.train.loop import Agreement

train = typer.Typer(name="train", help="Train a drafter on what the target itself writes.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the run; a run that was stopped goes on there.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="User turns, a line each. Without them the target writes its own."),
]
Tokens = Annotated[int, typer.Option("--tokens", help="Size of the data.", min=1000)]
RunSeed = Annotated[int, typer.Option("--seed", help="Decides data and training.")]
Epochs = Annotated[int, typer.Option("--epochs", help="How often the data is gone through.", min=1)]

Vocab = Annotated[int, typer.Option("--vocab", help="Frequent tokens over which laws are compared.", min=16)]


@train.command()
def eagle(
    out: Out,
    model: o.Model = "smollm2",
    prompts: Prompts = None,
    tokens: Tokens = 600_000,
    epochs: Epochs = 7,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", help="Most tokens that the head can guess.")] = 8192,
    layers: Annotated[int, typer.Option("--layers", help="Decoder layers of the head.", min=1, max=4)] = 1,
    widen: Annotated[int, typer.Option("--widen", help="Its feed-forward part, times the target's.", min=1)] = 2,
    steps: Annotated[int, typer.Option("--steps", help="Guesses ahead in training.", min=1, max=8)] = 3,
    seed: RunSeed = 0,
    as_json: o.Json = False,
) -> None:
    """Train an EAGLE head: a decoder layer on the target's hidden states. Draft with it as eagle:FOLDER."""
    user_turns = _prompts(prompts)
    _check_folder(out)
    if draft_vocab < 16:
        raise ConfigError(f"--draft-vocab {draft_vocab}: use at least 16")
    from bozza.train.loop import Recipe
    from bozza.train.pipeline import Order, train_eagle

    o.quieten()
    recipe = Recipe(draft_vocab=draft_vocab, layers=layers, steps=steps, epochs=epochs, seed=seed)
    with Bars() as bars:
        card = train_eagle(Order(model, out, tokens, seed, user_turns, widen, recipe), bars)
    _finish(card, out, "eagle", as_json)


@train.command()
def mtp(
    out: Out,
    model: o.Model = "smollm2",
    prompts: Prompts = None,
    tokens: Tokens = 600_000,
    epochs: Epochs = 7,
    modules: Annotated[int, typer.Option("--modules", help="One for each guess ahead.", min=1, max=8)] = 3,
    vocab: Vocab = 8192,
    seed: RunSeed = 0,
    as_json: o.Json = False,
) -> None:
    """Train multi-token-prediction heads for a target that ships without: mtp:FOLDER."""
    user_turns = _prompts(prompts)
    _check_folder(out)
    from bozza.train.loop import Recipe
    from bozza.train.pipeline import Order, train_mtp

    o.quieten()
    recipe = Recipe(draft_vocab=vocab, layers=modules, steps=modules, epochs=epochs, seed=seed)
    with Bars() as bars:
        card = train_mtp(Order(model, out, tokens, seed, user_turns, recipe=recipe), bars)
    _finish(card, out, "mtp", as_json)


@train.command()
def draft(
    out: Out,
    model: o.Model = "smollm2",
    prompts: Prompts = None,
    tokens: Tokens = 600_000,
    epochs: Epochs = 7,
    layers: Annotated[int, typer.Option("--layers", help="Decoder layers, taken from the target's.", min=1)] = 3,
    vocab: Vocab = 8192,
    seed: RunSeed = 0,
    as_json: o.Json = False,
) -> None:
    """Distil a small model with the target's vocabulary, for targets without a small sibling: model:FOLDER."""
    user_turns = _prompts(prompts)
    _check_folder(out)
    from bozza.train.loop import Recipe
    from bozza.train.pipeline import Order, train_draft

    o.quieten()
    recipe = Recipe(draft_vocab=vocab, layers=layers, steps=1, epochs=epochs, learning_rate=5e-4, seed=seed)
    with Bars() as bars:
        card = train_draft(Order(model, out, tokens, seed, user_turns, recipe=recipe), bars)
    _finish(card, out, "model", as_json)


def _prompts(file: Path | None) -> tuple[str, ...] | None:
    if file is None:
        return None
    from bozza.train.prompts import read_prompts

    return tuple(read_prompts(file))


def _check_folder(out: Path) -> None:
    """Find out before hours of work, not after."""
    try:
        (out / "work").mkdir(parents=True, exist_ok=True)
        (out / "work" / "writable").touch()
        (out / "work" / "writable").unlink()
    except OSError as problem:
        raise ConfigError(
            f"--out {out}: cannot be written to ({problem.strerror}); name a folder of yours"
        ) from problem


def _finish(card: dict[str, Any], out: Path, kind: str, as_json: bool) -> None:
    if as_json:
        from bozza.cli.show import print_json

        print_json(card)
    o.err.print(f"wrote {escape(str(out))}: draft with [bold]--draft {kind}:{escape(str(out))}[/bold]")


class Bars:
    """A bar for each part of a run; under it how well the head guesses held-out text by now."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=o.err,
        )
        self._tasks: dict[str, Any] = {}
        self._last = ""

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._progress.stop()

    def part(self, name: str, done: int, total: int) -> None:
        """See `bozza.train.pipeline.Watcher`."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note="", completed=done)
        self._last = name
        self._progress.update(self._tasks[name], completed=min(done, total))

    def agreement(self, agreement: Agreement) -> None:
        """See `bozza.train.pipeline.Watcher`."""
        depths = " ".join(f"{depth:.2f}" for depth in agreement.depths[:3])
        note = f"held out: {agreement.per_pass:.2f} tokens per pass as a chain ({depths})"
        self._progress.update(self._tasks[self._last], note=note)
        if not o.err.is_terminal:  # a bar that nobody sees; a log file still wants to know
            task = self._progress.tasks[self._tasks[self._last]]
            o.err.print(f"{self._last} {task.completed:.0f} of {task.total:.0f} · {note}", soft_wrap=True)
