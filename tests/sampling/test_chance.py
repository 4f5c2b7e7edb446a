"""Coins of the rules that toss them: uniform, unrelated, and the same again for the same seed.

Bounds are meant for a false alarm rate of 1e-6 each: 4.9 standard deviations of a normal variable. Seeds are fixed,
so what passes once passes always.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bozza.core import Request
from bozza.params import SamplingParams
from bozza.sampling.chance import Coins

ALARM = 4.9  # P(|normal| > 4.9) = 1e-6


def request(seed=1, passes=0, id_=0):
    asked = Request(id_, [5], 1, SamplingParams(), seed, frozenset(), 100)
    asked.stats.passes = passes
    return asked


def coins(seed=1, stream="accept", passes=0):
    return Coins(request(seed, passes), stream)


def uniforms(count, *made):
    """Numbers of each of the coins in turn."""
    return torch.tensor([[one._uniform() for _ in range(count)] for one in made], dtype=torch.float64)


def worst_gap(numbers):
    """Kolmogorov's distance from the uniform law."""
    ordered, count = numbers.sort().values, len(numbers)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum((ordered - steps[:-1]).abs(), (steps[1:] - ordered).abs()).max())


@pytest.mark.parametrize("stream", ["draft", "accept"])
def test_numbers_are_uniform(stream):
    """Kolmogorov: P(distance > c / sqrt(n)) < 2 exp(-2 c^2), which is 1e-6 at c = 2.7."""
    count = 20_000
    one = uniforms(count, coins(stream=stream))[0]  # many tosses in one pass
    many = uniforms(4, *(coins(seed, stream, passes) for seed in range(50) for passes in range(100))).flatten()
    for numbers in (one, many):
        assert len(numbers) == count
        assert worst_gap(numbers) < 2.7 / math.sqrt(count)
        assert float(numbers.min()) >= 0.0
        assert float(numbers.max()) < 1.0
        assert len(numbers.unique()) == count  # 53 bits: none twice
    assert worst_gap(one * 0.95) > 2.7 / math.sqrt(count)  # a fault of 5 % is noticed


def test_successive_numbers_are_unrelated():
    numbers = uniforms(20_000, coins())[0] - 0.5
    for lag in (1, 2, 3, 7):
        correlation = float((numbers[:-lag] * numbers[lag:]).mean()) * 12
        assert abs(correlation) < ALARM / math.sqrt(len(numbers) - lag)


def test_streams_of_other_names_passes_and_seeds_share_nothing():
    """Seeds and passes whose digits run together when they are joined carelessly, and neighbours."""
    made = [
        coins(seed, stream, passes)
        for seed, stream, passes in itertools.product((0, 1, 11, 2, -1, 2**62), ("draft", "accept"), (0, 1, 11, 2))
    ]
    numbers = uniforms(400, *made)
    assert len(numbers.unique()) == numbers.numel()
    correlations = torch.corrcoef(numbers) - torch.eye(len(made))
    # 1128 pairs, hence 6 standard deviations for 1e-6 in all.
    assert float(correlations.abs().max()) < 6.0 / math.sqrt(400)


def test_the_same_seed_stream_and_pass_repeat():
    again = [coins(seed=9, passes=3) for _ in range(2)]
    assert torch.equal(*uniforms(50, *again))
    # Neither the request's number nor its text matters, only how far it is.
    other = Coins(request(seed=9, passes=3, id_=77), "accept")
    assert torch.equal(uniforms(50, other), uniforms(50, coins(seed=9, passes=3)))


def test_coins_are_of_the_pass_in_which_they_were_made():
    asked = request()
    first = Coins(asked, "accept")
    asked.stats.passes += 1
    assert torch.equal(uniforms(9, first), uniforms(9, coins(passes=0)))
    assert torch.equal(uniforms(9, Coins(asked, "accept")), uniforms(9, coins(passes=1)))


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.5, 0.97])
def test_accept_is_true_with_its_probability(probability):
    made, count = coins(seed=5), 20_000
    accepted = sum(made.accept(probability) for _ in range(count))
    assert abs(accepted - count * probability) < ALARM * math.sqrt(count * probability * (1 - probability))


def test_certain_things_are_certain():
    made = coins()
    assert all(made.accept(1.0) for _ in range(1000))
    assert not any(made.accept(0.0) for _ in range(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pick_follows_the_weights(dtype):
    """Chi-square of 7 degrees: 42 is exceeded once in 2 million times. The weights need not add up to 1."""
    weights = torch.tensor([0.0, 3.0, 0.0, 0.5, 1.0, 9.0, 0.1, 0.0, 2.0, 0.2, 0.3, 0.0], dtype=dtype)
    made, count = coins(seed=3), 30_000
    picked = torch.bincount(torch.tensor([made.pick(weights) for _ in range(count)]), minlength=12)
    assert picked[weights == 0].sum() == 0
    expected = weights.double()[weights > 0] / weights.double().sum() * count
    assert float(((picked[weights > 0] - expected) ** 2 / expected).sum()) < 42.0
    off = expected.roll(1)
    assert float(((picked[weights > 0] - off) ** 2 / off).sum()) > 42.0


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.25, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 1.0, 0.0, 1.0, 0.0],
        [1e-30, 0.0, 1e-30],
        [0.0, 1.0, 1e-30, 0.0],
        [0.25, 0.0, 0.25, 0.0, 0.5, 0.0],
        [5e-324, 0.0],
        [1.0],
    ],
)
def test_pick_never_picks_weight_zero_not_even_at_the_edges(monkeypatch, weights, number):
    made = coins()
    monkeypatch.setattr(made, "_uniform", lambda: number)
    given = torch.tensor(weights, dtype=torch.float64)
    assert weights[made.pick(given)] > 0.0
    if number == 0.0:
        assert made.pick(given) == min(i for i, weight in enumerate(weights) if weight > 0.0)


def test_pick_and_accept_use_a_number_each():
    """Or a decision would foretell the next."""
    one, other = coins(seed=8), coins(seed=8)
    numbers = uniforms(6, other)[0].tolist()
    for number in numbers[::2]:
        assert one.accept(number + 1e-9)
        assert one.pick(torch.ones(1000)) == int(numbers[numbers.index(number) + 1] * 1000)
