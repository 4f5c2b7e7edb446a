"""Compiled products: the numbers of the products that they stand for, and a row's bits however many rows there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bozza.models.packing import pack_model
from bozza.models.probe import load_runner
from bozza.models.products import Int8Product, PackedProduct
from bozza.models.sharing import PackedLinear
from bozza.native import products
from bozza.native.building import native_works
from bozza.native.products import NativeProduct, use_native_products
from products import draw, needs_compiler
from tiny import tiny

pytestmark = [needs_compiler, pytest.mark.skipif(not native_works(), reason="not for this processor")]
SHAPES = [(64, 64), (100, 48), (200, 96), (300, 1000), (17, 260), (1536, 576)]  # out, in
MANY = 230  # rows: more than go through a tile at once, and no multiple of those that are computed at once


def native(kind: Any, weights: list[Tensor], bias: Tensor | None = None) -> Any:
    """A product with compiled code in its place."""
    product = kind(weights, bias)
    assert products._use(product, products.library(products.SOURCE, products.FLAGS))
    assert isinstance(product.instead, NativeProduct)
    return product


def in_torch(product: Any, x: Tensor) -> Tensor:
    """What the product gave before."""
    instead, product.instead = product.instead, None
    try:
        return product(x)  # type: ignore[no-any-return]
    finally:
        product.instead = instead


def integers(*shape: int, seed: int) -> Tensor:
    """Rows that int8 holds as they are, in steps of one."""
    whole = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    whole[:, -1] = 127
    return whole


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_summed_exactly(shape: tuple[int, int]) -> None:
    weight, x = integers(*shape, seed=1), integers(MANY, shape[1], seed=2)
    sums = x.double() @ weight.double().T
    assert sums.abs().max() < 1 << 24
    for row in (0, 1, 95, 96, MANY - 1):  # what a sum lacks is what is left of it, to the last bit
        assert not native(Int8Product, [weight], -sums[row].float()).instead(x)[row].any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_have_the_bits_that_they_had(shape: tuple[int, int], biased: bool) -> None:
    product = native(Int8Product, [draw(*shape)], draw(shape[0], seed=1) if biased else None)
    x = draw(MANY, shape[1], seed=2)
    x[3], x[5] = 0, 1.0
    x[6:40] *= 10.0 ** torch.arange(-17, 17)[:, None]
    assert torch.equal(product(x), in_torch(product, x))


def test_a_row_with_numbers_that_are_none_spoils_itself_alone() -> None:
    product, x = native(Int8Product, [draw(100, 96)]), draw(9, 96, seed=2)
    clean = product(x)
    for value in (float("nan"), float("inf"), float("-inf")):
        spoilt = x.clone()
        spoilt[4, 17] = value
        found = product(spoilt)
        assert not found[4].isfinite().any()
        assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_in_bfloat16_are_as_exact_as_before(shape: tuple[int, int], biased: bool) -> None:
    weight, bias, x = draw(*shape), draw(shape[0], seed=1) if biased else None, draw(MANY, shape[1], seed=2)
    product = native(PackedProduct, [weight], bias)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())

    def error(found: Tensor) -> Tensor:
        return (found.double() - exact).norm()

    assert error(product.instead(x)) <= 1.01 * error(in_torch(product, x))


@pytest.mark.parametrize("kind", [PackedProduct, Int8Product])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(kind: Any, shape: tuple[int, int]) -> None:
    product = native(kind, [draw(*shape)])
    x = draw(MANY, shape[1], seed=2)
    whole = product.instead(x)
    for rows in (*range(1, 20), 95, 96, 97, 191, 193):
        assert torch.equal(product.instead(x[MANY - rows :]), whole[MANY - rows :]), rows
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product.instead(x), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [PackedProduct, Int8Product])
def test_shapes_and_memory_orders_are_those_of_the_product(kind: Any) -> None:
    product, x = native(kind, [draw(70, 64), draw(30, 64, seed=1)], draw(100, seed=2)), draw(2, 5, 64, seed=3)
    found = product(x)
    assert (found.shape, found.dtype) == ((2, 5, 100), torch.bfloat16)
    assert torch.equal(product(x.transpose(0, 1)).transpose(0, 1), found)
    assert product(x[:0]).shape == (0, 5, 100)
    assert (found - in_torch(product, x)).float().norm() <= 4e-3 * found.float().norm()


@pytest.mark.parametrize("kind", [PackedProduct, Int8Product])
def test_what_it_is_not_for_is_refused(kind: Any) -> None:
    product, x = native(kind, [draw(64, 48)]), draw(3, 48)
    for wrong in (x.float(), x.repeat(1, 2), x[:, :24]):
        with pytest.raises(RuntimeError, match=r"x is torch\.\w+ \[\.\.\., \d+\], not"):
            product.instead(wrong)


def test_levels_and_weights_at_their_ends_do_not_overflow() -> None:
    weight = torch.ones(64, 65_536, dtype=torch.bfloat16)
    weight[1::2] = -1
    product = native(Int8Product, [weight])
    for sign in (1, -1):
        x = torch.full((7, 65_536), sign, dtype=torch.bfloat16)
        assert torch.equal(product(x), (sign * 65_536.0 * weight[:, 0]).expand(7, 64))


def test_weights_in_another_order_are_left_to_torch() -> None:
    code = products.library(products.SOURCE, products.FLAGS)
    weight = draw(64, 128)
    ends = weight[:, torch.tensor([*range(124), 127, 126, 125, 124])]  # the last inputs stand elsewhere
    for kind in (PackedProduct, Int8Product):
        product: Any = kind([weight], None)
        product.in_torch = kind([ends], None).in_torch
        assert not products._use(product, code)
        assert product.instead is None
    odd: Any = PackedProduct([draw(64, 47)], None)
    assert not products._use(odd, code)
    assert not products._use(object(), code)


def test_a_torch_that_does_not_show_packed_weights_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    product: Any = PackedProduct([draw(64, 64)], None)
    monkeypatch.setattr(product, "packed", torch.ones(64, 64))
    assert not products._use(product, products.library(products.SOURCE, products.FLAGS))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_all_products_of_a_compiled_model_are_native(quantize: str | None) -> None:
    def used(compiled: bool) -> set[bool]:
        model = tiny("llama", dtype=torch.bfloat16)
        pack_model(model, quantize)
        load_runner(model, compiled=compiled)
        parts = [part for part in model.modules() if isinstance(part, PackedLinear)]
        assert len(parts) > 3 * 6
        return {part.product.instead is not None for part in parts}  # type: ignore[attr-defined]

    assert used(compiled=True) == {True}
    assert used(compiled=False) == {False}


def test_other_processors_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "native_works", lambda: False)
    model = tiny("llama", dtype=torch.bfloat16)
    pack_model(model)
    assert use_native_products(model) == 0
