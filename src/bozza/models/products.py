"""Products of activations with the weights of linear layers, in the forms in which a CPU reads them fastest.

Both forms are oneDNN's, through operators of torch; compiled code may read them in their place (`bozza.native`). A
product of few rows costs what reading its weights costs; a plain `Linear` in bfloat16 reads them at little more than
half of the memory's speed, since their order suits another kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bozza.errors import ModelError
from bozza.models.pages import in_large_pages

ROWS = 8  # what oneDNN is told to expect when it chooses the order of packed weights
LEVELS = 127  # of an int8 on either side of zero; -128 is left out, so that a weight and its negative round alike
ZERO = 128  # what stands for zero in unsigned activations
BLOCK = 4096  # outputs that are quantized at a time
WIDEST = 65_536  # inputs; the sums of wider products could overflow 32 bits (255 * 127 * 65,536 < 2 ** 31)


class Product(Protocol):
    """x @ weight.T + bias for one weight [out, in], or for several put below each other."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] bfloat16 -> [..., out] bfloat16."""
        ...

    def weight(self) -> Tensor:
        """[out, in] bfloat16, as it is computed with."""
        ...


class Kernel:
    """What multiplies, as a call for eager code and for compiled code, whose graphs cannot hold packed weights.

    A graph holds a number in their place, as a tensor, so that one graph serves all layers. `instead`, where it is set,
    computes the whole product (see `bozza.native.products`); it is set before layers are compiled.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape  # [out, in]
        self.instead: Callable[[Tensor], Tensor] | None = None
        number = next(_numbers)
        self._number = torch.tensor(number)
        _kernels[number] = self

    def __call__(self, x: Tensor) -> Tensor:
        """See `Product`."""
        return self.in_torch(x) if self.instead is None else self.call(x, x.dtype)

    def call(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`run`, wherever it is called; its result is of this dtype."""
        if torch.compiler.is_compiling():
            result: Tensor = torch.ops.bozza.multiply(x, self._number, self.shape[0], dtype)
            return result
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """`instead` if there is one, or else `multiply`."""
        return self.multiply(x) if self.instead is None else self.instead(x)

    def in_torch(self, x: Tensor) -> Tensor:
        """The product as long as `instead` is not set, with torch's operators."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """The part of it for which one of oneDNN's is called, [..., in] -> [..., out]."""
        raise NotImplementedError


_numbers = itertools.count()
_kernels: WeakValueDictionary[int, Kernel] = WeakValueDictionary()
torch.library.define("bozza::multiply", "(Tensor x, Tensor kernel, SymInt outputs, ScalarType dtype) -> Tensor")


def _multiply(x: Tensor, kernel: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    return _kernels[int(kernel)].run(x)


def _multiply_shape(x: Tensor, kernel: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs, dtype=dtype)


torch.library.impl("bozza::multiply", "CPU", _multiply)
torch.library.register_fake("bozza::multiply", _multiply_shape)


class PackedProduct(Kernel):
    """bfloat16 weights in oneDNN's own order. Each row of the result has the bits that `Linear` gives it."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__((sum(map(len, weights)), weights[0].shape[1]))
        self.packed = in_large_pages(torch.ops.mkldnn._reorder_linear_weight(_below(weights), ROWS))
        self.bias = bias

    def in_torch(self, x: Tensor) -> Tensor:
        """See `Kernel`."""
        return self.call(x, x.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """See `Kernel`."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result

    def weight(self) -> Tensor:
        """See `Product`."""
        dense: Tensor = self.packed.to_dense()
        return dense


class Int8Product(Kernel):
    """int8 weights with a scale for each output, int8 activations with a scale for each row (W8A8, dynamic).

    Sums of integers are exact, so a row has the same bits whatever shares its pass. Round-to-nearest symmetric scales
    by the largest magnitude; see Jacob et al., CVPR 2018, section 2, for the arithmetic.

    Raises:
        ModelError: the product is too wide for exact sums.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        width = weights[0].shape[1]
        if width > WIDEST:
            raise ModelError(f"int8 products have at most {WIDEST} inputs, this one {width}: drop quantize")
        super().__init__((sum(map(len, weights)), width))
        ints = torch.empty(self.shape, dtype=torch.int8)
        self.scale = torch.empty(len(ints))
        first = 0
        for part in (
            part for weight in weights for part in torch.split(weight.detach(), BLOCK)
        ):  # float32 copies stay small
            place = slice(first, first := first + len(part))
            ints[place], self.scale[place] = quantize_channels(part)
        self.packed = in_large_pages(torch.ops.onednn.qlinear_prepack(ints, None))
        self.sums = ints.sum(dim=1, dtype=torch.int32)
        self._zeros = torch.zeros(len(ints), dtype=torch.int32)
        self.bias = None if bias is None else bias.float()

    def in_torch(self, x: Tensor) -> Tensor:
        """See `Kernel`."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.shape[0])
        levels, scale = quantize_rows(x)
        out = self.call(levels, torch.float32).mul_(scale)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)

    def weight(self) -> Tensor:
        """See `Product`."""
        out, width = self.shape
        dense = torch.empty(out, width, dtype=torch.bfloat16)
        for first in range(0, width, ROWS):  # a product with rows of the identity shows columns, whatever the order
            rows = torch.full((min(ROWS, width - first), width), ZERO, dtype=torch.uint8)
            rows[:, first : first + ROWS].diagonal().add_(1)
            dense[:, first : first + ROWS] = self.multiply(rows).T
        return dense

    def multiply(self, levels: Tensor) -> Tensor:
        """See `Kernel`; of `quantize_rows`' integers, in steps of each row."""
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.packed, self.scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int8, and the float32 value [out] of a step of each output."""
    exact = weight.float()
    scale = exact.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny).div_(LEVELS)
    return exact.div_(scale[:, None]).round_().to(torch.int8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., size] bfloat16 as uint8 around ZERO, and the float32 value [..., 1] of a step in each row.

    In a row of zeros a step is zero, and the integers mean nothing.
    """
    scale = x.abs().amax(dim=-1, keepdim=True).float().div_(LEVELS)
    # Adding a half and cutting off is rounding; by way of int16, since from float to uint8 there is no fast path.
    return x.float().div_(scale).add_(ZERO + 0.5).to(torch.int16).to(torch.uint8), scale


def _below(weights: Sequence[Tensor]) -> Tensor:
    return weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])


def packing_works() -> bool:
    """Whether this processor and this torch multiply packed bfloat16 weights natively: AVX-512 or better."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _agrees(PackedProduct, 0.0)
    except (AttributeError, RuntimeError):  # an operator that this torch lacks, or refuses here
        return False


def int8_works() -> bool:
    """Whether this processor sums int8 products natively (VNNI or AMX) and exactly."""
    native: Any = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    try:
        return bool(native()) and _agrees(Int8Product, 0.05)
    except (AttributeError, RuntimeError):
        return False


def _agrees(kind: type[PackedProduct] | type[Int8Product], tolerance: float) -> bool:
    """Whether a small product is within this part of the largest result of what `Linear` gives."""
    draw = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 48, generator=draw).bfloat16() for n in (32, 4))
    plain = torch.nn.functional.linear(x, weight)
    return bool((kind([weight], None)(x) - plain).abs().max() <= tolerance * plain.abs().max())
