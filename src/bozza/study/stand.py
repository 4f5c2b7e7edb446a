"""Runs steps of given shapes on the real engine, for whoever wants to know what they take."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bozza.core import Draft, Load, Plan, Request, StepStats
from bozza.leader.base import Ask, Leader
from bozza.params import SamplingParams
from bozza.study.fit import DraftTime, LateDraft, PassTime

if TYPE_CHECKING:
    from bozza.engine import Engine

TEXT = 16  # tokens of a text that drafters go on from
ASKED_ROWS = 4  # requests for which drafters are asked beside a single one


class Shapes(NamedTuple):
    """What is run in each round."""

    tokens: tuple[int, ...]  # of passes over one request
    rows: tuple[int, ...]  # requests of passes over one token each
    long: int  # tokens of the prompt that shows what cached tokens cost; read once


class Script:
    """A leader that does as it is told: junk to verify, drafters to ask. What they draft is thrown away.

    Args:
        random_tokens: so many tokens of no meaning.
    """

    def __init__(self, random_tokens: Callable[[int], list[int]]) -> None:
        self.nodes = 0  # of junk, for each request
        self.asks: Mapping[str, int] = {}
        self.asked: dict[str, tuple[int, int]] = {}  # drafter that drafted something -> requests, budget of each
        self.outcome: StepStats | None = None
        self._random_tokens = random_tokens

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """See `Leader.plan`."""
        self.asked = {}
        room = min(load.room.values(), default=0)
        for name, tokens in self.asks.items():
            drafts = ask(name, dict.fromkeys(load.room, min(tokens, room)))
            if any(map(len, drafts.values())):
                self.asked[name] = len(load.room), min(tokens, room)
        junk = Draft.chain(self._random_tokens(self.nodes), "junk")
        return Plan(dict.fromkeys(load.room, junk) if self.nodes else {})

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """See `Leader.learn`."""
        self.outcome = outcome


class Stand:
    """Runs single shapes on an engine.

    Args:
        engine_with: see `calibrate`.
        paid: see `calibrate`.
        text: see `calibrate`.
        seed: decides all that is random.
    """

    def __init__(
        self, engine_with: Callable[[Leader], Engine], paid: Mapping[str, int], text: Sequence[int], seed: int
    ) -> None:
        self._random = random.Random(seed)
        self._script = Script(self._tokens)
        self._engine = engine_with(self._script)
        self._paid = dict(paid)
        self._live: list[Request] = []
        self.context = self._engine.model.context_length
        self._text = list(text)[-min(TEXT, max(1, self.context // 4)) :] if self._paid else []
        vocab = self._engine.model.vocab_size
        # The first and the last ids of many vocabularies are special tokens, which draft models may not have.
        self._ids = range(min(3, vocab - 1), max(vocab // 2, min(4, vocab)))

    def clear(self) -> None:
        """End all requests; their slots are free then."""
        for request in self._live:
            self._engine.abort(request)
        self._live = []

    def run(self, rows: int, tokens: int) -> float:
        """Seconds of a pass over `tokens` tokens of each of `rows` requests."""
        self._fill(rows, tokens)
        return _pass_time(self._step(tokens - 1)).seconds

    def warm_drafters(self) -> float:
        """Let each drafter draft as much as it can; seconds of all of them when they do it again."""
        self.clear()
        self._fill(1, 1, self._text)
        self._step(0, self._paid)
        return sum(call.seconds for call in self._draft_times(self._step(0, self._paid)))

    def round(self, shapes: Shapes, passes: list[PassTime], drafts: list[DraftTime]) -> None:
        """Run each shape once, and the smallest twice; drafters are asked for one token and for all they may draft."""
        visits = [1, *shapes.rows]
        self._random.shuffle(visits)
        for rows in visits:
            asking: list[Mapping[str, int]] = [dict.fromkeys(self._paid, 1), self._paid]
            self._random.shuffle(asking)
            asking = asking if self._paid and rows <= ASKED_ROWS else []
            tokens = [1, *shapes.tokens] if rows == 1 else [1] * max(1, len(asking))
            self._random.shuffle(tokens)
            asks = [*[{}] * (len(tokens) - len(asking)), *asking]
            self._visit(rows, list(zip(tokens, asks, strict=True)), passes, drafts)

    def _visit(
        self,
        rows: int,
        steps: Sequence[tuple[int, Mapping[str, int]]],
        passes: list[PassTime],
        drafts: list[DraftTime],
    ) -> None:
        """Time steps (tokens of each row, what drafters are asked for) of the same requests."""
        self.clear()
        caught_up = False
        for tokens, asks in steps:
            if self._fill(rows, tokens, self._text if any(asks for _, asks in steps) else ()):
                self._step(0)
                caught_up = False
            if asks and not caught_up:  # a drafter reads in its first draft what it has missed
                self._step(0, dict.fromkeys(self._paid, 1))
                caught_up = True
            outcome = self._step(tokens - 1, asks)
            passes.append(_pass_time(outcome))
            drafts += self._draft_times(outcome)

    def read_prompt(self, length: int) -> None:
        """Read a prompt of one request; the drafters do not."""
        self.clear()
        self._add(self._tokens(length))
        self._read()
        self._step(0)

    def passes(self, times: int) -> list[PassTime]:
        """Passes over one further token of the requests that run."""
        return [_pass_time(self._step(0)) for _ in range(times)]

    def late_drafts(self) -> list[LateDraft]:
        """One token of each drafter for a request of which they have read nothing."""
        outcome = self._step(0, dict.fromkeys(self._paid, 1))
        return [LateDraft(call.name, outcome.cached_tokens, call.seconds) for call in self._draft_times(outcome)]

    def _fill(self, rows: int, tokens: int, text: Sequence[int] = ()) -> bool:
        """See to it that `rows` requests run that have room; True when they are new."""
        # A step may be needed before the one that is timed.
        if len(self._live) == rows and all(not r.finished and r.remaining > tokens + 1 for r in self._live):
            return False
        self.clear()
        for _ in range(rows):
            self._add(text or self._tokens(1))  # a prompt of one token costs no pass of its own
        self._read()
        return True

    def _read(self) -> None:
        """Read the prompts of new requests."""
        while any(request.pending > 1 for request in self._live):
            self._step(0)

    def _add(self, prompt: Sequence[int]) -> None:
        params = SamplingParams(max_tokens=self.context, ignore_eos=True)
        self._live.append(self._engine.add(prompt, params, 0))

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)

    def _step(self, nodes: int, asks: Mapping[str, int] | None = None) -> StepStats:
        self._script.nodes, self._script.asks = nodes, asks or {}
        return self._engine.step()

    def _draft_times(self, outcome: StepStats) -> list[DraftTime]:
        return [
            DraftTime(name, rows, depth, outcome.draft_seconds[name] - outcome.read_seconds.get(name, 0.0))
            for name, (rows, depth) in self._script.asked.items()
        ]


def _pass_time(outcome: StepStats) -> PassTime:
    """What of a step the leader can influence by what is verified: all but drafting. Reading belongs to it."""
    drafting = sum(outcome.draft_seconds.values()) - sum(outcome.read_seconds.values())
    return PassTime(outcome.rows, outcome.new_tokens, outcome.cached_tokens, outcome.total_seconds - drafting)
