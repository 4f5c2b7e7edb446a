import pytest
import torch

from bozza import SamplingParams
from bozza.core import Request
from bozza.exactness import first_difference
from bozza.sampling.sampler import Draw, draw_tokens
from tiny import tiny


def difference(model, prompt, params, seed, plain, other):
    request = Request(0, list(prompt), len(prompt), params, seed, frozenset(), 99)
    return first_difference(model, request, plain, other)


@torch.inference_mode()
def ranked(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argsort(descending=True).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny("llama", dtype=torch.bfloat16)


def test_equal_outputs_have_no_difference(model):
    assert difference(model, [5], SamplingParams(), 0, [3, 4], [3, 4]) is None


def test_a_clear_preference_is_a_bug(model):
    best = ranked(model, [5, 6, 7])
    found = difference(model, [5, 6], SamplingParams(), 0, [7, best[0]], [7, best[150]])
    assert (found.position, found.tokens, found.verdict) == (1, (best[0], best[150]), "bug")


def test_two_tokens_with_equal_logits_are_a_tie(model):
    twin = tiny("llama", dtype=torch.bfloat16)
    best = ranked(twin, [5, 6])
    with torch.no_grad():
        twin.lm_head.weight[best[9]] = twin.lm_head.weight[best[0]]
    found = difference(twin, [5, 6], SamplingParams(), 0, [best[0]], [best[9]])
    assert (found.margin, found.verdict) == (0.0, "tie")
    assert found.bound > 0


def test_an_output_that_ends_early_is_a_bug(model):
    found = difference(model, [5], SamplingParams(), 0, [3, 4, 5], [3, 4])
    assert (found.position, found.tokens, found.margin, found.verdict) == (2, (5, None), None, "bug")


def test_sampled_tokens_are_judged_with_their_noise(model):
    params = SamplingParams(temperature=1.0)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6]]), use_cache=False).logits[0, -1:].float()
    drawn = draw_tokens(logits, [Draw(params, 9, 0)])[0]
    other = int(logits.argmax()) if int(logits.argmax()) != drawn else int(logits.topk(2).indices[0, 1])
    found = difference(model, [5, 6], params, 9, [drawn], [other])
    assert found.margin > 0
    assert found.verdict == ("tie" if found.margin <= found.bound else "bug")


@torch.inference_mode()
def last_logits(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}])
def test_a_token_at_the_edge_of_a_filter_may_flip_and_others_may_not(filters):
    """The third and the fourth token are made equal, and the filter is made to end there."""
    model = tiny("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        rank = ranked(model, [5, 6])
        model.lm_head.weight[rank[3]] = model.lm_head.weight[rank[2]]
    logits = last_logits(model, [5, 6])
    kept = float(logits.softmax(dim=0)[logits > logits[rank[2]]].sum())
    params = SamplingParams(temperature=1.0, **(filters if "top_k" in filters else {"top_p": kept}))
    found = difference(model, [5, 6], params, 0, [rank[0]], [rank[3]])
    assert found.verdict == "tie"
    # Far below the edge nothing flips: seeds under which the noise does not tie them either.
    verdicts = {difference(model, [5, 6], params, s, [rank[0]], [rank[150]]).verdict for s in range(5)}
    assert "bug" in verdicts


def test_report_63_a_shifted_noise_under_top_k_is_a_bug():
    """Negative control: draws of another position, judged as if they were of this one."""
    model = tiny("llama", dtype=torch.bfloat16)
    params = SamplingParams(temperature=1.0, top_k=20)
    logits = last_logits(model, [5, 6])[None]
    verdicts = []
    for seed in range(20):
        right, wrong = (draw_tokens(logits, [Draw(params, seed, at)])[0] for at in (0, 1))
        if right != wrong:
            verdicts.append(difference(model, [5, 6], params, seed, [right], [wrong]).verdict)
    assert len(verdicts) > 5
    assert verdicts.count("bug") > len(verdicts) / 2
