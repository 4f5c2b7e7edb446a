"""Compiled layers: one graph for each kind, the same bits in every shape of pass, the model's own code elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bozza.errors import ModelError
from bozza.models import compiling
from bozza.models.compiling import CompiledForward, Recorder, compile_layers
from bozza.models.invariance import differing_positions
from bozza.models.packing import pack_model
from bozza.models.probe import load_runner
from bozza.models.runner import RaggedRunner, Row
from products import needs_compiler, needs_int8, needs_packing
from tiny import VOCAB, tiny

IDS = torch.randint(3, VOCAB, (144,), generator=torch.Generator().manual_seed(0)).tolist()


def packed(architecture: str = "llama", quantize: str | None = None, **options: Any) -> Any:
    model = tiny(architecture, dtype=torch.bfloat16, **options)
    pack_model(model, quantize)
    return model


@torch.inference_mode()
def plain_logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


def ragged_logits(runner: RaggedRunner) -> Tensor:
    slot = runner.alloc()
    logits = runner.forward([Row(slot, IDS, wanted=len(IDS))]).logits
    runner.free(slot)
    return logits


def forwards(model: Any) -> list[CompiledForward]:
    return [part.forward for part in model.modules() if isinstance(part.__dict__.get("forward"), CompiledForward)]


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("this was to be called no more")


@needs_compiler
@pytest.mark.parametrize(
    ("architecture", "quantize", "kinds"),
    [
        ("llama", None, 1),
        ("gemma2", None, 2),  # windows, capped scores
        ("mixtral", None, 1),
        pytest.param("qwen2", "int8", 1, marks=needs_int8),  # biases
    ],
)
def test_compiled_layers_are_the_model(architecture: str, quantize: str | None, kinds: int) -> None:
    model = packed(architecture, quantize)
    before = ragged_logits(load_runner(packed(architecture, quantize)))
    runner = load_runner(model, compiled=True)
    assert len(forwards(model)) == 3
    assert len({id(each._function) for each in forwards(model)}) == kinds
    for each in forwards(model):  # from now on neither torch's lookup nor the layer's own code
        each._trace = each._plain = never
    assert not any(differing_positions(runner, IDS, sizes=(1, 3, 16), requests=3, head=100).values())
    assert (ragged_logits(runner) - before).norm() <= 0.02 * before.norm()


@needs_compiler
def test_outside_of_ragged_passes_the_layers_own_code_runs() -> None:
    model = packed()
    before = plain_logits(model)
    load_runner(model, compiled=True)
    for each in forwards(model):
        each._function = never
    assert torch.equal(plain_logits(model), before)


@needs_compiler
def test_hidden_states_are_still_to_be_had() -> None:
    plain, compiled = load_runner(packed()), load_runner(packed(), compiled=True)
    ours, theirs = (
        each.forward([Row(each.alloc(), IDS[:20])], hidden_layers=[0, 2, 3]).hidden for each in (compiled, plain)
    )
    for layer in (0, 2, 3):
        assert (ours[layer] - theirs[layer]).float().norm() <= 0.02 * theirs[layer].float().norm()


@needs_compiler
def test_products_of_one_input_stay_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed()
    runner = load_runner(model, compiled=True)
    counted: list[int] = []
    products = {
        id(part._shared): part._shared.product for part in model.model.layers.modules() if hasattr(part, "_shared")
    }
    for product in products.values():
        monkeypatch.setattr(product, "run", lambda x, real=product.run: counted.append(1) or real(x))
    ragged_logits(runner)
    assert len(counted) == len(products) == 3 * 4


# What cannot be had


def refusal(model: Any) -> str:
    before = plain_logits(model)
    runner = load_runner(model)
    ragged = ragged_logits(runner)
    with pytest.raises(ModelError) as caught:
        compile_layers(runner, model)
    assert not forwards(model)
    assert torch.equal(plain_logits(model), before)
    assert torch.equal(ragged_logits(runner), ragged)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("drop compile")
    return str(caught.value)


@pytest.mark.parametrize("model", [lambda: tiny("llama"), lambda: tiny("gpt2", dtype=torch.bfloat16)])
def test_models_without_packed_layers_are_refused(model: Callable[[], Any]) -> None:
    assert "in bfloat16, on a CPU with AVX-512 or better" in refusal(model())


@needs_packing
def test_a_missing_compiler_is_said() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "there is no C++ compiler: install g++ or clang" in refusal(packed(intermediate_size=112))


@needs_compiler
def test_layers_of_too_many_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KINDS", 1)
    assert "its layers are of more than 1 kind" in refusal(packed("gemma2"))


class Drifting(torch.nn.Module):
    """A layer that takes something else than what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.drift = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drift


@needs_compiler
def test_what_else_changes_from_pass_to_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_ragged", lambda: True)
    layer = Drifting()
    forward = CompiledForward(layer, Recorder())
    assert torch.equal(forward(torch.zeros(1, 3, 2)), torch.ones(1, 3, 2))
    layer.drift = torch.ones(1)
    with pytest.raises(ModelError, match="something else that changes"):
        forward(torch.zeros(1, 5, 2))


@needs_compiler
def test_two_calls_of_one_length_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_ragged", lambda: True)
    forward = CompiledForward(Drifting(), Recorder())
    forward(torch.zeros(1, 3, 2))
    with pytest.raises(ModelError, match="number of tokens"):
        forward(torch.zeros(1, 3, 2))
