"""Rule `coupled`: sample and match.

The token at each output position is the target's own draw with noise that depends only on (seed, position). A drafted
node is accepted exactly when it equals that draw. Drafts therefore change when a token is known, never which token it
is: one seed gives one text with any drafter, tree, batch or policy, and greedy decoding is the case without noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bozza.core import Draft, Request, Verdict
from bozza.rules.base import root_rows
from bozza.sampling.processors import Place
from bozza.sampling.sampler import Sampler


class Coupled:
    """Lossless for every draft, whatever it was drawn from: chains, trees and mixtures of drafters."""

    name = "coupled"
    coupled = True

    def __init__(self) -> None:
        self._sampler = Sampler()

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """See `Rule.verify`. Rows are drawn only where a token may come to stand."""
        walks = [_Walk(*each) for each in zip(requests, drafts, root_rows(drafts), strict=True)]
        while wanted := [(walk, node) for walk in walks for node in walk.wanted()]:
            rows = [walk.row(node) for walk, node in wanted]
            places = [Place(walk.request, walk.path_to(node)) for walk, node in wanted]
            tokens = self._sampler.draw(logits if len(rows) == len(logits) else logits[rows], places)
            for (walk, node), token in zip(wanted, tokens, strict=True):
                walk.drawn[node] = token
            for walk in walks:
                walk.advance()
        return [Verdict(tuple(walk.path), tuple(walk.tokens)) for walk in walks]


class _Walk:
    """Follows the draws of one request down its draft. Node -1 is the last committed token."""

    def __init__(self, request: Request, draft: Draft, root: int) -> None:
        self.request = request
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.drawn: dict[int, int] = {}
        self._draft = draft
        self._root = root
        self._node: int | None = -1  # where the next token is due; None: the walk has left the draft
        self._paths: list[tuple[int, ...]] = []
        self._children = {key: node for node, key in enumerate(zip(draft.parents, draft.tokens, strict=True))}

    def row(self, node: int) -> int:
        return self._root + 1 + node

    def path_to(self, node: int) -> tuple[int, ...]:
        if node < 0:
            return ()
        self._paths = self._paths or self._draft.paths()
        return self._paths[node]

    def wanted(self) -> list[int]:
        """Nodes to draw after: the one that the walk stands on, and all below it once the root has matched."""
        node = self._node
        if node is None:
            return []
        if node < 0 or self.request.params.in_turn:
            return [node]
        below = {node}
        for child in range(node + 1, len(self._draft)):
            if self._draft.parents[child] in below:
                below.add(child)
        return sorted(below)

    def advance(self) -> None:
        """Step down as far as the draws are known and drafted."""
        while self._node is not None and self._node in self.drawn:
            token = self.drawn[self._node]
            self.tokens.append(token)
            self._node = self._children.get((self._node, token))
            if self._node is not None:
                self.path.append(self._node)
            if token in self.request.end_ids:  # nothing behind it is committed, nor may a processor be asked there
                self._node = None
