"""Rule `rejection`: accept a drafted token x with probability min(1, p(x) / q(x)), else draw from what q missed of p.

On a chain this is speculative sampling (Leviathan et al., 2023, Algorithm 1; Chen et al., 2023). On a tree the children
of a node are tried in order (recursive rejection, as in SpecInfer and, for children drawn without replacement,
Sequoia, 2024): after a rejection p becomes the normalised positive part of p - q, and the next child's q loses the
tokens that stood before it. A point mass (a token that was looked up) is the case q(x) = 1. The law of the output
is exactly the target's, whatever the q are, as long as each token was drawn from its q independently of the coins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from bozza.core import Draft, Request, Verdict
from bozza.rules.base import root_rows
from bozza.sampling.chance import Chance, Coins
from bozza.sampling.processors import Place
from bozza.sampling.sampler import Sampler

Laws = Callable[[int], Tensor]  # node -> the target's law after it [vocab]; -1 is the last committed token


class Rejection:
    """Lossless in law for chains and trees of sampled, looked-up and merged tokens.

    Args:
        chance: makes the source of decisions for a request, anew in each pass.
    """

    name = "rejection"
    coupled = False

    def __init__(self, chance: Callable[[Request], Chance] = lambda request: Coins(request, "accept")) -> None:
        self._chance = chance
        self._sampler = Sampler()

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """See `Rule.verify`."""
        return [
            self.judge(self._laws(logits, request, draft, root), draft, request, self._chance(request))
            for request, draft, root in zip(requests, drafts, root_rows(drafts), strict=True)
        ]

    def judge(self, laws: Laws, draft: Draft, request: Request, chance: Chance) -> Verdict:
        """The verdict on one draft."""
        return walk(laws, draft, chance, request.end_ids)

    def _laws(self, logits: Tensor, request: Request, draft: Draft, root: int) -> Laws:
        paths = [(), *draft.paths()]
        if request.params.in_turn:  # only where the walk comes by, in order
            return lambda node: self._sampler.laws(
                logits[root + 1 + node : root + 2 + node], [Place(request, paths[node + 1])]
            )[0]
        laws = self._sampler.laws(logits[root : root + 1 + len(draft)], [Place(request, path) for path in paths])
        return lambda node: laws[node + 1]


def walk(laws: Laws, draft: Draft, chance: Chance, end_ids: Collection[int] = ()) -> Verdict:
    """Recursive rejection from the root down, at most to an end token."""
    children = draft.children()
    path: list[int] = []
    node = -1
    while True:
        law = laws(node)
        node, law = _try_children(law, children.get(node, []), draft, chance)
        if node < 0:
            tokens = [draft.tokens[accepted] for accepted in path]
            return Verdict(tuple(path), (*tokens, chance.pick(law)))
        path.append(node)
        if draft.tokens[node] in end_ids:
            return Verdict(tuple(path), tuple(draft.tokens[accepted] for accepted in path))


def _try_children(law: Tensor, children: Sequence[int], draft: Draft, chance: Chance) -> tuple[int, Tensor]:
    """The accepted child, or -1 and what is left of the law when all are rejected."""
    before: list[int] = []
    for child in children:
        token = draft.tokens[child]
        proposal = proposed(draft, child, law, before)
        if chance.accept(min(1.0, float(law[token]) / float(proposal[token]))):
            return child, law
        law = residual(law, proposal)
        before.append(token)
    return -1, law


def proposed(draft: Draft, node: int, law: Tensor, before: Sequence[int] = ()) -> Tensor:
    """What a node was drawn from, as [vocab] like the target's law: without the tokens `before`, and normalised."""
    token, stated = draft.tokens[node], draft.law(node)
    proposal = torch.zeros_like(law)
    if stated is not None:
        proposal[: len(stated)] = stated.to(law)
        if before:
            proposal[list(before)] = 0.0
        proposal /= proposal.sum()
    # A law that leaves nothing for the token cannot have been what it was drawn from: take it as chosen.
    if stated is None or not float(proposal[token]) > 0.0:
        proposal.zero_()
        proposal[token] = 1.0
    return proposal


def residual(law: Tensor, proposal: Tensor) -> Tensor:
    """The normalised positive part of law - proposal. Where they are equal nothing is rejected, but for rounding."""
    left = (law - proposal).clamp_(min=0.0)
    total = left.sum()
    return left / total if float(total) > 0.0 else law
