"""What to verify and whom to pay, weighed against the going rate.

Let the rate be r committed tokens per second, as of late. A step that is expected to commit E tokens in T seconds is
worth E - r T: what it commits, less what would be committed in the same time otherwise. To maximise it at each step,
with r the rate that this very policy attains, maximises tokens per second in the long run (the average-reward criterion
of semi-Markov decision processes, Howard, 1960). A node pays when its chance exceeds r times the seconds that it adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bozza.core import Load
from bozza.leader.beliefs import Beliefs
from bozza.leader.cost import CostModel

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # budgets that are weighed; finer ones are told apart by chance


@dataclass(frozen=True, slots=True)
class Prices:
    """What time is worth in one step."""

    rate: float  # tokens per second
    node: float  # tokens that the time of one more node is worth


def prices(costs: CostModel, load: Load, rate: float, more: float, nodes: int = 0) -> Prices:
    """The price of a node when `nodes` of them are verified anyway, and about `more` come on top."""
    ahead = max(round(more), len(load.room), 1)
    bare = costs.pass_seconds(load.rows, load.tokens + nodes, load.cached)
    full = costs.pass_seconds(load.rows, load.tokens + nodes + ahead, load.cached)
    return Prices(rate, rate * max(full - bare, 0.0) / ahead)


def pick(costs: CostModel, load: Load, rate: float, beliefs: Mapping[int, Beliefs]) -> dict[int, list[int]]:
    """The nodes of all requests together that are worth most.

    Nodes are taken by their chance, and their number is the one for which what they are expected to commit, less the
    price of the pass, is largest. A parent is never less likely than its children, so it is taken before them.

    Returns:
        Request id -> nodes; requests without any are absent.
    """
    waiting: list[tuple[float, int, int, int]] = []
    for id_, belief in beliefs.items():
        nodes = belief.trunk() if load.chains else range(len(belief.chances))
        ranked = sorted((-belief.chances[node], node) for node in nodes if belief.chances[node] > 0.0)
        waiting += [(minus, place, id_, node) for place, (minus, node) in enumerate(ranked[: load.room[id_]])]
    waiting.sort()
    best, gained, count = 0.0, 0.0, 0
    bare = costs.pass_seconds(load.rows, load.tokens, load.cached)
    for number, (minus, _, _, _) in enumerate(waiting, 1):
        gained -= minus
        worth = gained - rate * (costs.pass_seconds(load.rows, load.tokens + number, load.cached) - bare)
        if worth > best:
            best, count = worth, number
    picked: dict[int, list[int]] = {}
    for _, _, id_, node in waiting[:count]:
        picked.setdefault(id_, []).append(node)
    return picked


@dataclass(frozen=True, slots=True)
class Bid:
    """What paying a drafter would bring."""

    worth: float  # tokens gained less the price of all time spent
    gain: float  # tokens gained
    seconds: float  # of the drafter's call
    budgets: Mapping[int, int]  # request id -> nodes


NO_BID = Bid(0.0, 0.0, 0.0, {})


def bid(
    costs: CostModel,
    name: str,
    curves: Mapping[int, Sequence[float]],
    cached: Mapping[int, int],
    price: Prices,
    losses: Mapping[int, float] | None = None,
) -> Bid:
    """The best budgets for one drafter: one size for all requests for which it pays.

    Args:
        costs: of the machine.
        name: the drafter.
        curves: request id -> chance that each further node stands.
        cached: request id -> tokens in its store.
        price: of this step.
        losses: request id -> tokens that asking for it costs beside: what free drafts would no longer add, and what
            the time is worth that reading takes. Nothing by default.
    """
    lost = losses or {}
    # One more token of one more request, beside what all share.
    each = price.rate * (costs.draft_seconds(name, 1, 1, 2, 0) - costs.draft_seconds(name, 1, 1, 1, 0))
    known: dict[int, list[float]] = {}  # requests of which the same is known share a curve
    for curve in curves.values():
        if id(curve) not in known:
            known[id(curve)] = _running(curve, price.node, each)
    able = [(id_, known[id(curve)], lost.get(id_, 0.0)) for id_, curve in curves.items() if curve]
    best = NO_BID
    for size in SIZES:
        users: dict[int, int] = {}
        total = 0.0
        for id_, running, less in able:
            nodes = min(size, len(running))
            if (own := running[nodes - 1] - less) > 0.0:
                users[id_] = nodes
                total += own
        if not users:
            continue
        tokens = sum(users.values())
        seconds = costs.draft_seconds(name, len(users), max(users.values()), tokens, sum(cached[id_] for id_ in users))
        worth = total - price.rate * seconds + each * tokens
        if worth > best.worth:
            gain = sum(sum(curves[id_][:nodes]) - lost.get(id_, 0.0) for id_, nodes in users.items())
            best = Bid(worth, gain, seconds, users)
    return best


def loss(chances: Sequence[float], shared: float, price: float) -> float:
    """What some nodes would have added that another drafter has too, with a part of their chances.

    A node of little worth is then not worth its price at all, so it is no loss to lose it.
    """
    return sum(max(chance - price, 0.0) - max(chance * (1.0 - shared) - price, 0.0) for chance in chances)


def _running(curve: Sequence[float], price: float, each: float) -> list[float]:
    """Sums of what is gained by the first nodes, each drafted at a price; one that does not pay is not verified."""
    total, sums = 0.0, []
    for chance in curve:
        total += max(chance - price, 0.0) - each
        sums.append(total)
    return sums
