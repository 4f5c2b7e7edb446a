"""The very same leader, on traces instead of a model, in simulated time.

Requests come one after the other, to one leader that keeps learning, as in a server. Each is taken up when its prompt
has been read: the first step decodes the first output token. A step takes what the costs say of its pass and of the
drafters that were asked; thinking takes no time.

With `batch` B, B copies of a request run in lock step. They decide alike, so the leader is shown one of them, with
costs in which each token and each cached token counts B times and what is paid once per pass or call counts once. There
is no budget of tokens per pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bozza.core import NO_DRAFT, STAGES, Draft, Load, Request, Stage, StepStats
from bozza.drafters.base import Drafter
from bozza.drafters.spec import MAX_TOKENS
from bozza.errors import ConfigError
from bozza.leader import Adaptive, Fixed, Leader, Off
from bozza.leader.cost import CostModel
from bozza.study.guesses import Guesser, make_drafters, parse_guessers, request_of, standing
from bozza.study.oracle import Oracle, Run, plain_seconds
from bozza.study.traces import Trace

POLICIES = "off, fixed, fixed:N, fixed:NAME=N,..., adaptive or oracle"


def replay(
    traces: Sequence[Trace],
    costs: Mapping[str, Any],
    policy: str,
    *,
    batch: int = 1,
    draft: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Replay traces under a policy.

    Args:
        traces: in the order in which they are served.
        costs: as `CostModel.from_document` reads them; the leader starts from them, and time passes by them.
        policy: "off"; "fixed", each drafter's own k, "fixed:4", as many from all, or "fixed:suffix=8,eagle=4", by name;
            "adaptive"; "oracle", the best that is possible (`bozza.study.oracle`).
        batch: copies of each request.
        draft: see `parse_guessers`.

    Returns:
        {"policy", "batch", "requests", "tokens", "steps", "speedup_mean_throughput", "speedup_total", "choices",
        "by_request"}. The first speedup is the mean of the requests' tokens per second over the same mean without
        drafting, the second all time without drafting over all time. Tokens and steps are of one copy. For "adaptive"
        also "oracle", the two speedups of it, and the share of them that was reached: "share_of_oracle" and
        "share_of_oracle_total"; and "reliability" if the leader reports it.

    Raises:
        ConfigError: policy, drafters or costs are none, or do not go together.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}: use at least 1")
    guessers = parse_guessers(draft, traces)
    true = CostModel.from_document(costs, copies=batch)
    if unknown := [one.name for one in guessers if one.spec is None and one.name not in costs.get("drafters", {})]:
        raise ConfigError(f"the costs say nothing of drafter {unknown[0]}: add it, or name other drafters")
    if true.pass_seconds(1, 1, 0) <= 0.0:
        raise ConfigError("the costs say that a pass takes no time: give verify a base or per_token above 0")
    oracle = Oracle(traces, guessers, true)
    if policy == "oracle":
        return _document(policy, batch, [oracle.run(index) for index in range(len(traces))])
    leader = leader_of(policy, guessers, CostModel.from_document(costs, copies=batch))
    runs = Simulation(traces, guessers, true, leader).run()
    document = _document(policy, batch, runs)
    if policy == "adaptive":
        best = speedups([oracle.run(index) for index in range(len(traces))])
        document["oracle"] = best
        document["share_of_oracle"] = document["speedup_mean_throughput"] / best["speedup_mean_throughput"]
        document["share_of_oracle_total"] = document["speedup_total"] / best["speedup_total"]
    if (reliability := getattr(leader, "reliability", None)) is not None:
        document["reliability"] = reliability()
    return document


def leader_of(policy: str, guessers: Sequence[Guesser], costs: CostModel) -> Leader:
    """The leader that a policy names.

    Args:
        policy: anything that `replay` takes but "oracle".
        guessers: the drafters, in order of trust.
        costs: what an adaptive leader starts from.

    Raises:
        ConfigError: there is no such policy, or it names a drafter that is none of these.
    """
    kind, colon, rest = policy.partition(":")
    most = {guesser.name: guesser.tokens for guesser in guessers}
    if policy == "off":
        return Off()
    if policy == "adaptive":
        return Adaptive(most, [guesser.name for guesser in guessers if guesser.spec is None], costs)
    if kind != "fixed" or (colon and not rest):
        raise ConfigError(f"no policy '{policy}': use {POLICIES}")
    if not colon:
        return Fixed(most)
    if rest.isdecimal():
        return Fixed(dict.fromkeys(most, _tokens(policy, rest, least=1)))
    given: dict[str, int] = {}
    for part in rest.split(","):
        name, _, value = part.partition("=")
        if name not in most or name in given:
            raise ConfigError(f"policy '{policy}': write NAME=N once for some of {', '.join(most)}")
        given[name] = _tokens(policy, value, least=0)
    return Fixed({name: given[name] for name in most if given.get(name)})


def _tokens(policy: str, value: str, least: int) -> int:
    if not value.isdecimal() or not least <= int(value) <= MAX_TOKENS:
        raise ConfigError(f"policy '{policy}': '{value}' is no number of tokens, use {least} to {MAX_TOKENS}")
    return int(value)


class Simulation:
    """Steps as the engine takes them, with a trace in the place of the target.

    Args:
        traces: what is decoded, one request after the other.
        guessers: the drafters, in order of trust.
        costs: how long things take; never changed.
        leader: decides.
    """

    def __init__(self, traces: Sequence[Trace], guessers: Sequence[Guesser], costs: CostModel, leader: Leader) -> None:
        self._traces = traces
        self._drafters = make_drafters(guessers, traces)
        self._costs = costs
        self._leader = leader

    def run(self) -> list[Run]:
        """Decode all traces, once."""
        return [self._decode(trace, index) for index, trace in enumerate(self._traces)]

    def _decode(self, trace: Trace, index: int) -> Run:
        request = request_of(trace, index)
        run = Run(len(trace.output), plain_seconds(trace, self._costs))
        for drafter in self._drafters.values():
            drafter.start(request)
        while request.remaining:
            draft, outcome = self._step(request, trace)
            run.step("+".join(dict.fromkeys(draft.drafters)) or "off", outcome.total_seconds)
        for drafter in self._drafters.values():
            drafter.stop(request)
        return run

    def _step(self, request: Request, trace: Trace) -> tuple[Draft, StepStats]:
        cached, place = request.cached, request.output_len
        load = Load(1, 1, cached, {request.id: request.remaining - 1})
        asking = _Asking(self._drafters, request, self._costs)
        plan = self._leader.plan([request], load, asking.ask)
        draft = plan.drafts.get(request.id, NO_DRAFT).head(load.room[request.id])
        path = standing(draft, trace.output, place)
        tokens = trace.output[place : place + len(path) + 1]
        tested = Counter(
            name for name, parent in zip(draft.drafters, draft.parents, strict=True) if parent in (-1, *path)
        )
        accepted = [draft.drafters[node] for node in path]
        request.commit(tokens, accepted)
        request.stats.expect(plan.expected.get(request.id))
        request.cached = len(request.tokens) - 1
        for drafter in self._drafters.values() if request.remaining else ():
            drafter.observe(request, tokens)
        seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        seconds["draft"] = sum(asking.seconds.values())
        seconds["verify"] = self._costs.pass_seconds(1, 1 + len(draft), cached)
        drafted = Counter(draft.drafters)
        outcome = StepStats(
            1, 1 + len(draft), cached, len(tokens), drafted, tested, Counter(accepted), seconds, asking.seconds
        )
        self._leader.learn(outcome, {request.id: tokens})
        return draft, outcome


class _Asking:
    """The drafters, as the leader of one step may ask them. Each call is charged for the tokens that it drafted."""

    def __init__(self, drafters: Mapping[str, Drafter], request: Request, costs: CostModel) -> None:
        self._drafters = drafters
        self._request = request
        self._costs = costs
        self.seconds: dict[str, float] = {}

    def ask(self, name: str, budgets: Mapping[int, int]) -> dict[int, Draft]:
        """See `bozza.leader.base.Ask`."""
        request = self._request
        budget = min(budgets.get(request.id, 0), request.remaining - 1)
        if budget < 1:
            return {}
        draft = self._drafters[name].draft([request], [budget])[0]
        spent = self._costs.draft_seconds(name, 1, len(draft), len(draft), request.cached)
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        return {request.id: draft}


def speedups(runs: Sequence[Run]) -> dict[str, float]:
    """How many times faster than without drafting: see `replay`."""
    throughput = sum(run.tokens / run.seconds for run in runs)
    plain = sum(run.tokens / run.plain_seconds for run in runs)
    total, plain_total = sum(run.seconds for run in runs), sum(run.plain_seconds for run in runs)
    return {"speedup_mean_throughput": throughput / plain, "speedup_total": plain_total / total}


def _document(policy: str, batch: int, runs: Sequence[Run]) -> dict[str, Any]:
    head = {"policy": policy, "batch": batch, "requests": len(runs), "tokens": sum(run.tokens for run in runs)}
    choices = sum((run.choices for run in runs), Counter[str]())
    return {
        **head,
        "steps": sum(run.steps for run in runs),
        **speedups(runs),
        "choices": dict(choices.most_common()),
        "by_request": [run.document() for run in runs],
    }
