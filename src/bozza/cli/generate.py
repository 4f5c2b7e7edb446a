"""`bozza generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from bozza.cli import options as o
from bozza.cli import show
from bozza.drafters.spec import drafter_names, parse_spec
from bozza.errors import BozzaError, ConfigError, PromptError
from bozza.params import SamplingParams


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue; standard input when none.")] = None,
    model: o.Model = "smollm2",
    draft: o.Draft = None,
    policy: o.Policy = "adaptive",
    max_tokens: o.MaxTokens = 256,
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
    batch: o.Batch = 32,
    watch: o.Show = False,
    trace: o.Trace = None,
    as_json: o.Json = False,
) -> None:
    """Continue one or more texts as they stand (no chat template)."""
    shape = o.structured(json_schema, regex, grammar)
    params = o.sampling(max_tokens, temperature, top_p, top_k, seed, ignore_eos, more=more, stop=stop, structured=shape)
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ConfigError("log-probabilities are only in the JSON document: add --json")
    if watch and as_json:
        raise ConfigError("--show is to look at and --json to be read by programs: drop one")
    if watch and (len(prompts or ()) > 1 or params.n > 1):
        raise ConfigError("--show follows one output as it comes: give one prompt, and drop --set n")
    texts = prompts or [_standard_input()]
    history = history_file or shared_history
    with o.decisions(trace, policy) as log:
        on = o.On(dtype, device, quantize, compile, threads)
        llm = o.load_llm(model, draft, policy, on, batch, rule, invariant=invariant, history=history, trace=log)
        if as_json:
            show.print_json({"outputs": [_document(text, output) for text, output in _decode_all(llm, texts, params)]})
        elif len(texts) == 1 and params.n == 1:
            stream(llm, llm.encode(texts[0]), params, watch)
        else:
            _print_all(_decode_all(llm, texts, params))


def stream(llm: Any, ids: list[int], params: SamplingParams, watch: bool = False) -> str:
    """Print an output as it comes, and what it took; returns the text. `watch` also says who guessed what."""
    from bozza.stream import Authors

    chunks = llm.stream(ids, params)
    painter = show.Painter(drafter_names([parse_spec(spec) for spec in llm.draft])) if watch else None
    authors = Authors(llm.tokenizer)
    text = ""
    for chunk in chunks:
        if painter is None:
            show.write(chunk.text)
        else:
            painter.write(authors.pieces(chunk))
        text += chunk.text
    show.write("\n")
    o.err.print(f"[dim]{show.stats_line(chunks.stats)}[/dim]")
    if painter is not None:
        painter.summary(chunks.stats)
    if chunks.error is not None:
        raise BozzaError(chunks.error)
    return text


def _print_all(outputs: Sequence[tuple[str, Any]]) -> None:
    for text, output in outputs:
        for sample in output.samples:
            o.out.print(Text(text, style="bold"), end="", soft_wrap=True)
            show.write(sample.text + "\n")
            o.err.print(f"[dim]{show.stats_line(sample.stats)}[/dim]\n")
            if sample.error is not None:
                o.err.print(f"[red]error:[/red] {escape(sample.error)}", soft_wrap=True)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise PromptError("no prompt: give one as an argument or on standard input")
    return sys.stdin.read().removesuffix("\n")


def _decode_all(llm: Any, texts: Sequence[str], params: SamplingParams) -> list[tuple[str, Any]]:
    with Progress(console=o.err, transient=True) as progress:
        task = progress.add_task("decoding", total=len(texts) * params.n * params.max_tokens)
        outputs = llm.generate(texts, params, on_step=lambda step: progress.advance(task, step.committed))
    return list(zip(texts, outputs, strict=True))


def _document(text: str, output: Any) -> dict[str, Any]:
    first, *others = [show.output_document(sample) for sample in output.samples]
    return {"prompt": text} | first | ({"others": others} if others else {})
