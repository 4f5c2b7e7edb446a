"""Layers with one input are one product; whatever the order of calls, each gives what it would give alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bozza.models.sharing import PackedLinear, Shared, seen_together
from products import PlainProduct, draw
from tiny import tiny

SIZES = (64, 32, 30)


@pytest.fixture
def weights() -> list[Tensor]:
    return [draw(size, 48, seed=size) for size in SIZES]


@pytest.fixture
def shared(weights: list[Tensor]) -> Shared:
    return Shared(PlainProduct(weights, None), SIZES)


def calls(shared: Shared) -> int:
    assert isinstance(shared.product, PlainProduct)
    return shared.product.calls


def right(part: Tensor, x: Tensor, weight: Tensor) -> bool:
    return torch.allclose(part, linear(x, weight), rtol=2**-7, atol=2**-7)


# One product for several layers


def test_each_pass_computes_one_product(shared: Shared, weights: list[Tensor]) -> None:
    for count in (1, 2):
        x = draw(1, 5, 48, seed=count)
        assert all(right(shared.part(index, x), x, weight) for index, weight in enumerate(weights))
        assert calls(shared) == count


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_layer_has_its_own_weight(shared: Shared, weights: list[Tensor], index: int) -> None:
    assert torch.equal(shared.weight(index), weights[index])


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1), (0, 0, 1), (2, 2, 2), (1, 0, 2)])
def test_any_order_of_calls_is_right(shared: Shared, weights: list[Tensor], order: Sequence[int]) -> None:
    for turn in range(3):
        x = draw(5, 48, seed=turn)
        assert all(right(shared.part(index, x), x, weights[index]) for index in order)


def test_another_input_is_computed_anew(shared: Shared, weights: list[Tensor]) -> None:
    """Also one of the same shape, and one of the same numbers, which may change before the next layer comes."""
    x, y = draw(5, 48), draw(5, 48, seed=1)
    assert right(shared.part(0, x), x, weights[0])
    assert right(shared.part(1, y), y, weights[1])
    assert right(shared.part(1, x), x, weights[1])
    assert right(shared.part(2, same := x.clone()), same, weights[2])
    assert calls(shared) == 4


def test_an_interrupted_pass_leaves_nothing_to_the_next(shared: Shared, weights: list[Tensor]) -> None:
    for seed, reached in enumerate((1, 2, 1, 3)):
        x = draw(5, 48, seed=seed)
        assert all(right(shared.part(index, x), x, weights[index]) for index in range(reached))
    assert calls(shared) == 4


def test_an_input_is_let_go_when_the_last_layer_has_had_it(shared: Shared) -> None:
    x = draw(5, 48)
    gone = weakref.ref(x)
    for index in range(len(SIZES)):
        shared.part(index, x)
    del x
    gc.collect()
    assert gone() is None


def test_a_layer_by_itself_holds_nothing(weights: list[Tensor]) -> None:
    shared = Shared(PlainProduct(weights[:1], None), SIZES[:1])
    x = draw(5, 48)
    gone = weakref.ref(x)
    assert right(shared.part(0, x), x, weights[0])
    x += 1
    assert right(shared.part(0, x), x, weights[0])  # nothing is remembered
    assert calls(shared) == 2
    del x
    gc.collect()
    assert gone() is None


def test_a_packed_layer_looks_like_the_one_that_it_replaces(weights: list[Tensor]) -> None:
    for biased in (True, False):
        old = nn.Linear(48, 32, bias=biased).bfloat16()
        new = PackedLinear(Shared(PlainProduct(weights, None), SIZES), 1, old)
        assert repr(new) == repr(old).replace("Linear", "PackedLinear")
        assert (new.in_features, new.out_features) == (48, 32)
        assert torch.equal(new.weight, weights[1])
        assert right(new(x := draw(2, 3, 48)), x, weights[1])


# Which layers have one input


QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
TOGETHER: dict[str, list[list[str]]] = {
    "llama": [QKV, ["mlp.gate_proj", "mlp.up_proj"]],
    "qwen2": [QKV, ["mlp.gate_proj", "mlp.up_proj"]],
    "qwen3": [QKV, ["mlp.gate_proj", "mlp.up_proj"]],
    "gemma2": [QKV, ["mlp.gate_proj", "mlp.up_proj"]],
    "mixtral": [QKV],
    "opt": [QKV],
    "deepseek_v3": [["mlp.gate_proj", "mlp.up_proj"]],  # of the one layer that is dense
    "phi3": [],  # they are one layer there
    "gpt_neox": [],
}


def names_of(model: Any) -> list[str]:
    return [name for name, each in model.named_modules() if type(each) is nn.Linear]


@pytest.mark.parametrize("architecture", TOGETHER)
def test_what_is_computed_together_in_models(architecture: str) -> None:
    model = tiny(architecture)
    names = names_of(model)
    groups = seen_together(model, names)
    assert sorted(name for group in groups for name in group) == sorted(names)
    first = [[name.partition("layers.0.")[2] for name in group] for group in groups if "layers.0." in group[0]]
    assert [group for group in first if len(group) > 1] == TOGETHER[architecture]
    assert ["lm_head"] in groups
    assert all(not module._forward_pre_hooks for module in model.modules())


class Toy(nn.Module):
    """Two layers, a third one with a bias, and what a pass does with them."""

    def __init__(self, act: Callable[[Toy, Tensor], Any], padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(10, 48, padding_idx=padding)
        self.q, self.k = (nn.Linear(48, 32, bias=False) for _ in "qk")
        self.b = nn.Linear(48, 32)
        self._act = act

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return self._act(self, self.rows(input_ids) * 1)


def of_a_copy(toy: Toy, x: Tensor) -> Any:
    return toy.q(x), toy.k(x.clone())


def in_between(toy: Toy, x: Tensor) -> Any:
    one = toy.q(x)
    x.mul_(2)
    return one, toy.k(x)


def twice(toy: Toy, x: Tensor) -> Any:
    return toy.q(x), toy.k(x), toy.q(x)


def again_later(toy: Toy, x: Tensor) -> Any:
    return toy.q(x), toy.k(x), toy.b(x), toy.k(x + 1)


ACTS: dict[str, tuple[Callable[[Toy, Tensor], Any], list[list[str]]]] = {
    "of one input": (lambda toy, x: (toy.q(x), toy.k(x)), [["q", "k"], ["b"]]),
    "in the other order": (lambda toy, x: (toy.k(x), toy.q(x)), [["k", "q"], ["b"]]),
    "of a copy": (of_a_copy, [["q"], ["k"], ["b"]]),
    "changed in between": (in_between, [["q"], ["k"], ["b"]]),
    "one after the other": (lambda toy, x: toy.k(torch.cat([toy.q(x)] * 2, -1)[..., :48]), [["q"], ["k"], ["b"]]),
    "called twice": (twice, [["q"], ["k"], ["b"]]),
    "one called again": (again_later, [["q"], ["k"], ["b"]]),
    "with and without a bias": (lambda toy, x: (toy.q(x), toy.b(x), toy.k(x)), [["q"], ["b"], ["k"]]),
    "none called": (lambda toy, x: x, [["q"], ["k"], ["b"]]),
}


@pytest.mark.parametrize("case", ACTS)
def test_layers_are_one_only_with_one_unchanged_input(case: str) -> None:
    act, groups = ACTS[case]
    assert sorted(seen_together(Toy(act), ["q", "k", "b"])) == sorted(groups)


def test_a_change_shows_although_rows_for_padding_are_zero() -> None:
    assert sorted(seen_together(Toy(in_between, padding=0), ["q", "k"])) == [["k"], ["q"]]


def test_layers_that_were_not_asked_for_are_left_alone() -> None:
    assert seen_together(Toy(ACTS["of one input"][0]), ["k"]) == [["k"]]
    assert seen_together(Toy(ACTS["of one input"][0]), []) == []


def test_a_pass_that_fails_leaves_no_hooks() -> None:
    def fails(toy: Toy, x: Tensor) -> Any:
        raise RuntimeError(f"no pass of {toy.q(x).shape}")

    toy = Toy(fails)
    with pytest.raises(RuntimeError, match="no pass"):
        seen_together(toy, ["q", "k"])
    assert all(not module._forward_pre_hooks for module in toy.modules())


def test_a_refilled_input_is_computed_anew(shared: Shared, weights: list[Tensor]) -> None:
    x = draw(3, weights[0].shape[1])
    shared.part(0, x)
    x.add_(1)  # after an interrupted pass, the same memory comes with another content
    assert torch.equal(shared.part(0, x), torch.nn.functional.linear(x, weights[0]))
