"""A packed model gives the bits that it gave before, a quantized one is refused where it cannot be had."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bozza.errors import ConfigError, ModelError
from bozza.models import packing
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.packing import check_quantize, linears, pack, pack_alone, pack_model
from bozza.models.products import PackedProduct
from bozza.models.runner import Row
from bozza.models.sharing import PackedLinear, seen_together
from products import PlainProduct, draw, needs_int8, needs_packing
from tiny import ARCHITECTURES, VOCAB, WRONG_WHEN_RAGGED, tiny, tiny_head

IDS = torch.randint(3, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
LENGTHS = (2, 5, 8, 19)
CPU = torch.device("cpu")


def bfloat16(architecture: str = "llama", **options: Any) -> Any:
    """With biases that are not zero."""
    model = tiny(architecture, dtype=torch.bfloat16, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = draw(*parameter.shape, seed=len(name))
    return model


@torch.inference_mode()
def logits(model: Any) -> list[Tensor]:
    """Of a text, and of two together, in several lengths."""
    return [model(input_ids=IDS[:count, :length]).logits for count in (1, 2) for length in LENGTHS]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def plain_linears(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if type(each) is nn.Linear]


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are packed on any processor, with products in plain torch."""
    monkeypatch.setattr(packing, "packing_works", lambda: True)
    monkeypatch.setattr(packing, "int8_works", lambda: True)
    monkeypatch.setattr(packing, "PackedProduct", PlainProduct)
    monkeypatch.setattr(packing, "Int8Product", PlainProduct)


# The same bits


@needs_packing
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *WRONG_WHEN_RAGGED, "phi", "starcoder2"])
def test_logits_of_a_packed_model_have_the_bits_that_they_had(architecture: str) -> None:
    model = bfloat16(architecture)
    before = logits(model)
    assert all(bool(each.isfinite().all()) for each in before)
    assert pack_model(model) == "packed"
    assert plain_linears(model) == []
    assert equal(logits(model), before)
    assert equal(logits(model), before)  # nothing was left behind


