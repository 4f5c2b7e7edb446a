"""Options that several commands share, and what they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from bozza.errors import ConfigError
from bozza.params import SamplingParams, Structured

out = Console(highlight=False)  # results
err = Console(stderr=True, highlight=False)  # everything said about them

Model = Annotated[str, typer.Option("--model", "-m", help="Alias, folder, .gguf file or hub id.")]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        help="Drafter; repeatable: grammar, prediction, ngram:max=8,k=10, suffix, recycling, eagle, mtp, "
        "model:NAME_OR_FOLDER,k=4.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        help="adaptive: drafts what pays, moment by moment. fixed: always k tokens. off: plain decoding.",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an output.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total mass.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="One seed, one text. Without it each run differs.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the output; repeatable.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Any other sampling parameter, repeatable: min_p=0.1, repetition_penalty=1.1, n=3, logprobs=5, "
        'bad_words=["foo"].',
    ),
]
JsonSchema = Annotated[Path | None, typer.Option("--json-schema", help="File with a JSON schema for the output.")]
Regex = Annotated[str | None, typer.Option("--regex", help="Expression that the whole output must match.")]
Grammar = Annotated[Path | None, typer.Option("--grammar", help="File with a Lark grammar for the output.")]
Rule = Annotated[
    str,
    typer.Option("--rule", help="coupled: one seed, one text. rejection, block: the same law, other coins."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (the checkpoint's), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option("--device", help="auto (a GPU when there is one), cpu, cuda, cuda:1.")]
Quantize = Annotated[
    str | None, typer.Option("--quantize", help="int8: a smaller, faster, not quite equal model, on CPUs.")
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Shorter passes on CPUs for some seconds of loading; needs a C++ compiler."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="To compute with; one for each physical core when left out.")
]
Invariant = Annotated[
    bool,
    typer.Option("--invariant", help="No batch and no draft changes a bit: bfloat16, float32 on a CPU."),
]
SharedHistory = Annotated[
    bool,
    typer.Option("--shared-history", help="Drafter suffix also copies from other outputs. Can leak what they say."),
]
HistoryFile = Annotated[
    Path | None, typer.Option("--history-file", help="Keep the shared history in this file; implies it.")
]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Most prompts in one pass.")]
Show = Annotated[bool, typer.Option("--show", help="Tint the text by who guessed it, and say what the leader did.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Add each decision of policy adaptive to this file, a JSON line each.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


def sampling(
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    ignore_eos: bool = False,
    *,
    more: Sequence[str] | None = None,
    stop: Sequence[str] | None = None,
    structured: Structured | None = None,
) -> SamplingParams:
    """Sampling parameters from flags; flags that could not have an effect are refused."""
    extra = _settings(more or ())
    if temperature == 0.0:
        given = {"--top-p": top_p, "--top-k": top_k, "--seed": seed}
        given |= {f"--set {name}": extra.get(name) for name in ("min_p", "typical_p", "n")}
        if useless := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(f"{useless[0]} has no effect on greedy decoding: add --temperature, or drop it")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else top_k,
        seed=seed,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        structured=structured,
        **extra,
    )


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it can be, otherwise text."""
    own = {"max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop", "structured"}
    known = {entry.name for entry in fields(SamplingParams)} - own - {"logits_processors"}
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name in own:
            raise ConfigError(f"--set {pair}: {name} has a flag of its own")
        if name in settings:
            raise ConfigError(f"--set {name} is given twice: write lists as JSON, as in {name}=[1, 2]")
        if name not in known or not equals:
            raise ConfigError(f"--set {pair}: write NAME=VALUE, with one of {', '.join(sorted(known))}")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def structured(schema: Path | None, regex: str | None, grammar: Path | None) -> Structured | None:
    """What the output must belong to, from flags; None if nothing is said."""
    if schema is None and regex is None and grammar is None:
        return None
    texts: dict[str, str | None] = {"--json-schema": None, "--grammar": None}
    for flag, file in (("--json-schema", schema), ("--grammar", grammar)):
        if file is not None:
            try:
                texts[flag] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise ConfigError(f"{flag} {file}: cannot be read ({problem})") from problem
    return Structured(json_schema=texts["--json-schema"], regex=regex, grammar=texts["--grammar"])


class On(NamedTuple):
    """On what to compute, and how."""

    dtype: str
    device: str
    quantize: str | None = None
    compile: bool = False
    threads: int | None = None


def load_llm(
    model: str,
    draft: list[str] | None,
    policy: str,
    on: On,
    batch: int = 1,
    rule: str = "coupled",
    invariant: bool = False,
    history: bool | Path = False,
    trace: Callable[[Mapping[str, Any]], None] | None = None,
) -> Any:
    """The LLM that the flags describe. Wrong drafters and sizes fail before torch is imported and a model is read."""
    from bozza.drafters.history import check_sharing
    from bozza.drafters.spec import check_drafting
    from bozza.threads import use_threads

    check_sharing(history, check_drafting(draft, policy, rule))
    if batch < 1:
        raise ConfigError(f"--batch {batch}: use at least 1")
    use_threads(on.threads)
    with err.status(f"loading {model}"):
        from bozza import LLM

        quieten()
        return LLM(
            model,
            draft=draft,
            policy=policy,
            rule=rule,
            dtype=on.dtype,
            device=on.device,
            quantize=on.quantize,
            compile=on.compile,
            invariant=invariant,
            shared_history=history,
            max_batch=batch,
            token_budget=max(512, 16 * batch),
            trace=trace,
        )


@contextmanager
def decisions(file: Path | None, policy: str) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Where decisions go while the context lasts; None if nobody wants them."""
    if file is None:
        yield None
        return
    if policy != "adaptive":
        raise ConfigError("--trace shows the decisions of policy adaptive: drop it, or use --policy adaptive")
    from bozza.leader.log import DecisionLog

    with DecisionLog(file) as log:
        yield log.write


def quieten() -> None:
    """Transformers' own progress bars and notices are for people who load models by hand."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
