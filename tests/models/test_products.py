"""Packed products have the bits of `Linear`; int8 products are what exact sums of rounded numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bozza.errors import ModelError
from bozza.models import products
from bozza.models.products import (
    LEVELS,
    WIDEST,
    ZERO,
    Int8Product,
    PackedProduct,
    int8_works,
    packing_works,
    quantize_channels,
    quantize_rows,
)
from products import draw, needs_int8, needs_packing

SHAPES = [(3, 5), (17, 33), (64, 64), (211, 64), (96, 576), (49, 2048), (1000, 200)]
ROWS = [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65, 100]
EITHER = [pytest.param(PackedProduct, marks=needs_packing), pytest.param(Int8Product, marks=needs_int8)]
Kind = type[PackedProduct] | type[Int8Product]


def layer(out: int, width: int, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    return draw(out, width, seed=1), draw(out, seed=2) if biased else None


# Packed bfloat16


@needs_packing
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_packed_rows_have_the_bits_of_linear(out: int, width: int, biased: bool) -> None:
    weight, bias = layer(out, width, biased)
    product = PackedProduct([weight], bias)
    x = draw(max(ROWS), width)
    assert [n for n in ROWS if not torch.equal(product(x[:n]), linear(x[:n], weight, bias))] == []
    for shape in ((1, 40), (2, 20), (4, 2, 5)):  # as layers of models are called
        one = x[:40].view(*shape, width)
        assert torch.equal(product(one), linear(one, weight, bias))


@needs_packing
def test_packed_rows_are_taken_from_anywhere() -> None:
    weight, bias = layer(48, 32, True)
    product = PackedProduct([weight], bias)
    for x in (draw(32, 6).T, draw(6, 64)[:, ::2], draw(12, 32)[::2], draw(1, 32).expand(5, 32)):
        assert torch.equal(product(x), linear(x, weight, bias))


@needs_packing
def test_packed_layers_below_each_other_keep_their_bits() -> None:
    weights = [draw(out, 64, seed=out) for out in (64, 32, 30, 1)]
    bias = draw(127)
    product = PackedProduct(weights, bias)
    assert torch.equal(product.weight(), torch.cat(weights))
    for n in ROWS:
        x = draw(n, 64, seed=n)
        alone = [linear(x, weight, part) for weight, part in zip(weights, bias.split([64, 32, 30, 1]), strict=True)]
        assert torch.equal(product(x), torch.cat(alone, dim=1))


@needs_packing
@pytest.mark.parametrize(("out", "width"), [(1, 1), *SHAPES])
def test_packed_weights_come_back_as_they_were(out: int, width: int) -> None:
    weight, bias = layer(out, width, True)
    assert torch.equal(PackedProduct([weight], bias).weight(), weight)


# int8: the arithmetic


def test_rows_are_rounded_to_within_half_a_step() -> None:
    x = draw(40, 64) * torch.logspace(-30, 30, 40)[:, None].bfloat16()
    levels, scale = quantize_rows(x)
    assert levels.dtype == torch.uint8
    assert scale.shape == (40, 1)
    assert torch.equal(scale, x.float().abs().amax(dim=1, keepdim=True) / LEVELS)  # of each row, not of the batch
    steps = x.float() / scale - (levels.float() - ZERO)
    assert float(steps.abs().max()) <= 0.5001
    assert float(steps.mean().abs()) < 0.03  # a half too much or too little would show
    assert int(levels.min()) >= ZERO - LEVELS


def test_a_row_and_its_negative_are_rounded_alike() -> None:
    x = draw(30, 64)
    levels, scale = quantize_rows(x)
    mirrored, same = quantize_rows(-x)
    halves = ((x.float() / scale) % 1 - 0.5).abs() < 1e-3  # are always rounded up
    assert torch.equal(scale, same)
    assert bool(((levels.int() + mirrored.int() == 2 * ZERO) | halves).all())


def test_the_smallest_and_the_largest_numbers_fit() -> None:
    tiny, largest = torch.finfo(torch.bfloat16).tiny, torch.finfo(torch.bfloat16).max
    x = torch.tensor([[tiny, -tiny, 0.0], [largest, -largest, 0.0], [0.0, 0.0, -0.0]]).bfloat16()
    levels, scale = quantize_rows(x)
    assert levels[:2].tolist() == [[ZERO + LEVELS, ZERO - LEVELS, ZERO]] * 2
    assert bool(scale.isfinite().all())
    assert float(scale[2]) == 0.0  # whatever its integers are


def test_channels_are_rounded_to_within_half_a_step() -> None:
    weight = draw(40, 64) * torch.logspace(-30, 30, 40)[:, None].bfloat16()
    ints, scale = quantize_channels(weight)
    assert ints.dtype == torch.int8
    assert torch.equal(scale, weight.float().abs().amax(dim=1) / LEVELS)
    assert float((weight.float() / scale[:, None] - ints).abs().max()) <= 0.5001
    assert bool((ints.abs().amax(dim=1) == LEVELS).all())
    mirrored, same = quantize_channels(-weight)
    assert torch.equal(mirrored, -ints)
    assert torch.equal(same, scale)


def test_weights_of_zero_stay_zero() -> None:
    ints, scale = quantize_channels(torch.zeros(3, 8).bfloat16())
    assert not ints.any()
    assert bool((scale > 0).all())


def written_out(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The product in plain torch, by whole numbers."""
    levels, step = quantize_rows(x)
    ints, scale = quantize_channels(torch.cat(list(weights)))
    sums = (levels.long() - ZERO) @ ints.long().T
    return (sums.float() * scale * step + (0.0 if bias is None else bias.float())).bfloat16()