@needs_packing
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt2", "opt"])
def test_a_tied_head_is_packed_beside_the_embedding_where_that_is_small(architecture: str) -> None:
    model = bfloat16(architecture, tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    before = logits(model)
    assert pack_model(model) == "packed"
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    assert equal(logits(model), before)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize(
    ("vocab", "packed"), [(200, {None, "int8"}), (700, {"int8"}), (4000, set())]
)  # 12, 33 and 73 percent of the bytes
def test_a_tied_head_stays_as_it_is_where_a_copy_would_be_large(
    vocab: int, packed: set[str | None], quantize: str | None
) -> None:
    model = bfloat16(vocab_size=vocab, tie_word_embeddings=True)
    pack_model(model, quantize)
    left = [] if quantize in packed else ["lm_head"]
    assert plain_linears(model) == left
    if left:
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.usefixtures("anywhere")
def test_a_head_of_its_own_is_packed_whatever_its_size() -> None:
    model = bfloat16(vocab_size=4000)
    assert pack_model(model) == "packed"
    assert plain_linears(model) == []


@needs_packing
def test_weights_are_still_to_be_read() -> None:
    model, packed = bfloat16("qwen2"), bfloat16("qwen2")
    pack_model(packed)
    names = plain_linears(model)
    assert len(names) == 22
    assert all(torch.equal(model.get_submodule(n).weight, packed.get_submodule(n).weight) for n in names)


@pytest.mark.parametrize("int8", [pytest.param(False, marks=needs_packing), pytest.param(True, marks=needs_int8)])
def test_a_drafters_own_module_is_quantized_or_packed_and_not_what_it_borrows(
    int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "int8_works", lambda: int8)
    target = bfloat16()
    head = tiny_head(target)
    features = draw(6, head.fc.in_features)

    def guesses() -> Tensor:
        runner = HeadRunner(head)
        return runner.forward([HeadRow(Row(runner.alloc(), IDS[0, :6].tolist(), wanted=6), runner.fuse(features))])[1]

    with torch.inference_mode():
        before = guesses()
        assert len(plain_linears(head)) == 9
        pack_alone(head)
        assert plain_linears(head) == []
        after = guesses()
    assert torch.equal(after, before) != int8
    assert (after - before).abs().max() <= 0.1 * before.abs().max()
    assert len(plain_linears(target)) == 22
    assert head.embed[0] is target.get_input_embeddings()


# Memory


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_two_copies_are_never_held(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a group is packed, the old weights of all groups before it are gone."""
    model = bfloat16("qwen2")
    old = [weakref.ref(each.weight) for each in model.modules() if type(each) is nn.Linear]
    held: list[tuple[int, int]] = []  # new layers, old ones

    class Counting(PlainProduct):
        def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
            del weights  # of the caller
            new = sum(isinstance(each, PackedLinear) for each in model.modules())
            held.append((new, sum(ref() is not None for ref in old)))
            super().__init__([torch.zeros(1, 1)], bias)

    name = "Int8Product" if quantize else "PackedProduct"
    monkeypatch.setattr(packing, name, Counting)
    gc.collect()
    gc.disable()  # they have to go by themselves
    try:
        pack_model(model, quantize)
    finally:
        gc.enable()
    assert len(held) == 3 * 4 + 1
    assert [new + olds for new, olds in held] == [22] * len(held)
    assert [new for new, _ in held[:5]] == [0, 3, 4, 6, 7]
    assert not any(ref() is not None for ref in old)


# What is left alone


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    before = list(model.modules())
    assert pack_model(model) == "plain"
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    head = tiny_head(model)
    pack_alone(head)
    assert len(plain_linears(head)) == 9


def test_without_the_instructions_a_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "packing_works", lambda: False)
    monkeypatch.setattr(packing, "int8_works", lambda: False)
    model = bfloat16()
    head = tiny_head(model)
    assert pack_model(model) == "plain"
    pack_alone(head)
    assert (len(plain_linears(model)), len(plain_linears(head))) == (22, 9)


@pytest.mark.usefixtures("anywhere")
def test_a_second_time_there_is_nothing_left_to_do() -> None:
    model = bfloat16()
    assert pack_model(model) == "packed"
    assert pack_model(model) == "plain"
    model = bfloat16("gpt2", vocab_size=4000, tie_word_embeddings=True)  # its layers are no Linear, its head is large
    assert linears(model) == []
    assert pack_model(model) == "plain"
    pack_alone(nn.LayerNorm(3).bfloat16())


def test_only_plain_layers_in_bfloat16_are_named() -> None:
    class Special(nn.Linear):
        """Computes in its own way."""

    model = bfloat16()
    model.lm_head = model.lm_head.float()
    model.model.layers[0].mlp.up_proj = Special(64, 96, bias=False).bfloat16()
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False, device="meta").bfloat16()
    left = {"lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}
    assert set(linears(model)) == set(plain_linears(bfloat16())) - left


@needs_packing
def test_biases_of_a_group_are_put_below_each_other() -> None:
    """And one without a bias has none."""
    model = bfloat16("qwen2")
    before = logits(model)
    groups = seen_together(model, linears(model))
    biased = [group for group in groups if "q_proj" in group[0]]
    assert [len(group) for group in biased] == [3] * 3
    pack(model, groups, PackedProduct)
    assert equal(logits(model), before)


# int8


@needs_int8
def test_a_quantized_model_is_near_and_not_the_same() -> None:
    model = bfloat16(initializer_range=0.02)
    before = logits(model)
    assert pack_model(model, "int8") == "int8"
    assert plain_linears(model) == []
    for ours, theirs in zip(logits(model), before, strict=True):
        assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.1


@needs_int8
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt_neox", "opt", "phi3", "olmo2"])
def test_a_quantized_model_computes_with_the_weights_that_it_tells(architecture: str) -> None:
    model, was = bfloat16(architecture), bfloat16(architecture)
    pack_model(model, "int8")
    with torch.no_grad():
        for name in plain_linears(was):
            old, new = was.get_submodule(name).weight, model.get_submodule(name).weight
            steps = old.float().abs().amax(dim=1, keepdim=True) / 127
            assert bool(((old.float() - new.float()).abs() <= steps).all())  # half a step, and half of bfloat16
            assert not torch.equal(old, new)


QUANTIZE_REFUSED = [
    ({"quantize": "int4"}, ConfigError, "quantize 'int4': use int8, or leave it out"),
    ({"quantize": ""}, ConfigError, "quantize '': use int8, or leave it out"),
    ({"quantize": "int8", "device": torch.device("cuda:1")}, ModelError, "for CPUs, the model is on cuda:1: drop it"),
    ({"quantize": "int8", "device": torch.device("meta")}, ModelError, "for CPUs, the model is on meta"),
    ({"quantize": "int8", "device": CPU}, ModelError, "needs a processor with VNNI or AMX instructions"),
]


@pytest.mark.parametrize(("given", "error", "says"), QUANTIZE_REFUSED)
def test_what_cannot_be_quantized_is_refused_in_a_line(
    given: Any, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "int8_works", lambda: False)
    with pytest.raises(error) as caught:
        check_quantize(**given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_can_be_quantized_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "int8_works", lambda: pytest.fail("nobody asked"))
    for device in (None, CPU, torch.device("cuda")):
        check_quantize(None, device)
    check_quantize("int8")  # whether it runs here is known with the device
    monkeypatch.setattr(packing, "int8_works", lambda: True)
    check_quantize("int8", CPU)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_stands_between_products_in_bfloat16_only(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    with pytest.raises(ModelError, match="computes around the products in bfloat16: use dtype bfloat16") as caught:
        pack_model(model, "int8")
    assert "\n" not in str(caught.value)
    assert len(plain_linears(model)) == 22


def test_packed_weights_are_not_lost_by_saving(anywhere: None, tmp_path: Any) -> None:
    model = bfloat16()
    pack_model(model)
    with pytest.raises(ModelError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "copy")


def test_a_layer_with_two_names_is_packed_once_for_both(anywhere: None) -> None:
    model = bfloat16()
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.down_proj = first.down_proj
    before = logits(model)
    pack_model(model)
    assert plain_linears(model) == []
    assert second.down_proj is first.down_proj
    assert equal(logits(model), before)


def test_a_model_that_cannot_run_is_packed_without_being_watched(anywhere: None) -> None:
    model = bfloat16()

    def refuse(*_: Any) -> None:
        raise ValueError("not like this")

    hook = model.register_forward_pre_hook(refuse)
    assert pack_model(model) == "packed"
    hook.remove()
    assert plain_linears(model) == []
    assert all(len(each._shared._sizes) == 1 for each in model.modules() if isinstance(each, PackedLinear))
