"""How likely the model found the tokens that were committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bozza.core import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """One entry per row: of its token, and of the `top` likeliest ones.

    Args:
        logits: [tokens, vocab] as the model gave them.
        tokens: what followed each.
        top: how many of the likeliest tokens are named.
    """
    laws = logits.log_softmax(dim=1)
    chosen = laws.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = torch.count_nonzero(laws > chosen, dim=1) + 1
    best = laws.topk(min(top, laws.shape[1]), dim=1)
    return [
        TokenLogprob(token, value, rank, tuple(zip(names, values, strict=True)))
        for token, value, rank, names, values in zip(
            tokens,
            chosen[:, 0].tolist(),
            ranks.tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            strict=True,
        )
    ]
