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

from bozza.core import SamplingParams
from bozza.sampling.noise import arrivals, race_keys
from bozza.sampling.sampler import warp

FACTOR = 4.0  # two tokens may each move, in either run


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outputs of one prompt part.

    `margin` is by how much the target prefers one token over the other (logits, divided by the temperature when
    sampling, noise included), or how far the nearer of them is from being removed or kept by top-k or top-p; None when
    one output had ended, which no rounding explains. `bound` is how far rounding may move that.
    """

    position: int
    tokens: tuple[int | None, int | None]  # None: that output had ended
    margin: float | None
    bound: float
    verdict: Literal["tie", "bug"]


def first_difference(
    model: Any, prompt: Sequence[int], params: SamplingParams, seed: int, plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """None when the outputs are equal; otherwise where they part, and whether rounding explains it."""
    if list(plain) == list(other):
        return None
    shorter = min(len(plain), len(other))
    position = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
    if position == shorter:  # one is the beginning of the other: no rounding ends a text
        tokens = tuple(out[position] if position < len(out) else None for out in (plain, other))
        return Difference(position, (tokens[0], tokens[1]), None, 0.0, "bug")
    pair = (plain[position], other[position])
    logits, noise = _logits_and_noise(model, [*prompt, *plain[:position]])
    margin, bound = _margin(logits, pair, params, seed, position), FACTOR * noise
    if params.temperature > 0.0:
        bound /= params.temperature
        margin = min(margin, _distance_to_filter(logits, pair, params))
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


def _margin(logits: Tensor, pair: tuple[int, int], params: SamplingParams, seed: int, position: int) -> float:
    tokens = torch.tensor([pair], device=logits.device)
    scores = logits[tokens].double()
    if params.temperature > 0.0:
        keys = race_keys([(seed, position)], logits.device)
        scores = scores / params.temperature - arrivals(keys, tokens).log()
    return float((scores[0, 0] - scores[0, 1]).abs())


def _distance_to_filter(logits: Tensor, pair: tuple[int, int], params: SamplingParams) -> float:
    """How far logits (over the temperature) must move until top-k or top-p treats one of the two tokens otherwise."""
    scaled = logits / params.temperature
    distances = [float("inf")]
    if 0 < params.top_k < len(scaled):
        least_kept, largest_removed = scaled.topk(params.top_k + 1).values[-2:].tolist()
        values = scaled[list(pair)].tolist()
        distances += [value - largest_removed if value >= least_kept else least_kept - value for value in values]
    if params.top_p < 1.0:
        law = warp(logits[None], params.temperature, params.top_k, 1.0)[0].double().softmax(dim=0)
        for token in pair:
            above = float(law[law > law[token]].sum())
            # Moving every logit by d moves the log odds of a mass by at most 2 d.
            distances.append(abs(_log_odds(above) - _log_odds(params.top_p)) / 2)
    return min(distances)


def _log_odds(mass: float) -> float:
    return math.log(mass / (1.0 - mass)) if 0.0 < mass < 1.0 else math.copysign(math.inf, mass - 0.5)
