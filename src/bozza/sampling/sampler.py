"""Draw one token per row of logits, each row with its own parameters, seed and position.

The filters mean what transformers' warpers mean (temperature, then top-k, then top-p), but find their thresholds from
the largest values instead of sorting a whole vocabulary. Each operation treats a row by itself, so a row's token does
not depend on what shares the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bozza.core import SamplingParams
from bozza.sampling.noise import race, race_keys

Law = tuple[float, int, float]  # temperature, top_k, top_p: rows that share them are warped together


class Draw(NamedTuple):
    """What decides the token of one row, besides its logits."""

    params: SamplingParams
    seed: int
    position: int  # index of the drawn token in the request's output

    @property
    def law(self) -> Law:
        return self.params.temperature, self.params.top_k, self.params.top_p


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row: argmax at temperature 0, otherwise the winner of the row's race.

    Args:
        logits: [rows, vocab], float32.
        draws: one for each row.
    """
    by_law: dict[Law, list[int]] = {}
    for row, draw in enumerate(draws):
        by_law.setdefault(draw.law, []).append(row)
    if len(by_law) == 1:
        return _draw_alike(logits, draws)
    tokens = [0] * len(draws)
    for rows in by_law.values():
        alike = _draw_alike(logits[torch.tensor(rows, device=logits.device)], [draws[row] for row in rows])
        for row, token in zip(rows, alike, strict=True):
            tokens[row] = token
    return tokens


def _draw_alike(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    temperature, top_k, top_p = draws[0].law
    if temperature == 0.0:
        winners = logits.argmax(dim=1)
    else:
        keys = race_keys([(draw.seed, draw.position) for draw in draws], logits.device)
        filtered = top_k > 0 or top_p < 1.0
        winners = race(warp(logits, *draws[0].law), keys) if filtered else race(logits, keys, temperature)
    tokens: list[int] = winners.tolist()
    return tokens


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits [rows, vocab] of the sampled law: divided by the temperature, removed tokens at -inf."""
    logits = logits / temperature
    if 0 < top_k < logits.shape[1]:
        least = logits.topk(top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p < 1.0:
        logits = logits.masked_fill(logits < _nucleus_edge(logits, top_p), -math.inf)
    return logits


def _nucleus_edge(logits: Tensor, top_p: float) -> Tensor:
    """The least logit of the nucleus, [rows, 1]: a token stays while the mass above it is less than top_p."""
    vocab = logits.shape[1]
    probabilities = logits.softmax(dim=1)
    seen = min(64, vocab)
    while True:
        top, order = probabilities.topk(seen, dim=1)
        above = top.cumsum(dim=1) - top
        if seen == vocab or bool((above[:, -1] >= top_p).all()):
            break
        seen = min(seen * 8, vocab)
    kept = (above < top_p).sum(dim=1, keepdim=True)
    return logits.gather(1, order.gather(1, kept.clamp_(min=1) - 1))
