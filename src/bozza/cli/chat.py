"""`bozza chat`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from bozza.cli import options as o
from bozza.cli import show
from bozza.cli.generate import stream
from bozza.errors import ConfigError, PromptError
from bozza.params import SamplingParams


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation.")] = None,
    model: o.Model = "smollm2",
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    draft: o.Draft = None,
    policy: o.Policy = "adaptive",
    max_tokens: o.MaxTokens = 512,
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
    watch: o.Show = False,
    trace: o.Trace = None,
    as_json: o.Json = False,
) -> None:
    """Talk to a model in its own chat template. An empty line or Ctrl-D ends the conversation."""
    shape = o.structured(json_schema, regex, grammar)
    params = o.sampling(max_tokens, temperature, top_p, top_k, seed, more=more, stop=stop, structured=shape)
    if params.n > 1:
        raise ConfigError(f"a conversation goes on from one answer, n is {params.n}: drop --set n")
    if as_json and message is None:
        raise ConfigError("--json answers one message: give it as an argument")
    if watch and as_json:
        raise ConfigError("--show is to look at and --json to be read by programs: drop one")
    history = history_file or shared_history
    messages = [{"role": "system", "content": system}] if system else []
    with o.decisions(trace, policy) as log:
        on = o.On(dtype, device, quantize, compile, threads)
        llm = o.load_llm(model, draft, policy, on, rule=rule, invariant=invariant, history=history, trace=log)
        if message is None:
            _converse(llm, messages, params, watch)
            return
        messages.append({"role": "user", "content": message})
        if as_json:
            output = llm.chat(messages, params)
            show.print_json({"messages": messages} | show.output_document(output))
        else:
            stream(llm, llm.encode_chat(messages), params, watch)


def _converse(llm: Any, messages: list[dict[str, str]], params: SamplingParams, watch: bool) -> None:
    while line := _ask():
        messages.append({"role": "user", "content": line})
        try:
            answer = stream(llm, llm.encode_chat(messages), params, watch)
            messages.append({"role": "assistant", "content": answer})
        except PromptError as error:  # the conversation has outgrown the context: say so, keep what fits
            messages.pop()
            o.err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def _ask() -> str:
    try:
        return o.err.input("[bold green]>[/bold green] ").strip()
    except EOFError:
        o.err.print()
        return ""
