"""The policy `adaptive`: at each step and for each request, draft and verify what pays.

1. Drafters that cost next to nothing draft for everybody, and the chance of each of their nodes is estimated.
2. Each paid drafter is weighed by what it is expected to add to that, against what its time is worth; it drafts for the
   requests for which it pays. One that does not pay is tried now and then, for a small share of the time.
3. Of all drafts together the nodes that are worth the time of the pass are verified. None at all is plain decoding.

What a step then commits and costs is compared with all that was drafted, verified or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bozza.core import Draft, Load, Plan, Request, StepStats
from bozza.drafters.merge import merge
from bozza.leader.base import Ask
from bozza.leader.beliefs import LEVELS, Beliefs, Offer, Record
from bozza.leader.choice import Bid, Prices, bid, loss, pick, prices
from bozza.leader.cost import Asked, CostModel
from bozza.leader.gains import Gains
from bozza.leader.ledger import Ledger
from bozza.leader.rates import Rates

LOOK = 0.5  # nodes below this part of a node's price are not looked at
PROBE = 0.01  # share of all time that may go to drafters that do not seem to pay
AHEAD = 4  # nodes of a paid draft, for the price of one
PROBED = 4  # tokens of such a try
FEW = 16  # tokens that a drafter reads with the first of its own passes, at no further cost
SPREAD = 64  # steps, at most, by which reading what a drafter has missed has to pay
STICK = 0.01  # of a plain step's worth: how much better a drafter must do to be taken up, or worse to be dropped
SHARED = 0.4  # part of what free drafts have right that a paid one is taken to have too
OVERLAP = 0.5  # and of a second paid drafter's gain that the first has
OPEN = 3  # drafts of one drafter that are followed further after their step


@dataclass(slots=True)
class _State:
    """What is known of one request."""

    records: dict[str, Record] = field(default_factory=dict)
    fresh: list[Offer] = field(default_factory=list)  # drafts of this step
    open: list[Offer] = field(default_factory=list)  # older ones that hold so far
    free: float = 0.0  # chance of the free drafts' first token
    chances: list[float] = field(default_factory=list)  # of all nodes of free drafts
    kept: set[int] = field(default_factory=set)  # nodes of free drafts that pay by themselves
    asked: dict[str, int] = field(default_factory=dict)  # paid drafters and what they were asked for
    used: dict[str, int] = field(default_factory=dict)  # paid drafter -> step of its last draft
    read: dict[str, int] = field(default_factory=dict)  # and how many tokens it had read then

    def record(self, name: str) -> Record:
        """How a drafter fared, empty at first."""
        if (known := self.records.get(name)) is None:
            known = self.records[name] = Record()
        return known


class Adaptive:
    """See the module.

    Args:
        tokens: drafter name -> the most that it may draft at once, in order of trust.
        paid: the drafters that take more than microseconds.
        costs: of this machine; follows what is served.
        log: told of each decision and its outcome, once per step and request.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        paid: Collection[str],
        costs: CostModel,
        *,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._free = {name: most for name, most in tokens.items() if name not in paid}
        self._paid = {name: most for name, most in tokens.items() if name in paid}
        self.costs = costs
        self._rates = Rates(LEVELS)
        self._gains = Gains()
        self.ledger = Ledger(log)
        self._states: dict[int, _State] = {}
        self._step = 0
        self._calls: dict[str, Asked] = {}
        self._hired: set[str] = set()
        self._purse = 0.0  # seconds that may be spent on tries
        self._wanted = 0.0  # that the dearest try of this step would have taken

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        """See `Leader.plan`."""
        self._step += 1
        self._calls, self._wanted = {}, 0.0
        able = [request for request in requests if load.room[request.id] > 0]
        self._states = {request.id: self._states.get(request.id) or _State() for request in requests}
        before = prices(self.costs, load, self.ledger.rate(self.costs, requests), self.ledger.nodes)
        if not able:
            return self.ledger.planned(self._step, requests, load, {}, self.costs, before)
        beliefs = {request.id: Beliefs(self._rates, LOOK * before.node) for request in able}
        self._ask_free(able, ask, beliefs)
        rate = self.ledger.rate(self.costs, requests)
        free = pick(self.costs, load, rate, beliefs)
        for request in able:
            self._states[request.id].kept = set(free.get(request.id, ()))
        price = prices(self.costs, load, rate, AHEAD * len(able), sum(map(len, free.values())))
        whole = self._ask_paid(able, load, ask, beliefs, price)
        picked = free
        if any(self._states[request.id].asked for request in able):
            picked = pick(self.costs, load, rate, {id_: belief for id_, belief in beliefs.items() if id_ not in whole})
        drafts = {id_: beliefs[id_].draft(nodes) for id_, nodes in picked.items()} | whole
        return self.ledger.planned(self._step, requests, load, drafts, self.costs, price)

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        """See `Leader.learn`."""
        self.costs.learn(outcome, self._calls)
        # What is wanted grows with the text, so a little more may be saved.
        self._purse = min(self._purse + PROBE * outcome.total_seconds, max(outcome.total_seconds, 1.1 * self._wanted))
        for id_, state in self._states.items():
            if (tokens := committed.get(id_)) is not None:
                self._compare(state, tokens)
            state.fresh, state.asked = [], {}
        self.ledger.settle(outcome, committed, self.costs)

    def reliability(self) -> list[dict[str, float]]:
        """Predicted against observed chances of the nodes that were verified; see `Ledger.reliability`."""
        return self.ledger.reliability()

    def _ask_free(self, able: Sequence[Request], ask: Ask, beliefs: Mapping[int, Beliefs]) -> None:
        """Let the free drafters draft, as much as might pay, and estimate what they give."""
        for name, most in self._free.items():
            budgets = {request.id: min(most, self.ledger.reach(request.id)) for request in able}
            for id_, draft in ask(name, budgets).items():
                self._take(id_, name, draft, beliefs[id_])
        for id_, belief in beliefs.items():
            belief.judge()
            self._states[id_].free = belief.first()
            self._states[id_].chances = belief.chances
        self.ledger.sort({id_: self._states[id_].free for id_ in beliefs})

    def _take(self, id_: int, name: str, draft: Draft, belief: Beliefs) -> None:
        """Note a draft."""
        state = self._states[id_]
        record = state.record(name)
        if not len(draft):
            record.streak = 0
            return
        offer = Offer(name, draft, record.bins(self._step), luck=record.luck)
        belief.add(offer)
        state.fresh.append(offer)

    def _ask_paid(
        self, able: Sequence[Request], load: Load, ask: Ask, beliefs: Mapping[int, Beliefs], price: Prices
    ) -> dict[int, Draft]:
        """Let paid drafters draft where that pays. Returns the drafts that must be verified whole: drawn ones."""
        if not self._paid:
            return {}
        drawn: dict[int, list[Draft]] = {}
        before: dict[int, list[int]] = {}
        cached = {request.id: request.cached for request in able}
        for name, budgets in self._hire(able, load, price, cached).items():
            tokens, read = sum(budgets.values()), sum(cached[id_] for id_ in budgets)
            unread = sum(self._unread(name, request) for request in able if request.id in budgets)
            self._calls[name] = Asked(len(budgets), max(budgets.values()), tokens, read, unread)
            for id_, draft in ask(name, budgets).items():
                state = self._states[id_]
                state.asked[name] = budgets[id_]
                state.used[name], state.read[name] = self._step, cached[id_]
                if any(law is not None for law in draft.laws):
                    if id_ not in before:  # what is verified beside drawn tokens must not depend on them
                        before[id_] = sorted(state.kept)
                    drawn.setdefault(id_, []).append(draft)
                self._take(id_, name, draft, beliefs[id_])
        for id_, belief in beliefs.items():
            if id_ not in before and self._states[id_].asked:
                belief.judge()
        return {id_: merge([beliefs[id_].draft(before[id_]), *drafts], load.room[id_]) for id_, drafts in drawn.items()}

    def _hire(
        self, able: Sequence[Request], load: Load, price: Prices, cached: Mapping[int, int]
    ) -> dict[str, dict[int, int]]:
        """Whom to pay, and for how much: drafter -> request id -> tokens."""
        margin = STICK * price.rate * self.costs.pass_seconds(load.rows, load.tokens, load.cached)
        hired: dict[str, dict[int, int]] = {}
        left = 1.0
        for name, offer in sorted(self._bids(able, load, price, cached).items(), key=lambda item: -item[1].worth):
            needed = -margin if name in self._hired else margin
            if offer.budgets and offer.worth + (left - 1.0) * offer.gain > needed:
                hired[name] = dict(offer.budgets)
                left *= OVERLAP
            self.ledger.weigh(name, offer)
        self._hired = set(hired)
        for name in self._paid:
            if name not in hired and (tried := self._try(name, able, load, cached)):
                hired[name] = tried
        return hired

    def _bids(self, able: Sequence[Request], load: Load, price: Prices, cached: Mapping[int, int]) -> dict[str, Bid]:
        """What each drafter is worth; what it has missed of a request has to pay within the next steps."""
        bids = {}
        lost = {request.id: loss(self._states[request.id].chances, SHARED, price.node) for request in able}
        for name, most in self._paid.items():
            curves = {}
            for request in able:
                state = self._states[request.id]
                record = state.record(name)
                curves[request.id] = self._gains.curve(
                    name, min(most, load.room[request.id]), state.free, record.bins(self._step), record.luck
                )
            losses = {request.id: lost[request.id] + price.rate * self._reading(name, request) for request in able}
            bids[name] = bid(self.costs, name, curves, cached, price, losses)
        return bids

    def _try(self, name: str, able: Sequence[Request], load: Load, cached: Mapping[int, int]) -> dict[int, int]:
        """A request for which a drafter that does not seem to pay is asked all the same, if that can be afforded."""
        longest = min(able, key=lambda request: self._states[request.id].used.get(name, 0))
        tokens = min(PROBED, self._paid[name], load.room[longest.id])
        seconds = self.costs.draft_seconds(name, 1, tokens, tokens, cached[longest.id], self._unread(name, longest))
        if seconds > self._purse:
            self._wanted = max(self._wanted, seconds)
            return {}
        self._purse -= seconds
        return {longest.id: tokens}

    def _unread(self, name: str, request: Request) -> int:
        return max(0, request.cached - self._states[request.id].read.get(name, 0) - FEW)

    def _reading(self, name: str, request: Request) -> float:
        """Seconds per step in which a drafter would read what it has missed of a request, over the next steps."""
        return self.costs.reading_seconds(name, self._unread(name, request)) / max(1, min(request.remaining, SPREAD))

    def _compare(self, state: _State, tokens: Sequence[int]) -> None:
        """Learn from what a request committed, about all that was drafted for it."""
        for offer in state.fresh:
            if (asked := state.asked.get(offer.name)) is not None:
                self._gains.learn(offer, asked, tokens, state.free)
        for name, asked in state.asked.items():
            if all(offer.name != name for offer in state.fresh):  # it had nothing to say
                nothing = Offer(name, Draft(), state.records[name].bins(self._step))
                self._gains.learn(nothing, asked, tokens, state.free)
        still: list[Offer] = []
        followed: dict[str, int] = {}
        for offer in state.open:
            right, missed = offer.follow(tokens, self._rates)
            if right == len(tokens) and not missed:
                still.append(offer)
                followed[offer.name] = followed.get(offer.name, 0) + 1
        for offer in state.fresh:
            right, missed = offer.follow(tokens, self._rates)
            state.records[offer.name].add(right, missed, self._step, offer.told, offer.came)
            if right == len(tokens) and offer.below(offer.at) and followed.get(offer.name, 0) < OPEN:
                still.append(offer)
        state.open = still
