"""Keeps the books of the adaptive leader: the going rate, what was expected and what came of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bozza.core import NO_DRAFT, Draft, Load, Plan, Request, StepStats
from bozza.leader.choice import Bid, Prices
from bozza.leader.cost import CostModel

HORIZON = 32.0  # steps that the going rate looks back
COPYING = (0.3, 0.7)  # edges of the chance of the free drafts' first token, between which rates are told apart
NEAR = 8.0  # steps that the number of verified nodes looks back
ROOM = 4  # a free drafter may draft so many tokens more than twice of what is verified
BINS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of predicted chances


class Ledger:
    """One for each leader.

    Args:
        log: see `Adaptive`.
    """

    def __init__(self, log: Callable[[dict[str, Any]], None] | None) -> None:
        self._log = log
        # In plain steps: what was committed per request and step, and the time it took. A token saved is worth the time
        # of those that come next, and text that is copied goes on at another rate than text that is not.
        self._earned, self._spent = [1.0] * (len(COPYING) + 1), [1.0] * (len(COPYING) + 1)
        self._copying: dict[int, int] = {}  # request id -> which of these rates is its own
        self.nodes = 4.0  # verified per step, of late
        self._depths: dict[int, float] = {}  # request id -> nodes verified per step, of late
        self._plan = Plan()
        self._load = Load(0, 0, 0, {})
        self._records: list[dict[str, Any]] = []
        self._weighed: list[tuple[str, Bid]] = []
        self._bins = [[0.0, 0.0, 0.0] for _ in range(len(BINS) + 1)]  # nodes, sum of chances, nodes that stood

    def sort(self, free: Mapping[int, float]) -> None:
        """Note the chance of the free drafts' first token, by request id."""
        self._copying = {id_: bisect_right(COPYING, chance) for id_, chance in free.items()}

    def rate(self, costs: CostModel, requests: Sequence[Request]) -> float:
        """The going rate of requests past their prompt, in tokens per second; no less than plain decoding's."""
        plain = costs.pass_seconds(len(requests), len(requests), sum(request.cached for request in requests))
        return sum(self._speedup(request.id) for request in requests) / max(plain, 1e-9)

    def _speedup(self, id_: int) -> float:
        place = self._copying.get(id_, 0)
        return max(self._earned[place] / self._spent[place], 1.0)

    def reach(self, id_: int) -> int:
        """How many tokens a free drafter may draft for a request: more than will be verified, if that was little."""
        return round(2.0 * self._depths.get(id_, 8.0)) + ROOM

    def weigh(self, name: str, offer: Bid) -> None:
        """A drafter was considered."""
        if self._log is not None:
            self._weighed.append((name, offer))

    def planned(
        self,
        step: int,
        requests: Sequence[Request],
        load: Load,
        drafts: Mapping[int, Draft],
        costs: CostModel,
        price: Prices,
    ) -> Plan:
        """Note a decision; returns the plan."""
        expected = {request.id: 1.0 for request in requests}
        for id_, draft in drafts.items():
            expected[id_] += sum(draft.confidences)
        self._plan, self._load = Plan(drafts, expected), load
        self._records = []  # of a step that was interrupted
        if self._log is not None:
            self._note(step, requests, load, costs, price)
        self._weighed = []
        return self._plan

    def settle(self, outcome: StepStats, committed: Mapping[int, Sequence[int]], costs: CostModel) -> None:
        """What came of it."""
        if committed:
            self._settle_rate(outcome, committed, costs)
        for id_, tokens in committed.items():
            draft = self._plan.drafts.get(id_, NO_DRAFT)
            depth = self._depths.get(id_, 8.0)
            self._depths[id_] = depth + (len(draft) - depth) / NEAR
            if len(draft):
                self._settle_chances(draft, tokens)
        self._depths = {id_: self._depths[id_] for id_ in committed}
        for record in self._records:
            tokens = tuple(committed.get(record["request"], ()))
            paths = self._plan.drafts.get(record["request"], NO_DRAFT).paths()
            came = {
                "committed": len(tokens),
                "drafted": len(paths),
                "accepted": sum(path == tokens[: len(path)] for path in paths),
            }
            self._tell(record | came | {"seconds_taken": outcome.total_seconds})
        self._records = []

    def reliability(self) -> list[dict[str, float]]:
        """Rows of {"predicted", "observed", "nodes"}: means over verified nodes of about the same predicted chance."""
        return [
            {"predicted": chances / nodes, "observed": stood / nodes, "nodes": nodes}
            for nodes, chances, stood in self._bins
            if nodes
        ]

    def _settle_rate(self, outcome: StepStats, committed: Mapping[int, Sequence[int]], costs: CostModel) -> None:
        load = self._load
        drafted = sum(outcome.drafted.values())
        plain = costs.pass_seconds(load.rows, load.tokens, load.cached)
        if not load.rows or plain <= 0.0:
            return
        # The time is what the step should take: one that stalled says nothing about the rate.
        taken = costs.pass_seconds(load.rows, load.tokens + drafted, load.cached)
        taken += sum(outcome.draft_seconds.values()) - sum(outcome.read_seconds.values())
        keep, share = 1.0 - 1.0 / HORIZON / len(committed), 1.0 / len(committed)
        for id_, tokens in committed.items():
            place = self._copying.get(id_, 0)
            self._earned[place] = keep * self._earned[place] + share * len(tokens)
            self._spent[place] = keep * self._spent[place] + share * taken / plain
        self.nodes += (drafted - self.nodes) / NEAR

    def _settle_chances(self, draft: Draft, tokens: Sequence[int]) -> None:
        path = tuple(tokens)
        for walked, chance in zip(draft.paths(), draft.confidences, strict=False):  # drawn drafts have no chances
            if chance <= 0.0 or (len(walked) > len(path) and walked[: len(path)] == path):
                continue  # a drawn token beside others, or the request ended before it came to this
            entry = self._bins[bisect_right(BINS, chance)]
            entry[0] += 1.0
            entry[1] += chance
            entry[2] += walked == path[: len(walked)]

    def _note(self, step: int, requests: Sequence[Request], load: Load, costs: CostModel, price: Prices) -> None:
        drafts = self._plan.drafts
        seconds = costs.pass_seconds(load.rows, load.tokens + sum(map(len, drafts.values())), load.cached)
        plain = costs.pass_seconds(load.rows, load.tokens, load.cached)
        for request in requests:
            draft = drafts.get(request.id, NO_DRAFT)
            candidates: list[dict[str, Any]] = [{"drafters": [], "tokens": 0, "gain": 0.0, "seconds": plain}]
            candidates += [
                {
                    "drafters": [name],
                    "tokens": offer.budgets.get(request.id, 0),
                    "gain": offer.gain,
                    "seconds": offer.seconds,
                }
                for name, offer in self._weighed
            ]
            self._records.append(
                {
                    "step": step,
                    "request": request.id,
                    "output_len": request.output_len,
                    "rate": price.rate,
                    "candidates": candidates,
                    "choice": {"drafters": list(dict.fromkeys(draft.drafters)), "tokens": len(draft)},
                    "expected": self._plan.expected[request.id],
                    "seconds": seconds,
                }
            )

    def _tell(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log(record)
