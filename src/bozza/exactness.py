"""Is a difference between two outputs a near-tie that rounding may flip, or a bug?

Low precision gives slightly other logits for other matrix shapes, so two correct runs may part where two tokens are
almost equally good. How much the shape matters is measured on plain forward passes of the same model, without any
code of the ragged runner: a difference beyond that cannot be blamed on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bozza.core import Request
from bozza.params import SamplingParams
from bozza.sampling.noise import arrivals, race_keys
from bozza.sampling.processors import Place, Processors
from bozza.sampling.sampler import Filters, warp

BANNED = 1e9  # the margin of a token that is removed altogether
FACTOR = 4.0  # two tokens may each move, in either run


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outputs of one prompt part.

    `margin` is by how much the target prefers one token over the other (logits after penalties and bans, divided by the
    temperature when sampling, noise included), or how far the nearer of them is from being removed or kept by a
    filter; None when one output had ended, which no rounding explains. `bound` is how far rounding may move that.
    """

    position: int
    tokens: tuple[int | None, int | None]  # None: that output had ended
    margin: float | None
    bound: float
    verdict: Literal["tie", "bug"]


def first_difference(model: Any, request: Request, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    """None when the outputs are equal; otherwise where they part, and whether rounding explains it.

    Args:
        model: the transformers model.
        request: as it was before either output; used up. Its custom processors are called once, out of turn.
        plain: one output.
        other: the other one.
    """
    if list(plain) == list(other):
        return None
    shorter = min(len(plain), len(other))
    position = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    if position == shorter:  # one is the beginning of the other: no rounding ends a text
        tokens = tuple(out[position] if position < len(out) else None for out in (plain, other))
        return Difference(position, (tokens[0], tokens[1]), None, 0.0, "bug")
    pair = (plain[position], other[position])
    params = request.params
    request.tokens += plain[:position]
    if request.constraint is not None:
        for token in plain[:position]:
            request.constraint.push(token)
    logits, noise = _logits_and_noise(model, request.tokens)
    scores = Processors().apply(logits[None], [Place(request)])[0]
    margin = _margin(scores, pair, params, request.seed, position)
    bound = FACTOR * noise * max(params.repetition_penalty, 1.0 / params.repetition_penalty)
    if params.temperature > 0.0:
        bound /= params.temperature
        margin = min(margin, _distance_to_filter(scores, pair, params))
    if math.isnan(margin) or math.isinf(margin):  # banned; JSON has no infinity
        margin = BANNED
    return Difference(position, pair, margin, bound, "tie" if margin <= bound else "bug")


@torch.inference_mode()
def _logits_and_noise(model: Any, context: Sequence[int]) -> tuple[Tensor, float]:
    """Plain logits after the context [vocab], and how far rounding moves them.

    That is what other shapes of a plain pass change, and at least one rounding step of the largest logit.
    """
    last = torch.tensor([len(context) - 1], device=model.device)
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30

    def plain(ids: Sequence[int], copies: int = 1) -> Tensor:
        batch = torch.tensor([list(ids)] * copies, device=model.device)
        logits: Tensor = model(input_ids=batch, use_cache=False, logits_to_keep=last).logits[0, 0].float()
        return logits

    logits = plain(context)
    longer = [[*context, *[context[0]] * extra] for extra in (1, 9) if len(context) + extra <= most]
    others = [*(plain(ids) for ids in longer), plain(context, copies=2)]
    step = float(logits.abs().max()) * torch.finfo(model.dtype).eps
    return logits, max(step, *(float((other - logits).abs().max()) for other in others))


def _margin(scores: Tensor, pair: tuple[int, int], params: SamplingParams, seed: int, position: int) -> float:
    tokens = torch.tensor([pair], device=scores.device)
    values = scores[tokens].double()
    if params.temperature > 0.0:
        keys = race_keys([(seed, position)], scores.device)
        values = values / params.temperature - arrivals(keys, tokens).log()
    return float((values[0, 0] - values[0, 1]).abs())


def _distance_to_filter(scores: Tensor, pair: tuple[int, int], params: SamplingParams) -> float:
    """How far scores (over the temperature) must move until a filter treats one of the two tokens otherwise."""
    scaled = scores / params.temperature
    distances = [float("inf")]
    if 0 < params.top_k < len(scaled):
        least_kept, largest_removed = scaled.topk(params.top_k + 1).values[-2:].tolist()
        values = scaled[list(pair)].tolist()
        distances += [value - largest_removed if value >= least_kept else least_kept - value for value in values]
    if params.top_p < 1.0:
        law = warp(scores[None], Filters(params.temperature, params.top_k))[0].double().softmax(dim=0)
        for token in pair:
            above = float(law[law > law[token]].sum())
            # Moving every logit by d moves the log odds of a mass by at most 2 d.
            distances.append(abs(_log_odds(above) - _log_odds(params.top_p)) / 2)
    if params.min_p > 0.0:
        edge = float(scaled.max()) + math.log(params.min_p)
        distances += [abs(value - edge) / 2 for value in scaled[list(pair)].tolist()]
    if params.typical_p < 1.0:
        distances += _distance_to_typical(scores, pair, params)
    return min(distances)


def _distance_to_typical(scores: Tensor, pair: tuple[int, int], params: SamplingParams) -> list[float]:
    law = warp(scores[None], Filters.of(params)._replace(typical_p=1.0))[0].double().softmax(dim=0)
    information = -law.log().nan_to_num(posinf=math.inf, neginf=-math.inf)
    entropy = float((law * information.clamp(max=1e9)).sum())
    oddness = (information - entropy).abs()
    distances = []
    for token in pair:
        before = float(law[oddness < oddness[token]].sum())
        # The order moves too: information by 2 d, and the entropy with it.
        distances.append(abs(_log_odds(before) - _log_odds(params.typical_p)) / 8)
    return distances


def _log_odds(mass: float) -> float:
    return math.log(mass / (1.0 - mass)) if 0.0 < mass < 1.0 else math.copysign(math.inf, mass - 0.5)
