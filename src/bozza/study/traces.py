"""Traces: what a model wrote, and how far each drafter would have been right at every place of it. A line of JSON each.

    {"prompt": [ids], "output": [ids], "accept": {NAME: [a_0, a_1, ...]}, "cap": {NAME: n}}

a_t is how many tokens of a chain of drafter NAME would have stood, had it been drafted when t output tokens were
committed. It counts up to the cap: there it means "at least so many". Optional beside "cap": "workload", a text, and
"confidence": {NAME: [[c_1, c_2, ...], ...]}, what the drafter itself said at each place of its tokens' chances to
stand, the whole way down included. A drafter with such lists drafts no further than they go: it would have stopped
there. One without always drafts what it is asked for, up to the cap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bozza.errors import PromptError

KEYS = ("prompt", "output", "accept", "cap", "workload", "confidence")


@dataclass(frozen=True, slots=True)
class Trace:
    """One generation. Lists of a drafter have an entry for each output token, and may have one more."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    accept: Mapping[str, tuple[int, ...]]
    cap: Mapping[str, int]  # of every drafter in `accept`
    workload: str | None = None
    confidence: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    def right(self, name: str, place: int) -> int:
        """How many tokens of a chain of a drafter stand at a place, within the output."""
        return min(self.accept[name][place], len(self.output) - place)

    def reach(self, name: str, place: int) -> int:
        """How many tokens a drafter would have drafted at a place, had it been asked for as many as it may."""
        cap, said = self.cap[name], self.confidence.get(name)
        return cap if said is None else min(cap, max(len(said[place]), self.accept[name][place]))

    def sure(self, name: str, place: int, tokens: int) -> tuple[float, ...]:
        """What the drafter said of the first `tokens` tokens of its chain; () if it said nothing.

        Beyond the last number it said, that number: the chance of a longer path is no greater.
        """
        said = self.confidence.get(name, ())
        if not said or not said[place]:
            return ()
        return (said[place] + said[place][-1:] * (tokens - len(said[place])))[:tokens]

    def line(self) -> str:
        """As it stands in a file, without the line's end."""
        record: dict[str, Any] = {"workload": self.workload} if self.workload is not None else {}
        record |= {"prompt": self.prompt, "output": self.output, "accept": self.accept, "cap": self.cap}
        if self.confidence:
            record["confidence"] = self.confidence
        return json.dumps(record, separators=(",", ":"))


def load_traces(path: Path, caps: Mapping[str, int] | None = None) -> list[Trace]:
    """Read a file of traces.

    Args:
        path: the file.
        caps: of drafters for which a line names none. Without either, the largest number of the line is the cap.

    Raises:
        PromptError: it cannot be read, holds no traces, or a line is not one; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise PromptError(f"cannot read {path}: {problem}") from problem
    traces = [read_line(line, f"{path}:{number}", caps) for number, line in enumerate(lines, 1) if line.strip()]
    if not traces:
        raise PromptError(f"{path} holds no traces")
    return traces


def read_line(line: str, place: str, caps: Mapping[str, int] | None = None) -> Trace:
    """The trace in a line.

    Args:
        line: JSON.
        place: what to call the line in errors.
        caps: see `load_traces`.

    Raises:
        PromptError: it is not one.
    """
    try:
        record = json.loads(line)
    except ValueError as problem:
        raise PromptError(f"{place} is not JSON: {problem}") from problem
    if not isinstance(record, dict) or not {"prompt", "output", "accept"} <= set(record):
        raise PromptError(f'{place}: write {{"prompt": [ids], "output": [ids], "accept": {{NAME: [numbers]}}}}')
    if unknown := sorted(set(record) - set(KEYS)):
        raise PromptError(f"{place}: unknown key {unknown[0]!r}, use {', '.join(KEYS)}")
    workload = record.get("workload")
    if workload is not None and not isinstance(workload, str):
        raise PromptError(f"{place}: the workload is a text, this is {workload!r}")
    prompt, output = (_numbers(record[key], f"{place}: {key}") for key in ("prompt", "output"))
    if not prompt or not output:
        raise PromptError(f"{place}: the {'output' if prompt else 'prompt'} is empty, give at least one token")
    accept = {
        name: _per_place(_numbers(entry, f"{place}: accept.{name}"), output, f"{place}: accept.{name}")
        for name, entry in _names(record["accept"], f"{place}: accept").items()
    }
    cap = _caps(record.get("cap", {}), accept, caps or {}, place)
    return Trace(prompt, output, accept, cap, workload, _confidences(record.get("confidence", {}), accept, place))


def _names(entry: Any, place: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise PromptError(f"{place} is an object with the names of drafters, this is {str(entry)[:40]!r}")
    return entry


def _numbers(entry: Any, place: str) -> tuple[int, ...]:
    if not isinstance(entry, list):
        raise PromptError(f"{place} is a list of whole numbers, this is {str(entry)[:40]!r}")
    if wrong := [number for number in entry if type(number) is not int or number < 0]:
        raise PromptError(f"{place} holds {wrong[0]!r}: use whole numbers of at least 0")
    return tuple(entry)


def _per_place(entry: tuple[Any, ...], output: tuple[int, ...], place: str) -> tuple[Any, ...]:
    if len(entry) not in (len(output), len(output) + 1):
        raise PromptError(f"{place} has {len(entry)} entries for {len(output)} output tokens: give one for each")
    return entry


def _caps(entry: Any, accept: Mapping[str, tuple[int, ...]], caps: Mapping[str, int], place: str) -> dict[str, int]:
    given = _names(entry, f"{place}: cap")
    if unknown := sorted(set(given) - set(accept)):
        raise PromptError(f"{place}: cap.{unknown[0]} is of a drafter that accept does not have")
    found: dict[str, int] = {}
    for name, numbers in accept.items():
        most = max(numbers)
        found[name] = cap = given.get(name, caps.get(name, most))
        if type(cap) is not int or cap < 0:
            raise PromptError(f"{place}: cap.{name} is {cap!r}, use a whole number of at least 0")
        if most > cap:
            raise PromptError(f"{place}: accept.{name} holds {most}, which is more than its cap of {cap}")
    return found


def _confidences(
    entry: Any, accept: Mapping[str, tuple[int, ...]], place: str
) -> dict[str, tuple[tuple[float, ...], ...]]:
    found = {}
    for name, places in _names(entry, f"{place}: confidence").items():
        where = f"{place}: confidence.{name}"
        if name not in accept:
            raise PromptError(f"{where} is of a drafter that accept does not have")
        if not isinstance(places, list) or not all(isinstance(chances, list) for chances in places):
            raise PromptError(f"{where} is a list of lists of numbers, one for each output token")
        for chance in (chance for chances in places for chance in chances):
            if type(chance) not in (int, float) or not 0.0 <= chance <= 1.0:
                raise PromptError(f"{where} holds {chance!r}: use numbers from 0 to 1")
        if len(places) != len(accept[name]):
            raise PromptError(f"{where} has {len(places)} entries, accept.{name} has {len(accept[name])}")
        found[name] = tuple(tuple(chances) for chances in places)
    return found
