"""From logits to laws and tokens, each row with its own parameters, seed and position.

The filters mean what transformers' warpers mean (temperature, then top-k, top-p, min-p, typical-p), but find their
thresholds from the largest values instead of sorting a whole vocabulary. Each operation treats a row by itself, so
a row's token does not depend on what shares the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

from bozza.params import SamplingParams
from bozza.sampling.noise import race, race_keys
from bozza.sampling.processors import Place, Processors


class Filters(NamedTuple):
    """What turns logits into a law; rows that share it are treated together."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        """The filters among a request's parameters."""
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)


class Draw(NamedTuple):
    """What decides the token of one row, besides its logits."""

    params: SamplingParams
    seed: int
    position: int  # index of the drawn token in the request's output


class Sampler:
    """Laws and draws at places of drafts, with every parameter of each place's request.

    Args:
        in_turn: False leaves out custom processors and grammars, which may only be asked where tokens come to stand.
    """

    def __init__(self, in_turn: bool = True) -> None:
        self._processors = Processors(in_turn)

    def draw(self, logits: Tensor, places: Sequence[Place]) -> list[int]:
        """The token at each place under the coupled noise of its request: see `draw_tokens`."""
        draws = [Draw(place.request.params, place.request.seed, place.position) for place in places]
        return draw_tokens(self._processors.apply(logits, places), draws)

    def laws(self, logits: Tensor, places: Sequence[Place]) -> Tensor:
        """Probabilities [rows, vocab] that the token at each place is drawn from; a point mass when greedy."""
        scores = self._processors.apply(logits, places)
        laws = torch.empty_like(scores)
        for filters, rows in _alike([place.request.params for place in places]).items():
            chosen = scores[rows]
            if filters.temperature == 0.0:
                laws[rows] = torch.zeros_like(chosen).scatter_(1, chosen.argmax(dim=1, keepdim=True), 1.0)
            else:
                laws[rows] = warp(chosen, filters).softmax(dim=1)
        return laws


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row: argmax at temperature 0, otherwise the winner of the row's race.

    Args:
        logits: [rows, vocab], float.
        draws: one for each row.
    """
    groups = _alike([draw.params for draw in draws])
    if len(groups) == 1:
        return _draw_alike(logits, draws, *groups)
    tokens = [0] * len(draws)
    for filters, rows in groups.items():
        alike = _draw_alike(logits[rows], [draws[row] for row in rows], filters)
        for row, token in zip(rows, alike, strict=True):
            tokens[row] = token
    return tokens


def _alike(params: Sequence[SamplingParams]) -> dict[Filters, list[int]]:
    """Rows by their filters."""
    groups: dict[Filters, list[int]] = {}
    for row, chosen in enumerate(params):
        groups.setdefault(Filters.of(chosen), []).append(row)
    return groups


def _draw_alike(logits: Tensor, draws: Sequence[Draw], filters: Filters) -> list[int]:
    if filters.temperature == 0.0:
        greedy: list[int] = logits.argmax(dim=1).tolist()
        return greedy
    keys = race_keys([(draw.seed, draw.position) for draw in draws], logits.device)
    if filters.top_k or filters.typical_p < 1.0:
        winners = race(warp(logits, filters), keys)
    else:
        winners = race(logits, keys, filters.temperature)
        # The first of all tokens is the first of the kept ones if it is kept itself: mostly no filter need be built.
        if removed := _removed(logits, winners, filters):
            winners[removed] = race(warp(logits[removed], filters), keys[removed])
    tokens: list[int] = winners.tolist()
    return tokens


def _removed(logits: Tensor, winners: Tensor, filters: Filters) -> list[int]:
    """Rows whose winner top-p or min-p removes."""
    if filters.top_p == 1.0 and filters.min_p == 0.0:
        return []
    won = logits.gather(1, winners[:, None])
    rows = (won[:, 0] < logits.amax(dim=1)).nonzero()[:, 0]
    if not len(rows):
        return []
    kept = warp(logits[rows], filters).gather(1, winners[rows, None])[:, 0] > -math.inf
    removed: list[int] = rows[~kept].tolist()
    return removed


def warp(logits: Tensor, filters: Filters) -> Tensor:
    """Logits [rows, vocab] of the sampled law: divided by the temperature, removed tokens at -inf."""
    logits = logits / filters.temperature
    if 0 < filters.top_k < logits.shape[1]:
        least = logits.topk(filters.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if filters.top_p < 1.0:
        logits = logits.masked_fill(logits < _nucleus_edge(logits, filters.top_p), -math.inf)
    if filters.min_p > 0.0:
        logits = logits.masked_fill(logits < logits.amax(dim=1, keepdim=True) + math.log(filters.min_p), -math.inf)
    if filters.typical_p < 1.0:
        typical: Callable[..., Tensor] = TypicalLogitsWarper(mass=filters.typical_p)
        logits = typical(None, logits)
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
