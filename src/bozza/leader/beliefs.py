"""How likely each drafted node stands.

A node's chance given that its parent stands is looked up in `Rates` by what is known before the target answers: the
drafter and its confidence in the node given the parent, the depth, whether another drafter says the same or something
else there, the confidence in the draft's first token (for copies: how much matched), and how the drafter fared lately
in this request. What is left of a request's own nature is a factor of the odds: hits over those expected. A free
drafter's drafts are scored whether or not they are verified.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from bozza.core import Draft
from bozza.leader.rates import Key, Rates

LEVELS = (2, 3, 4, 6, 7)
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.51, 0.62, 0.72, 0.82, 0.9, 0.95, 0.98)  # of confidences
CENTRES = (0.01, 0.03, 0.07, 0.15, 0.27, 0.45, 0.57, 0.67, 0.77, 0.86, 0.92, 0.96, 0.99)
DEPTHS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7)  # depth -> its bin; deeper ones share the last
RECORDS = (0.1, 0.3, 0.6, 0.85)
STREAKS = (1, 2, 4, 8, 16)
UNSAID, UNSAID_DEEPER = 0.4, 0.75  # prior chances where a drafter gives no confidence: first token, later ones
ALONE, AGREED, DISPUTED = 0, 1, 2
PACE = 0.25  # how fast a record follows
LUCK = 6.0  # hits for which a request's own luck counts as much as what is known of all
FADING = 0.97  # part of it that is left after a draft
STEPS, STEP = 6, 1.25  # luck is a power of 1.25 up to the sixth: few enough values to compute with once
POWERS = [STEP**power for power in range(-STEPS, STEPS + 1)]
STALE = 32  # steps after which a record counts as unknown


@dataclass(slots=True)
class Record:
    """How a drafter fared lately in one request."""

    hits: float = -1.0  # mean of first tokens right, recent ones most; negative: unknown
    streak: int = 0  # tokens right in a row
    seen: int = 0  # step of the last draft
    told: float = 0.0  # hits that were expected of nodes whose parent stood, recent ones most
    came: float = 0.0  # hits
    luck: float = 1.0  # how many times as often as is usual the drafter is right in this request: a factor of odds

    def bins(self, step: int) -> tuple[int, int]:
        """What of it goes into keys."""
        if self.hits < 0.0 or step - self.seen > STALE:
            return 0, 0
        return 1 + bisect_right(RECORDS, self.hits), bisect_right(STREAKS, self.streak)

    def add(self, right: int, missed: bool, step: int, told: float = 0.0, came: float = 0.0) -> None:
        """A draft had so many tokens right in a row, and then a wrong one or none; of its nodes `told` should have."""
        self.told, self.came = FADING * self.told + told, FADING * self.came + came
        power = round(math.log((self.came + LUCK) / (self.told + LUCK), STEP))
        self.luck = POWERS[max(-STEPS, min(STEPS, power)) + STEPS]
        hit = float(right > 0)
        self.hits = hit if self.hits < 0.0 else self.hits + PACE * (hit - self.hits)
        self.streak = 0 if missed else self.streak + right
        self.seen = step


@dataclass(slots=True)
class Offer:
    """A draft, and what was known of it when it was made."""

    name: str
    draft: Draft
    record: tuple[int, int]
    places: list[int] = field(default_factory=list)  # node -> node of the beliefs
    depths: list[int] = field(default_factory=list)
    keys: dict[int, Key] = field(default_factory=dict)
    at: int = -1  # the last node that is known to stand
    luck: float = 1.0  # see `Record.luck`
    usual: dict[int, float] = field(default_factory=dict)  # node -> its chance without it
    told: float = 0.0  # sum of these where the parent stood
    came: float = 0.0  # how many of them stood
    _below: dict[int, list[int]] | None = None

    def below(self, node: int) -> Sequence[int]:
        """Children of a node."""
        if self._below is None:
            self._below = self.draft.children()
        return self._below.get(node, ())

    def chance(self, node: int, others: int, rates: Rates) -> float:
        """How likely a node stands if its parent does."""
        depth = self.depths[node]
        confidences = self.draft.confidences
        if not confidences:
            said, prior = -1, UNSAID if depth == 1 else UNSAID_DEEPER
        else:
            parent = self.draft.parents[node]
            given = confidences[node] / max(confidences[parent], 1e-9) if parent >= 0 else confidences[node]
            said = bisect_right(EDGES, given)
            prior = CENTRES[said]
        key = self._key(said, depth, others)
        self.keys[node] = key
        usual = self.usual[node] = rates.estimate(key, prior)
        return favoured(usual, self.luck)

    def _key(self, said: int, depth: int, others: int) -> Key:
        first = bisect_right(EDGES, self.draft.confidences[0]) if self.draft.confidences else -1
        record, streak = self.record
        return (self.name, said, DEPTHS[min(depth, 10)], others, first, streak, record)

    def follow(self, tokens: Sequence[int], rates: Rates) -> tuple[int, bool]:
        """Compare with what came next, and learn from it.

        Returns:
            How many of the tokens were right, and whether the next one was not (a draft that ends is no miss).
        """
        right = 0
        for token in tokens:
            found = -1
            kids = self.below(self.at)
            for kid in kids:
                hit = self.draft.tokens[kid] == token
                if hit:
                    found = kid
                if (key := self.keys.get(kid)) is not None:
                    rates.learn(key, hit)
                    self.told += self.usual[kid]
                    self.came += hit
            if found < 0:
                return right, bool(kids)
            self.at = found
            right += 1
        return right, False


def favoured(chance: float, luck: float) -> float:
    """A chance whose odds are multiplied."""
    return chance * luck / (1.0 - chance + chance * luck)


class Beliefs:
    """The drafts of one request as one tree, with the chance of each node.

    Args:
        rates: what was learned so far.
        least: below a node that is less likely than this nothing is looked at.
    """

    def __init__(self, rates: Rates, least: float) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.chances: list[float] = []
        self.offers: list[Offer] = []
        self._index: dict[tuple[int, int], int] = {}
        self._below: dict[int, int] = {}  # node -> which offers have a child there, a bit each
        self._who: list[list[tuple[int, int]]] = []  # node -> (offer, its node)
        self._rates = rates
        self._least = least

    def add(self, offer: Offer) -> None:
        """Merge a draft in; `judge` afterwards."""
        draft, number = offer.draft, len(self.offers)
        self.offers.append(offer)
        bit = 1 << number
        if not self.tokens:  # the usual case, at a fraction of the time
            self.tokens, self.parents = list(draft.tokens), list(draft.parents)
            offer.depths = draft.depths()
            self.depths = list(offer.depths)
            offer.places = list(range(len(draft)))
            self._who = [[(number, node)] for node in offer.places]
            self._below = dict.fromkeys(draft.parents, bit)
            return
        if not self._index:
            self._index = {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        places, index, below = offer.places, self._index, self._below
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            above = places[parent] if parent >= 0 else -1
            place = index.get((above, token))
            if place is None:
                place = index[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.depths.append(1 if above < 0 else self.depths[above] + 1)
                self._who.append([])
            places.append(place)
            below[above] = below.get(above, 0) | bit
            self._who[place].append((number, node))
        offer.depths = [self.depths[place] for place in places]

    def judge(self) -> None:
        """Estimate the chance of every node that is worth a look; the others get 0."""
        chances: list[float] = []
        for place, parent in enumerate(self.parents):
            above = chances[parent] if parent >= 0 else 1.0
            if above < self._least:
                chances.append(0.0)
                continue
            who, below = self._who[place], self._below[parent]
            total = 0.0
            for number, node in who:
                others = AGREED if len(who) > 1 else DISPUTED if below & ~(1 << number) else ALONE
                total += self.offers[number].chance(node, others, self._rates)
            chances.append(above * total / len(who))  # each is right on average; the largest of them would not be
        self.chances = chances

    def first(self) -> float:
        """The chance of the likeliest first token."""
        return max(
            (chance for chance, parent in zip(self.chances, self.parents, strict=True) if parent < 0), default=0.0
        )

    def trunk(self) -> list[int]:
        """The nodes from the root down, each the likeliest below the last."""
        chances = self.chances
        likeliest: dict[int, int] = {}  # node -> child
        for node, parent in enumerate(self.parents):
            rival = likeliest.get(parent)
            if rival is None or chances[node] > chances[rival]:
                likeliest[parent] = node
        nodes: list[int] = []
        at = likeliest.get(-1)
        while at is not None:
            nodes.append(at)
            at = likeliest.get(at)
        return nodes

    def draft(self, nodes: Sequence[int]) -> Draft:
        """Some nodes, which hold the parent of each, as a draft."""
        chosen = sorted(nodes)
        place = {-1: -1} | {node: index for index, node in enumerate(chosen)}
        return Draft(
            tuple(self.tokens[node] for node in chosen),
            tuple(place[self.parents[node]] for node in chosen),
            tuple(self.offers[self._who[node][0][0]].name for node in chosen),
            confidences=tuple(self.chances[node] for node in chosen),
        )
