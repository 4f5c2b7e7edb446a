"""One call of a proposer: what did the last drafts come to, and what to draft now. Knows nothing of vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bozza.core import NO_DRAFT, Draft, Load, Request, StepStats
from bozza.drafters import Drafter, NgramDrafter
from bozza.drafters.history import SharedHistory
from bozza.drafters.spec import drafter_names
from bozza.drafters.suffix import SuffixDrafter
from bozza.leader import Adaptive, CostModel, Fixed, Leader
from bozza.vllm.options import DEFAULT_COSTS, Options
from bozza.vllm.pace import Pace
from bozza.vllm.rows import Rows, Seen


class Limits(NamedTuple):
    """What the engine allows."""

    drafted: int  # tokens of one draft
    context: int  # tokens of a request
    budget: int  # tokens of a pass
    vocabulary: int  # tokens are below this


@dataclass(slots=True)
class Counts:
    """What came of it since the process began.

    `choices` counts requests and steps by what was drafted for them ("suffix", or "off" for nothing).
    """

    steps: int = 0
    committed: int = 0
    choices: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # spent here
    requests: int = 0  # of which something is remembered now


class _Planned(NamedTuple):
    """What the last call decided."""

    drafts: Mapping[int, Draft]  # by request id; requests that get none too
    begun: float


class Drafting:
    """Drafts for whatever rows it is shown.

    Memory: with `suffix` about 90 bytes per token of each request that was seen in the last calls and 100 kB for the
    request, with `ngram` about 650 per token; a history aside.

    Args:
        options: see there.
        limits: of the engine.
        clock: seconds, monotonic.
        history: that drafter `suffix` shares between requests, if any.
        log: told of each decision of the leader, see `Adaptive`.
        show: told of the counts after each call.
    """

    def __init__(
        self,
        options: Options,
        limits: Limits,
        clock: Callable[[], float],
        history: SharedHistory | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
        show: Callable[[Counts], None] | None = None,
    ) -> None:
        specs = options.specs()
        names = drafter_names(specs)
        most = {name: min(spec.tokens, limits.drafted) for name, spec in zip(names, specs, strict=True)}
        self._drafters: dict[str, Drafter] = {}
        for name, spec in zip(names, specs, strict=True):
            sizes = {f"{size}_n": n for size, n in spec.options.items()}
            self._drafters[name] = (
                SuffixDrafter(name, history) if spec.kind == "suffix" else NgramDrafter(**sizes, name=name)
            )
        self._leader: Leader = Fixed(most)
        self._pace: Pace | None = None
        if options.policy == "adaptive":
            leader = Adaptive(most, (), CostModel.from_document(options.costs or DEFAULT_COSTS), log=log)
            self._leader = leader
            self._pace = Pace(leader, options.clock == "wall", known=options.costs is not None)
        self._limits = limits
        self._clock = clock
        self._show = show
        self._rows = Rows(limits.context)
        self._planned: _Planned | None = None
        self.counts = Counts()

    def propose(self, sampled: Sequence[Sequence[int]], lengths: Any, table: Any) -> list[list[int]]:
        """Drafts for the next step, one per row; empty where nothing pays or nothing was committed.

        Args:
            sampled: per row, the tokens that the step committed.
            lengths: per row, all its tokens, those of the step included.
            table: [rows or more, context] token ids.
        """
        begun = self._clock()
        seen = self._rows.follow(sampled, lengths, np.asarray(table))
        self._learn(seen, begun)
        for request in self._rows.drop():
            for drafter in self._drafters.values():
                drafter.stop(request)
        for entry in seen:
            if entry is not None:
                self.counts.committed += len(entry.tokens)
                for drafter in self._drafters.values():
                    if entry.new:
                        drafter.start(entry.request)
                    else:
                        drafter.observe(entry.request, entry.tokens)
        drafts = self._plan(seen, sum(int(length) for length in lengths[: len(seen)]))
        spent = self._clock() - begun
        self._planned = _Planned(drafts, begun)
        self._count(drafts, spent)
        return [[] if entry is None else list(drafts[entry.request.id].tokens) for entry in seen]

    def _plan(self, seen: Sequence[Seen | None], length: int) -> dict[int, Draft]:
        """What to draft for each request that has just committed something, in chains."""
        requests = [entry.request for entry in seen if entry is not None]
        if not requests:
            return {}
        load = self._load(seen, requests, length)

        def ask(name: str, budgets: Mapping[int, int]) -> dict[int, Draft]:
            asked = [(request, most) for request in requests if (most := self._fit(budgets, load, request)) > 0]
            drafts = self._drafters[name].draft([request for request, _ in asked], [most for _, most in asked])
            words = self._limits.vocabulary
            return {request.id: _within(draft, words) for (request, _), draft in zip(asked, drafts, strict=True)}

        planned = self._leader.plan(requests, load, ask).drafts
        return {
            request.id: _chain(planned.get(request.id, NO_DRAFT)).head(load.room[request.id]) for request in requests
        }

    def _fit(self, budgets: Mapping[int, int], load: Load, request: Request) -> int:
        return min(budgets.get(request.id, 0), load.room[request.id])

    def _load(self, seen: Sequence[Seen | None], requests: Sequence[Request], length: int) -> Load:
        """What the next pass carries. How much of a prompt it reads is the engine's secret: as much as fits, we say."""
        limits = self._limits
        cached = sum(request.cached for request in requests)
        waiting = length - cached - len(requests)  # tokens of rows that are still reading
        reading = len(requests) < len(seen)
        share = (limits.budget // 2 if reading else limits.budget) // len(requests) - 1
        if self._pace is not None and self._pace.quiet:
            share = 0
        # The pass adds a token of its own, so a request with room for n tokens has use for n - 1 guesses.
        room = {
            request.id: max(0, min(limits.drafted, share, limits.context - len(request.tokens) - 1))
            for request in requests
        }
        return Load(len(seen), min(len(requests) + waiting, limits.budget), cached, room, chains=True)

    def _learn(self, seen: Sequence[Seen | None], begun: float) -> None:
        """Tell the leader what its last plan led to."""
        planned, self._planned = self._planned, None
        if planned is None or not planned.drafts:
            return
        came = [entry for entry in seen if entry is not None and entry.request.id in planned.drafts]
        drafted: dict[str, int] = {}
        tested: dict[str, int] = {}
        accepted: dict[str, int] = {}
        for entry in came:
            draft = planned.drafts[entry.request.id]
            if draft.tokens:  # most often there is none, and microseconds count
                right = _agreeing(draft.tokens, entry.tokens)
                _add(drafted, draft.drafters)
                _add(tested, draft.drafters[: right + 1])
                _add(accepted, draft.drafters[:right])
        committed = {entry.request.id: entry.tokens for entry in came}
        nodes = sum(drafted.values())
        cached = sum(entry.request.cached - len(entry.tokens) for entry in came)
        measured = begun - planned.begun if len(came) == len(seen) else None
        spent = 0.0
        if self._pace is not None:
            spent = self._pace.seconds(len(seen), nodes, cached, measured)
        number = sum(map(len, committed.values()))
        outcome = StepStats(
            len(seen), len(seen) + nodes, cached, number, drafted, tested, accepted, {"verify": spent}, {}
        )
        self._leader.learn(outcome, committed)
        for name, guessed in drafted.items():
            self.counts.drafted[name] += guessed
            self.counts.accepted[name] += accepted.get(name, 0)

    def _count(self, drafts: Mapping[int, Draft], spent: float) -> None:
        counts = self.counts
        counts.steps += 1
        for draft in drafts.values():
            counts.choices["+".join(dict.fromkeys(draft.drafters)) if draft.tokens else "off"] += 1
        counts.seconds += spent
        counts.requests = len(self._rows)
        if self._show is not None:
            self._show(counts)


def _add(counts: dict[str, int], names: Sequence[str]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1


def _agreeing(draft: Sequence[int], committed: Sequence[int]) -> int:
    """How many drafted tokens were accepted; the last committed token is the target's own."""
    for place, (guess, token) in enumerate(zip(draft, committed, strict=False)):
        if guess != token:
            return place
    return min(len(draft), len(committed) - 1)


def _within(draft: Draft, vocabulary: int) -> Draft:
    """The part before a token that is none: a prompt may have any number where an image stands.

    The engine would look it up all the same, and on a GPU that ends the server.
    """
    if not draft.tokens or (min(draft.tokens) >= 0 and max(draft.tokens) < vocabulary):
        return draft
    return draft.head(next(place for place, token in enumerate(draft.tokens) if not 0 <= token < vocabulary))


def _chain(draft: Draft) -> Draft:
    return draft if draft.parents == tuple(range(-1, len(draft) - 1)) else draft.trunk()
