"""Rule `coupled`: sample and match.

The token at each output position is the target's own draw with noise that depends only on (seed, position). A drafted
node is accepted exactly when it equals that draw. Drafts therefore change when a token is known, never which token it
is: one seed gives one text with any drafter, tree, batch or policy, and greedy decoding is the case without noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bozza.core import Draft, Request, Verdict
from bozza.sampling.sampler import Draw, draw_tokens


class Coupled:
    """Lossless for every draft, whatever it was drawn from: chains, trees and mixtures of drafters."""

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """See `Rule.verify`."""
        draws = [
            Draw(request.params, request.seed, request.output_len + depth)
            for request, draft in zip(requests, drafts, strict=True)
            for depth in (0, *draft.depths())
        ]
        tokens = draw_tokens(logits, draws) if draws else []
        verdicts, row = [], 0
        for draft in drafts:
            verdicts.append(_walk(draft, tokens[row : row + 1 + len(draft)]))
            row += 1 + len(draft)
        return verdicts


def _walk(draft: Draft, drawn: Sequence[int]) -> Verdict:
    """Follow the draws down the tree; `drawn[0]` is the draw at the root, `drawn[1 + i]` the one after node i."""
    children = {key: node for node, key in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens = [drawn[0]]
    node = children.get((-1, drawn[0]))
    while node is not None:
        path.append(node)
        tokens.append(drawn[1 + node])
        node = children.get((node, tokens[-1]))
    return Verdict(tuple(path), tuple(tokens))
