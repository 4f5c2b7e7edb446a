import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bozza.core import Request
from bozza.params import SamplingParams
from bozza.sampling.noise import race, race_keys
from bozza.sampling.processors import Place
from bozza.sampling.sampler import Draw, Filters, Sampler, draw_tokens, warp


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


def random_filters(draw):
    """Filters as a user may combine them."""
    return Filters(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 40, 5000])),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(1e-4, 1.0))),
        typical_p=draw(st.one_of(st.just(1.0), st.floats(0.05, 0.999))),
    )


def random_logits(draw, rows=3):
    """Flat and peaked laws over vocabularies that fill blocks of the race and such that do not."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**40)))
    vocab = draw(st.sampled_from([2, 50, 64, 65, 300, 1000]))
    return torch.randn(rows, vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 4.0, 20.0]))


def chain(model, filters):
    """Transformers' own filters in its own order."""
    config = GenerationConfig(do_sample=True, **filters._asdict())
    return model._get_logits_processor(config, input_ids_seq_length=1)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_filters_together_keep_what_transformers_keeps(target, data):
    """In float64, where no token sits on the edge of a filter but for rounding."""
    filters, logits = random_filters(data.draw), random_logits(data.draw).double()
    expected = chain(target, filters)(None, logits.clone())
    given = warp(logits, filters)
    assert torch.equal(given.isinf(), expected.isinf())
    assert torch.equal(given, expected)


def test_the_chain_of_transformers_holds_every_filter(target):
    names = [type(one).__name__ for one in chain(target, Filters(0.7, 5, 0.9, 0.1, 0.8))]
    assert names == [f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP", "Typical")]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_racing_first_and_filtering_after_draws_what_filtering_first_draws(data):
    """Mostly under top-p and min-p, where the unfiltered race is tried first."""
    filters, logits = random_filters(data.draw), random_logits(data.draw, rows=8)
    if data.draw(st.integers(0, 3)):
        filters = filters._replace(top_k=0, typical_p=1.0)
    seed, position = data.draw(st.integers(0, 2**63)), data.draw(st.integers(0, 1000))
    params = SamplingParams(**filters._asdict())
    draws = [Draw(params, seed + row, position) for row in range(len(logits))]
    keys = race_keys([(seed + row, position) for row in range(len(logits))], logits.device)
    assert draw_tokens(logits, draws) == race(warp(logits, filters), keys).tolist()


def test_the_two_ways_of_drawing_part_often_enough_to_be_told_apart():
    """Otherwise the property above would hold for a sampler without filters."""
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 2
    keys = race_keys([(row, 0) for row in range(200)], logits.device)
    free = race(logits, keys)
    for filters in (Filters(top_p=0.5), Filters(min_p=0.3), Filters(top_k=5), Filters(typical_p=0.5)):
        kept = race(warp(logits, filters), keys)
        assert 20 < int((kept != free).sum()) < 190


def test_laws_are_what_tokens_are_drawn_from():
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(2)) * 3
    asked = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.05, typical_p=0.9),
        SamplingParams(),
    ]
    places = [Place(Request(i, [5], 1, p, i, frozenset(), 100)) for i, p in enumerate(asked)]
    laws = Sampler().laws(logits, places)
    torch.testing.assert_close(laws.sum(dim=1), torch.ones(4))
    assert laws[[0, 3]].count_nonzero() == 2
    assert laws[[0, 3]].argmax(dim=1).tolist() == logits[[0, 3]].argmax(dim=1).tolist()
    for row in (1, 2):
        assert torch.equal(laws[row], warp(logits[row : row + 1], Filters.of(asked[row]))[0].softmax(dim=0))
        drawn = {
            Sampler().draw(
                logits[row : row + 1],
                [places[row]._replace(request=Request(0, [5], 1, asked[row], seed, frozenset(), 100))],
            )[0]
            for seed in range(200)
        }
        assert drawn <= set(laws[row].nonzero()[:, 0].tolist())
        assert drawn >= set((laws[row] > 0.05).nonzero()[:, 0].tolist())  # each is missed with 0.95 ** 200
