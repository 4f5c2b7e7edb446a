"""Trees that a drafter grows level by level, most promising nodes first.

The value of a node is the product of the confidences on its path, an estimate of the probability that the node stands.
At each level the best nodes that still belong to the best of the whole tree are given children; in the end the best
nodes are drafted (dynamic draft trees, Li et al., 2024, EAGLE-2, sections 4.1 and 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bozza.core import Draft, Request
from bozza.sampling.noise import arrivals, race_keys
from bozza.sampling.processors import Place

WIDTH = 8  # children of a node, and nodes that get children at one level
DEPTH = 10  # deepest level
LEAST = 0.01  # a node that is less likely to stand than this is not drafted
CONTENDERS = 32  # tokens that take part in a race


@dataclass(slots=True)
class Tree:
    """Candidates for one request's draft."""

    request: Request
    budget: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    level: list[int] = field(default_factory=list)  # the nodes of the deepest level
    fed: list[int] = field(default_factory=list)  # nodes whose children are known, in order

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """Give a node children; -1 is the last committed token."""
        value, path = (self.values[parent], self.paths[parent]) if parent >= 0 else (1.0, ())
        for token, confidence in zip(tokens, confidences, strict=True):
            self.level.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(value * min(confidence, 1.0))
            self.paths.append((*path, token))

    def best(self) -> list[int]:
        """The best nodes within the budget, the best one first; a parent always comes before its children."""
        able = [node for node, value in enumerate(self.values) if value >= LEAST]
        return sorted(able, key=lambda node: -self.values[node])[: self.budget]

    def promising(self, width: int) -> list[int]:
        """Nodes of the deepest level to be given children, which must have room in the budget below their path."""
        standing = {node for node in self.best() if len(self.paths[node]) < self.budget}
        return sorted((node for node in self.level if node in standing), key=lambda node: -self.values[node])[:width]

    def chance(self, nodes: Sequence[int]) -> float:
        """How likely one of some nodes of a level stands."""
        return sum(self.values[node] for node in nodes)

    def feed(self, nodes: Sequence[int]) -> Draft:
        """Note that these nodes get children now; returns all nodes that ever did, as a tree."""
        self.fed += nodes
        self.level = []
        place = {-1: -1} | {node: index for index, node in enumerate(self.fed)}
        tokens = tuple(self.tokens[node] for node in self.fed)
        return Draft(tokens, tuple(place[self.parents[node]] for node in self.fed), ("",) * len(tokens))

    def draft(self, drafter: str) -> Draft:
        """The best nodes."""
        chosen = self.best()
        place = {-1: -1} | {node: index for index, node in enumerate(chosen)}
        return Draft(
            tuple(self.tokens[node] for node in chosen),
            tuple(place[self.parents[node]] for node in chosen),
            (drafter,) * len(chosen),
            confidences=tuple(self.values[node] for node in chosen),
        )


# The trees, and for each what it feeds with how many of these nodes fed before -> logits after each new node, in order.
Expand = Callable[[Sequence[tuple[Tree, Draft, int]]], Tensor]


def grow(trees: Sequence[Tree], roots: Tensor, expand: Expand, rank: Rank, width: int, least: float = 0.0) -> None:
    """Grow all trees together, one call of `expand` for each level.

    Args:
        trees: empty ones.
        roots: logits [trees, vocab] after the last committed tokens.
        expand: what the drafter guesses after nodes.
        rank: picks children.
        width: see `WIDTH`.
        least: a tree grows deeper only where one of the nodes that would get children stands with this probability.
    """
    children = rank(roots, [Place(tree.request, ()) for tree in trees], width)
    for tree, (tokens, confidences) in zip(trees, children, strict=True):
        tree.add(-1, tokens, confidences)
    for _ in range(1, DEPTH):
        chosen = [(tree, nodes) for tree in trees if (nodes := tree.promising(width)) and tree.chance(nodes) >= least]
        if not chosen:
            return
        asked = []
        for tree, nodes in chosen:
            before = len(tree.fed)
            asked.append((tree, tree.feed(nodes), before))
        places = [Place(tree.request, tree.paths[node]) for tree, nodes in chosen for node in nodes]
        below = iter(rank(expand(asked), places, width))
        for tree, nodes in chosen:
            for node in nodes:
                tree.add(node, *next(below))


class Rank:
    """Picks the likeliest children of nodes.

    Args:
        coupled: at a temperature, take part in the race that decides the output (see `Rule.coupled`): tokens are then
            ordered by their arrival under the drafter's law, and a confidence is a share of the arrivals' rates.
        targets: int64 [draft vocab], the target's id of each token of the logits; None when they are the same.
    """

    def __init__(self, coupled: bool, targets: Tensor | None = None) -> None:
        self._coupled = coupled
        self._targets = targets

    def __call__(self, logits: Tensor, places: Sequence[Place], width: int) -> list[tuple[list[int], list[float]]]:
        """For each row tokens and confidences, best first."""
        temperatures = [place.request.params.temperature for place in places]
        if any(temperatures):
            scale = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits.device)
            logits = logits / scale[:, None]
        laws = logits.softmax(dim=1)
        shares, ids = laws.topk(min(CONTENDERS if self._coupled and any(temperatures) else width, laws.shape[1]), dim=1)
        if self._targets is not None:
            ids = self._targets[ids]
        if self._coupled and any(temperatures):
            raced = torch.tensor([temperature > 0.0 for temperature in temperatures], device=logits.device)
            keys = race_keys([(place.request.seed, place.position) for place in places], logits.device)
            rates = shares.double() / arrivals(keys, ids)
            rates = (rates / rates.sum(dim=1, keepdim=True)).to(shares)
            shares, order = torch.where(raced[:, None], rates, shares).sort(dim=1, descending=True)
            ids = ids.gather(1, order)
        pairs = zip(ids[:, :width].tolist(), shares[:, :width].tolist(), strict=True)
        return [(tokens, confidences) for tokens, confidences in pairs]
