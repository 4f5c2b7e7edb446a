"""Records traces from a real model: plain decoding, in which every drafter says at every place what it would draft."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bozza.core import Draft, Load, Plan, Request, StepStats
from bozza.drafters.spec import drafter_names, parse_spec
from bozza.errors import ConfigError, PromptError
from bozza.leader.base import Ask
from bozza.params import SamplingParams
from bozza.study.traces import Trace, read_line

if TYPE_CHECKING:
    from bozza.bench import Case
    from bozza.llm import LLM

DIGITS = 3  # of a confidence
BEGINNINGS = ('{"workload":', '{"prompt":')  # of a line


class Recorder:
    """A leader that asks every drafter at every step and verifies nothing.

    Of a tree its trunk is kept, the chain of first children. Nothing is drafted before a prompt has been read, so of a
    prompt of several tokens a_0 is 0.

    Args:
        tokens: drafter name -> tokens to draft, which is also the cap of the trace.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._trunks: dict[int, dict[tuple[str, int], Draft]] = {}  # request id -> (drafter, place) -> what it drafted

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """See `Leader.plan`."""
        places = {request.id: request.output_len for request in requests}
        for name, tokens in self._tokens.items():
            for id_, draft in ask(name, dict.fromkeys(load.room, tokens)).items():
                self._trunks.setdefault(id_, {})[name, places[id_]] = draft.trunk()
        return Plan()

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """See `Leader.learn`."""

    def trace(self, request: Request, workload: str | None = None) -> Trace:
        """The trace of a request that has ended. What was kept of it is dropped."""
        trunks = self._trunks.pop(request.id, {})
        output = tuple(request.output)
        accept: dict[str, tuple[int, ...]] = {}
        confidence: dict[str, tuple[tuple[float, ...], ...]] = {}
        for name in self._tokens:
            drafts = [trunks.get((name, place), Draft()) for place in range(len(output))]
            accept[name] = tuple(_agreeing(draft.tokens, output[place:]) for place, draft in enumerate(drafts))
            chances = tuple(tuple(round(chance, DIGITS) for chance in draft.confidences) for draft in drafts)
            if any(chances):
                confidence[name] = chances
        prompt = tuple(request.tokens[: request.prompt_len])
        return Trace(prompt, output, accept, dict(self._tokens), workload, confidence)


def _agreeing(tokens: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens agree before the first that does not."""
    agreeing = 0
    for token, true in zip(tokens, output, strict=False):
        if token != true:
            break
        agreeing += 1
    return agreeing


def check_recorded(draft: Sequence[str]) -> None:
    """Refuse drafters of which there is nothing to record.

    Raises:
        ConfigError: there are none, or one needs more than a prompt.
    """
    if not draft:
        raise ConfigError("a trace is of drafters: name some, as in --draft suffix --draft eagle:width=1")
    for text in draft:
        if (kind := parse_spec(text).kind) in ("grammar", "prediction"):
            raise ConfigError(f"drafter {kind} has nothing to say about plain prompts: drop it")


def record(
    llm: LLM,
    cases: Sequence[Case],
    params: SamplingParams,
    path: Path,
    on_trace: Callable[[], None] = lambda: None,
) -> int:
    """Add a trace for each prompt that the file does not have yet; each line is on disk before the next is begun.

    Args:
        llm: whose drafters are recorded, at their `k`.
        cases: the prompts.
        params: of every output; sampled ones need a seed.
        path: the file. One that exists goes on: a line that was cut off is dropped, and its first trace is made again
            to see that it is of this model and these options.
        on_trace: called after each prompt, those that were skipped included.

    Returns:
        How many traces were added.

    Raises:
        ConfigError: the file is of another model or of other options, or cannot be written.
        PromptError: the file is none of traces.
    """
    check_recorded(llm.draft)
    specs = [parse_spec(text) for text in llm.draft]
    recorder = Recorder({name: spec.tokens for name, spec in zip(drafter_names(specs), specs, strict=True)})
    led = llm.with_leader(recorder)
    known = _known(path)
    if known:
        _check_same(known[0], led, recorder, params, path)
    done = {trace.prompt for trace in known}
    added = 0
    for case in cases:
        if tuple(case.prompt) not in done:
            done.add(tuple(case.prompt))
            _append(path, _decode(led, recorder, case.prompt, params, case.workload).line())
            added += 1
        on_trace()
    return added


def _decode(llm: LLM, recorder: Recorder, prompt: Sequence[int], params: SamplingParams, workload: str | None) -> Trace:
    request = llm.engine.add(prompt, params, params.seed or 0)
    while not request.finished:
        llm.engine.step()
    return recorder.trace(request, workload)


def _check_same(first: Trace, llm: LLM, recorder: Recorder, params: SamplingParams, path: Path) -> None:
    """Confidences are not compared: they may differ in the last digit."""
    other = f"{path} holds traces of another model or other options: name another file"
    try:
        again = _decode(llm, recorder, first.prompt, params, first.workload)
    except PromptError as problem:
        raise ConfigError(other) from problem
    if (again.output, again.accept, again.cap) != (first.output, first.accept, first.cap):
        raise ConfigError(other)


def _known(path: Path) -> list[Trace]:
    """The traces in a file, if there is one. What is left of a line that was cut off is removed."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        *lines, rest = text.split("\n")
        traces = [read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if rest:
            if not any(rest.startswith(begin[: len(rest)]) for begin in BEGINNINGS):
                raise PromptError(f"{path} does not end with a trace: name another file")
            fresh = path.with_name(path.name + ".new")
            fresh.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            fresh.replace(path)
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} cannot be read or written ({problem}): name another file") from problem
    return traces


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written ({problem.strerror}): name another file") from problem