@needs_int8
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_int8_products_are_the_sums_of_the_rounded_numbers(out: int, width: int, biased: bool) -> None:
    weight, bias = layer(out, width, biased)
    x = draw(21, width)
    expected = written_out(x, [weight], bias)
    torch.testing.assert_close(Int8Product([weight], bias)(x), expected, rtol=2**-7, atol=1e-5)


@needs_int8
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_int8_rows_have_the_same_bits_whatever_shares_the_pass(out: int, width: int, biased: bool) -> None:
    weight, bias = layer(out, width, biased)
    product = Int8Product([weight], bias)
    x = draw(40, width) * torch.logspace(-3, 3, 40)[torch.randperm(40), None].bfloat16()
    alone = torch.cat([product(row) for row in x.split(1)])
    assert [n for n in range(2, 41) if not torch.equal(product(x[:n]), alone[:n])] == []
    assert torch.equal(product(x.flip(0)), alone.flip(0))
    assert torch.equal(product(x.view(2, 20, width)), alone.view(2, 20, out))
    assert torch.equal(product(x.T.contiguous().T), alone)
    assert torch.equal(product(x.view(2, 20, width).transpose(0, 1)), alone.view(2, 20, out).transpose(0, 1))
    assert torch.equal(product(x[7]), alone[7])


@needs_int8
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_int8_is_near_the_exact_product_and_is_not_it(out: int, width: int, biased: bool) -> None:
    weight, bias = layer(out, width, biased)
    x = draw(64, width)
    exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
    error = (Int8Product([weight], bias)(x).float() - exact).norm() / exact.norm()
    assert 0.001 < float(error) < 0.02


@needs_int8
@pytest.mark.parametrize(("out", "width"), [(1, 1), *SHAPES])
def test_int8_weights_come_back_as_they_are_computed_with(out: int, width: int) -> None:
    weight = layer(out, width, False)[0]
    ints, scale = quantize_channels(weight)
    assert torch.equal(Int8Product([weight], None).weight(), (ints * scale[:, None]).bfloat16())


@needs_int8
def test_int8_layers_below_each_other_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, bias = [draw(out, 64, seed=out) for out in (64, 31, 1)], draw(96)
    x = draw(9, 64)
    alone = [Int8Product([weight], b) for weight, b in zip(weights, bias.split([64, 31, 1]), strict=True)]
    for block in (products.BLOCK, 7):  # outputs that are quantized at a time
        monkeypatch.setattr(products, "BLOCK", block)
        together = Int8Product(weights, bias)
        assert torch.equal(together(x), torch.cat([product(x) for product in alone], dim=1))
        assert torch.equal(together.weight(), torch.cat([product.weight() for product in alone]))


