"""Rule `coupled`: sample and match.

The token at each output position is the target's own draw with noise that depends only on (seed, position). A drafted
node is accepted exactly when it equals that draw. Drafts therefore change when a token is known, never which token it
is: one seed gives one text with any drafter, tree, batch or policy, and greedy decoding is the case without noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bozza.core import Draft, Request, Verdict
from bozza.sampling.sampler import Draw, draw_tokens


class Coupled:
    """Lossless for every draft, whatever it was drawn from: chains, trees and mixtures of drafters."""

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """See `Rule.verify`. Rows below a root are drawn only if the root's own draw was drafted; often it was not."""
        roots = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
        first = _draw(logits, roots, [Draw(q.params, q.seed, q.output_len) for q in requests])
        rows: list[int] = []
        draws: list[Draw] = []
        for request, draft, root, token in zip(requests, drafts, roots, first, strict=True):
            if (-1, token) in zip(draft.parents, draft.tokens, strict=True):
                rows += range(root + 1, root + 1 + len(draft))
                draws += [Draw(request.params, request.seed, request.output_len + depth) for depth in draft.depths()]
        drawn = dict(zip(roots, first, strict=True)) | dict(zip(rows, _draw(logits, rows, draws), strict=True))
        return [_walk(draft, root, drawn) for draft, root in zip(drafts, roots, strict=True)]


def _draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    if not rows:
        return []
    everything = len(rows) == len(logits)
    return draw_tokens(logits if everything else logits[torch.tensor(rows, device=logits.device)], draws)


def _walk(draft: Draft, root: int, drawn: Mapping[int, int]) -> Verdict:
    """Follow the draws down the tree: `drawn[root]` is the one at the root, `drawn[root + 1 + i]` that after node i."""
    children = {key: node for node, key in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens = [drawn[root]]
    node = children.get((-1, tokens[0]))
    while node is not None:
        path.append(node)
        tokens.append(drawn[root + 1 + node])
        node = children.get((node, tokens[-1]))
    return Verdict(tuple(path), tuple(tokens))
