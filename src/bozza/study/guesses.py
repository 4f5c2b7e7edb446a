"""The drafters of a replay: free ones run for real on the tokens of a trace, recorded ones do as the trace says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.base import Drafter
from bozza.drafters.ngram import NgramDrafter
from bozza.drafters.spec import DraftSpec, drafter_names, parse_spec
from bozza.drafters.suffix import SuffixDrafter
from bozza.errors import ConfigError
from bozza.params import SamplingParams
from bozza.study.traces import Trace

FREE = ("ngram", "suffix")  # these need nothing but tokens


@dataclass(frozen=True, slots=True)
class Guesser:
    """A drafter that takes part. Without a `spec` it is a recorded one."""

    name: str
    tokens: int  # the most it drafts at once, and what policy "fixed" drafts with it
    spec: DraftSpec | None = None


def parse_guessers(texts: Sequence[str] | None, traces: Sequence[Trace]) -> list[Guesser]:
    """Drafters as a user names them: `suffix`, `ngram:max=4,k=10`, `recorded:NAME`, `recorded:NAME,k=4`.

    Without any, `suffix` and all that were recorded; a recorded one of the same name gives way to it.

    Raises:
        ConfigError: there is no such drafter, an option is out of range, or two have the same name.
    """
    recorded = dict.fromkeys(name for trace in traces for name in trace.accept)
    if not texts:
        texts = ["suffix", *(f"recorded:{name}" for name in recorded if name != "suffix")]
    specs = {text: _free(text) for text in texts if not text.startswith("recorded:")}
    names = dict(zip(specs, drafter_names(list(specs.values())), strict=True))
    guessers = [
        Guesser(names[text], specs[text].tokens, specs[text]) if text in specs else _recorded(text, traces, recorded)
        for text in texts
    ]
    for place, guesser in enumerate(guessers):
        if guesser.name in {other.name for other in guessers[:place]}:
            raise ConfigError(f"two drafters are called {guesser.name}: drop one of them")
    return guessers


def _free(text: str) -> DraftSpec:
    kind = text.strip().partition(":")[0]
    if kind not in FREE:
        raise ConfigError(
            f"draft '{text}' cannot run on a trace: use {', '.join(FREE)}, or record it with 'bozza trace' and replay "
            "it as recorded:NAME"
        )
    return parse_spec(text)


def _recorded(text: str, traces: Sequence[Trace], recorded: dict[str, None]) -> Guesser:
    name, *options = text.strip().removeprefix("recorded:").split(",")
    if name not in recorded:
        raise ConfigError(f"draft '{text}': the traces have {', '.join(recorded) or 'no recorded drafters'}")
    if lacking := [place for place, trace in enumerate(traces, 1) if name not in trace.accept]:
        raise ConfigError(f"draft '{text}': trace {lacking[0]} of the file says nothing of {name}")
    tokens = max(1, *(trace.cap[name] for trace in traces))
    for option in options:
        key, _, value = option.partition("=")
        if key != "k" or not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"draft '{text}': '{option}' is no option of a recorded drafter, write k=N")
        tokens = int(value)
    return Guesser(name, tokens)


def make_drafters(guessers: Sequence[Guesser], traces: Sequence[Trace]) -> dict[str, Drafter]:
    """Fresh drafters by name, for requests made by `request_of`."""
    return {guesser.name: _make(guesser, index, traces) for index, guesser in enumerate(guessers)}


def _make(guesser: Guesser, index: int, traces: Sequence[Trace]) -> Drafter:
    if guesser.spec is None:
        return Recorded(guesser.name, traces, wrong=-1 - index)
    if guesser.spec.kind == "suffix":
        return SuffixDrafter(guesser.name)
    return NgramDrafter(**{f"{size}_n": n for size, n in guesser.spec.options.items()}, name=guesser.name)


def request_of(trace: Trace, index: int) -> Request:
    """The request that a trace is of, as it is when its prompt has been read but for the last token.

    Args:
        trace: the trace.
        index: its place among the traces that the drafters were made with.
    """
    size, more = len(trace.prompt), len(trace.output)
    params = SamplingParams(max_tokens=more)
    return Request(index, list(trace.prompt), size, params, 0, frozenset(), size + more, slot=0, cached=size - 1)


class Recorded:
    """Drafts chains that are right for as long as the trace says.

    Args:
        name: whose record it replays.
        traces: by request id.
        wrong: a token that no trace holds, and that no other drafter of the replay uses, so that wrong guesses never
            agree with each other.
    """

    def __init__(self, name: str, traces: Sequence[Trace], wrong: int = -1) -> None:
        self.name = name
        self._traces = traces
        self._wrong = wrong

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`. No chain is longer than the record says."""
        return [
            self._chain(self._traces[request.id], request.output_len, budget)
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""

    def _chain(self, trace: Trace, place: int, budget: int) -> Draft:
        size = min(budget, trace.reach(self.name, place))
        if size < 1:
            return NO_DRAFT
        right = min(size, trace.right(self.name, place))
        tokens = (*trace.output[place : place + right], *(self._wrong,) * (size - right))
        chances = trace.sure(self.name, place, size)
        return Draft(tokens, tuple(range(-1, size - 1)), (self.name,) * size, confidences=chances)


def standing(draft: Draft, output: Sequence[int], place: int) -> tuple[int, ...]:
    """The nodes of the longest path that agrees with the output from a place on, from the root down."""
    depths = {-1: 0}
    deepest = -1
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        depth = depths.get(parent)
        if depth is None or place + depth >= len(output) or output[place + depth] != token:
            continue
        depths[node] = depth + 1
        if depth + 1 > depths[deepest]:
            deepest = node
    path: list[int] = []
    while deepest >= 0:
        path.append(deepest)
        deepest = draft.parents[deepest]
    return tuple(reversed(path))
