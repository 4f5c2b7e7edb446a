"""The ragged runner against plain forward passes, on every architecture that is known to work."""

import random

import pytest
import torch

from bozza.core import Draft
from bozza.errors import UnsupportedModel
from bozza.models.attention import attending
from bozza.models.probe import load_runner, probe
from bozza.models.runner import RaggedRunner, Row
from tiny import ARCHITECTURES, VOCAB, WRONG_WHEN_RAGGED, tiny


def close(a, b):
    return float((a - b).abs().max()) < 2e-4 * max(1.0, float(b.abs().max()))


@torch.inference_mode()
def plain(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_known_architectures_pass_the_probe_and_stay_as_they_were(architecture):
    model = tiny(architecture)
    before = model.config._attn_implementation
    error, bound = probe(load_runner(model), model)
    assert error <= bound
    assert error < 2e-5
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("architecture", WRONG_WHEN_RAGGED)
def test_models_that_would_be_silently_wrong_are_refused_in_one_line(architecture):
    with pytest.raises(UnsupportedModel) as caught:
        load_runner(tiny(architecture))
    assert "cannot run in ragged passes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_probe_itself_notices_a_recurrent_state(monkeypatch):
    monkeypatch.setattr("bozza.models.probe._declared_obstacle", lambda model: None)
    with pytest.raises(UnsupportedModel):
        load_runner(tiny("lfm2"))


def test_the_probe_notices_a_wrong_scale(monkeypatch):
    """Negative control: attention that is slightly off."""
    from bozza.models import attention

    real = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda q, *rest: real(q * 1.01, *rest))
    with pytest.raises(UnsupportedModel, match="other logits"):
        load_runner(tiny("llama"))


def test_the_probe_notices_what_is_not_a_number(monkeypatch):
    from bozza.models import attention

    real = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda q, *rest: real(q, *rest) * float("nan"))
    with pytest.raises(UnsupportedModel, match="other logits"):
        load_runner(tiny("llama"))


def test_a_window_that_only_the_mask_knows_is_noticed():
    """The probe's texts are shorter than the window, so its logits alone would not tell."""
    with pytest.raises(UnsupportedModel, match="sliding window"):
        load_runner(tiny("qwen2_moe"))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_whole_pass_are_refused(rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
    parameters |= {"original_max_position_embeddings": 128}
    with pytest.raises(UnsupportedModel, match=rope):
        load_runner(tiny("llama", rope_parameters=parameters))


def test_a_failing_model_is_refused_with_its_reason():
    model = tiny("llama")
    model.forward = lambda **kwargs: (_ for _ in ()).throw(ValueError("no such thing\nsecond line"))
    with pytest.raises(UnsupportedModel, match=r"ValueError: no such thing\)"):
        load_runner(model)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_any_mixture_of_rows_gives_plain_logits(architecture):
    """Random chunks, drafts, trees and rollbacks of several requests, across padded lengths and cache growth."""
    model = tiny(architecture, max_position_embeddings=1024)
    runner = RaggedRunner(model)
    random.seed(0)
    texts = [[random.randrange(3, VOCAB) for _ in range(n)] for n in (300, 290, 140, 40)]
    expected = [plain(model, text) for text in texts]
    slots = [runner.alloc() for _ in texts]
    done = [0] * len(texts)
    checked = 0
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        rows, judge = [], []
        for i, text in enumerate(texts):
            left = len(text) - done[i]
            if left == 0 or random.random() < 0.3:
                continue
            chunk = min(left, random.choice([1, 1, 1, 2, 40]))
            draft = tree = Draft()
            if chunk == 1 and left > 4:
                ahead = text[done[i] + 1 : done[i] + 4]
                bad = [(token + 1) % VOCAB for token in ahead]
                tree = Draft((bad[0], ahead[0], bad[1], ahead[1], ahead[2]), (-1, -1, 0, 1, 3), ("x",) * 5)
                draft = random.choice([Draft(), Draft.chain(ahead, "x"), Draft.chain(bad, "x"), tree])
            rows.append(Row(slots[i], text[done[i] : done[i] + chunk], draft))
            judge.append((i, chunk, draft, draft is tree and len(tree) > 0))
        if not rows:
            continue
        logits, at = runner.forward(rows).logits, 0
        for i, chunk, draft, is_tree in judge:
            last = done[i] + chunk
            right = {0: last - 1}
            if is_tree:
                right |= {2: last, 4: last + 1, 5: last + 2}
            elif draft.tokens and list(draft.tokens) == texts[i][last : last + 3]:
                right |= {1: last, 2: last + 1, 3: last + 2}
            for row, position in right.items():
                assert close(logits[at + row], expected[i][position])
                checked += 1
            path = [row - 1 for row in right if row]
            runner.keep(slots[i], last, path)
            done[i] = last + len(path)
            assert runner.store.length(slots[i]) == done[i]
            at += 1 + len(draft)
    assert checked > 200


def test_only_wanted_rows_have_logits_in_float32():
    runner = RaggedRunner(tiny("llama", dtype=torch.bfloat16))
    a, b = runner.alloc(), runner.alloc()
    result = runner.forward([Row(a, [3, 4, 5], wanted=False), Row(b, [6, 7], Draft.chain([8], "x"))])
    assert result.logits.shape == (2, VOCAB)
    assert result.logits.dtype == torch.float32
    assert runner.forward([Row(a, [9], wanted=False)]).logits.shape == (0, VOCAB)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_hidden_states_on_demand_equal_the_plain_ones(architecture):
    model = tiny(architecture)
    runner = RaggedRunner(model)
    ids = list(range(3, 23))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    slot = runner.alloc()
    first = runner.forward([Row(slot, ids[:12], wanted=False)], hidden_layers=(0, 1, 2))
    second = runner.forward([Row(slot, ids[12:13], Draft.chain(ids[13:], "x"))], hidden_layers=(1, 2))
    for layer in (1, 2):
        states = torch.cat([first.hidden[layer], second.hidden[layer]])
        assert close(states, expected[layer][0])
    assert set(second.hidden) == {1, 2}
    half = RaggedRunner(tiny(architecture, dtype=torch.bfloat16))
    assert half.forward([Row(half.alloc(), [5])], hidden_layers=(1,)).hidden[1].shape == (1, 64)
    assert runner.forward([Row(slot, [5])]).hidden == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_pass_is_undone(dtype):
    model = tiny("llama", dtype=dtype)
    runner = RaggedRunner(model)
    slot = runner.alloc()
    runner.forward([Row(slot, [3, 4])])

    def broken(**kwargs):
        raise KeyboardInterrupt

    forward, model.forward = model.forward, broken
    with pytest.raises(KeyboardInterrupt):
        runner.forward([Row(slot, [5], Draft.chain([6], "x"))])
    model.forward = forward
    assert runner.store.length(slot) == 2
    assert model.config._attn_implementation != "bozza_ragged"


def test_models_that_share_a_configuration_do_not_disturb_each_other():
    model = tiny("llama")
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert twin.config is model.config
    one, other = RaggedRunner(model), RaggedRunner(twin)
    a, b = one.alloc(), other.alloc()
    assert torch.equal(one.forward([Row(a, [3, 4, 5])]).logits, other.forward([Row(b, [3, 4, 5])]).logits)
    with attending([model.config], None):
        assert model.config._attn_implementation == "bozza_ragged"
    assert torch.equal(plain(model, [3, 4, 5]), plain(twin, [3, 4, 5]))
