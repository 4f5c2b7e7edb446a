import math

import pytest
import torch

from bozza.sampling.noise import BLOCK, arrivals, race, race_keys

CPU = torch.device("cpu")


def keys(rows, seed=1):
    return race_keys([(seed, row) for row in range(rows)], CPU)


def everything(logits, key):
    """The race run over the whole vocabulary, without opening blocks."""
    tokens = torch.arange(logits.shape[1])[None].expand(logits.shape[0], -1)
    return (logits.double() - arrivals(key, tokens).log()).argmax(dim=1)


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 4096, 49152])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 30.0])
def test_opening_few_blocks_finds_the_winner_of_all(vocab, scale):
    logits = torch.randn(16, vocab) * scale
    assert torch.equal(race(logits, keys(16)), everything(logits, keys(16)))


@pytest.mark.parametrize("temperature", [0.1, 0.7, 3.0])
def test_a_temperature_is_a_division(temperature):
    logits = torch.randn(16, 1000) * 3
    assert torch.equal(race(logits, keys(16), temperature), race(logits / temperature, keys(16)))


def test_removed_tokens_never_win():
    logits = torch.full((64, 300), -math.inf)
    logits[:, [3, 130, 299]] = torch.tensor([0.0, -1.0, -2.0])
    winners = race(logits, keys(64))
    assert torch.equal(winners, everything(logits, keys(64)))
    assert set(winners.tolist()) == {3, 130, 299}


def test_a_row_is_alone_in_any_batch_and_any_padding():
    logits = torch.randn(9, 500)
    together = race(logits, keys(9))
    for row in range(9):
        assert race(logits[row : row + 1], keys(9)[row : row + 1]).item() == together[row]
    padded = torch.cat([logits, torch.full((9, 77), -math.inf)], dim=1)
    assert torch.equal(race(padded, keys(9)), together)


def test_arrivals_are_independent_standard_exponentials():
    rows, tokens = 4000, torch.arange(2 * BLOCK)
    drawn = arrivals(keys(rows), tokens[None].expand(rows, -1))
    # Kolmogorov-Smirnov of all arrivals against Exp(1); 512,000 draws: the 1e-6 critical value is 2.7 / sqrt(n).
    ordered = drawn.flatten().sort().values
    law = 1 - torch.exp(-ordered)
    steps = torch.arange(1, law.numel() + 1) / law.numel()
    assert (law - steps).abs().max() < 2.7 / math.sqrt(law.numel())
    # The minimum of a block is Exp(64), its place uniform, and minima of neighbouring blocks are unrelated.
    first, place = drawn[:, :BLOCK].min(dim=1)
    assert abs(first.mean() * BLOCK - 1) < 0.1
    counts = torch.bincount(place, minlength=BLOCK).double()
    assert ((counts - rows / BLOCK) ** 2 / (rows / BLOCK)).sum() < 63 + 5 * math.sqrt(2 * 63)
    correlations = torch.corrcoef(drawn[:, ::16].T)
    off_diagonal = correlations - torch.eye(len(correlations))
    assert off_diagonal.abs().max() < 5.5 / math.sqrt(rows)


def test_neighbouring_positions_and_seeds_share_nothing():
    tokens = torch.arange(200)[None].expand(3, -1)
    a, b, c = arrivals(race_keys([(1, 0), (1, 1), (2, 0)], CPU), tokens)
    for one, other in ((a, b), (a, c), (b, c)):
        assert not (one == other).any()
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.35


@pytest.mark.parametrize("vocab", [3, 200])
def test_the_race_draws_from_softmax(vocab):
    """Chi-square at a false alarm rate of about 1e-6, with fixed seeds."""
    law = torch.softmax(torch.linspace(0, 3, vocab), dim=0).double()
    draws = 40_000
    winners = race(law.log().float()[None].expand(draws, -1), keys(draws))
    counts = torch.bincount(winners, minlength=vocab).double()
    chi2 = float((((counts - draws * law) ** 2) / (draws * law)).sum())
    free = vocab - 1
    assert chi2 < free + 5 * math.sqrt(2 * free) + 15
    # Negative control: a law that is off by a tenth in one token is told apart.
    wrong = law.clone()
    wrong[-1] *= 1.1
    wrong /= wrong.sum()
    chi2 = float((((counts - draws * wrong) ** 2) / (draws * wrong)).sum())
    assert vocab == 200 or chi2 > free + 5 * math.sqrt(2 * free) + 15


def test_seeds_may_be_any_integer():
    assert race_keys([(-1, 0), (2**200, 5)], CPU).shape == (2, 2)
    assert race_keys([], CPU).shape == (0, 2)