@needs_int8
def test_the_widest_sums_are_exact_and_wider_ones_refused() -> None:
    ones = torch.ones(2, WIDEST, dtype=torch.bfloat16)
    for x, weight in ((ones, ones), (-ones, ones), (ones, -ones), (-ones, -ones)):
        sign = float(x[0, 0] * weight[0, 0])
        assert torch.equal(Int8Product([weight], None)(x), torch.full((2, 2), sign * WIDEST, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match=f"at most {WIDEST} inputs, this one {WIDEST + 1}: drop quantize") as caught:
        Int8Product([draw(2, WIDEST + 1)], None)
    assert "\n" not in str(caught.value)


# Both


@pytest.mark.parametrize("kind", EITHER)
def test_nothing_and_one_row_have_the_shapes_of_linear(kind: Kind) -> None:
    weight, bias = layer(48, 32, True)
    product = kind([weight], bias)
    for shape in ((0, 32), (1, 0, 32), (32,), (1, 1, 32)):
        out = product(torch.zeros(shape).bfloat16())
        assert out.shape == (*shape[:-1], 48)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, bias.expand_as(out))


@pytest.mark.parametrize("kind", EITHER)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf"), 3e37])
def test_what_is_no_number_stays_in_its_row(kind: Kind, value: float) -> None:
    weight, bias = layer(48, 32, True)
    product = kind([weight], bias)
    x = draw(5, 32)
    clean = product(x)
    x[1, 3] = value
    out = product(x)
    assert torch.equal(out[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])
    if value != value:
        assert bool(out[1].isnan().all())
    elif value in (float("inf"), -float("inf")):
        assert not out[1].isfinite().any()
    else:
        torch.testing.assert_close(out[1], linear(x, weight, bias)[1], rtol=0.02, atol=1e36)


@pytest.mark.parametrize("kind", EITHER)
def test_a_row_of_zeros_gives_the_bias_alone(kind: Kind) -> None:
    weight, bias = layer(48, 32, True)
    x = draw(5, 32)
    clean = kind([weight], bias)(x)
    x[1], x[3] = 0.0, -0.0
    out = kind([weight], bias)(x)
    assert torch.equal(out[[1, 3]], bias.expand(2, 48))
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])
    assert not kind([weight], None)(x)[[1, 3]].any()


@pytest.mark.parametrize("kind", EITHER)
def test_weights_of_zero_give_zero(kind: Kind) -> None:
    weight = layer(48, 32, False)[0]
    weight[3] = 0.0
    product = kind([weight], None)
    assert not product(draw(5, 32))[:, 3].any()
    assert not product.weight()[3].any()
    assert bool(product(draw(5, 32))[:, 4].any())


# Whether they work here


def cannot(*_: Any) -> Any:
    raise RuntimeError("not on this processor")


def test_without_the_instructions_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert not packing_works()


def test_without_the_instructions_there_is_no_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False, raising=False)
    assert not int8_works()
    monkeypatch.delattr(torch.cpu, "_is_vnni_supported")
    assert not int8_works()


@pytest.mark.parametrize(("kind", "works"), [(PackedProduct, packing_works), (Int8Product, int8_works)])
def test_an_operator_that_is_missing_or_refuses_is_no_error(
    kind: Kind, works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True, raising=False)
    monkeypatch.setattr(kind, "__init__", cannot)
    assert not works()
    monkeypatch.setattr(kind, "__init__", lambda *_: torch.ops.mkldnn.no_such_operator)
    assert not works()


@pytest.mark.parametrize(
    ("kind", "works", "off"),
    [
        pytest.param(PackedProduct, packing_works, 1.01, marks=needs_packing),
        pytest.param(Int8Product, int8_works, 1.1, marks=needs_int8),
    ],
)
def test_an_operator_that_gives_other_numbers_is_not_used(
    kind: Kind, works: Any, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = kind.__call__
    assert works()
    monkeypatch.setattr(kind, "__call__", lambda self, x: right(self, x) * off)
    assert not works()
