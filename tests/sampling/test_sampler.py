import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bozza.params import SamplingParams
from bozza.sampling.sampler import Draw, Filters, draw_tokens, warp


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_filters_keep_what_transformers_keeps(temperature, top_k, top_p, scale):
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(3)) * scale
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(warp(logits, Filters(temperature, top_k, top_p)), expected)


def test_a_nucleus_larger_than_the_first_look_is_found():
    logits = torch.zeros(1, 5000) + torch.arange(5000) * 1e-5
    kept = ~warp(logits, Filters(top_p=0.5)).isinf()
    assert 2400 < int(kept.sum()) < 2600
    assert kept[0, -1]


def test_each_row_has_its_own_law_and_seed():
    logits = torch.randn(6, 100)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.5),
    ]
    draws = [Draw(p, seed, 4) for seed, p in enumerate(params)]
    together = draw_tokens(logits, draws)
    assert together == [draw_tokens(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert together[0] == logits[0].argmax()
    assert together[2] in logits[2].topk(3).indices


def test_report_56_temperature_zero_is_greedy_whatever_the_filters():
    logits = torch.randn(4, 50)
    greedy = SamplingParams(temperature=0.0, top_k=40, top_p=0.9, seed=3)
    assert draw_tokens(logits, [Draw(greedy, 3, i) for i in range(4)]) == logits.argmax(dim=1).tolist()


def test_position_and_seed_decide():
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0)
    tokens = {draw_tokens(logits, [Draw(params, seed, at)])[0] for seed in range(5) for at in range(5)}
    assert len(tokens) > 20
