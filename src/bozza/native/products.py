"""Products with packed weights by compiled code, which reads them as oneDNN packed them: nothing is held twice."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bozza.models.products import ZERO, Int8Product, PackedProduct
from bozza.models.sharing import PackedLinear
from bozza.native.building import library, native_works, or_refuse

SOURCE = Path(__file__).parent / "multiply.cpp"
FLAGS = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "bf16", "vnni"))
TILE = 64  # outputs that are packed together
EXTRA = {4: 4, 2: 0}  # bytes for each output that oneDNN keeps behind packed integers, or other numbers


class JobStruct(ctypes.Structure):
    """`Job` of multiply.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "sums", "bias", "result")),
        *((name, ctypes.c_int32) for name in ("rows", "in", "out", "packed", "threads")),
    )


class NativeProduct:
    """Takes the place of a product's `multiply`.

    Args:
        product: whose packed weights it reads.
        code: the library.
    """

    def __init__(self, product: PackedProduct | Int8Product, code: ctypes.CDLL) -> None:
        self._out, self._in = product.shape
        self._held: tuple[Tensor | None, ...]
        self._packed = product.packed  # alive as long as it is pointed at
        if isinstance(product, Int8Product):  # its bias is added elsewhere
            self._held = (product.scale, product.sums, None)
            self._input, self._dtype = torch.uint8, torch.float32
            self._call, group = code.bozza_multiply_integers, 4
        else:
            self._held = (None, None, None if product.bias is None else product.bias.float())
            self._input = self._dtype = torch.bfloat16
            self._call, group = code.bozza_multiply_floats, 2
        tiles = -(-self._out // TILE) * TILE
        self._filled = (torch.ops.mkldnn._nbytes(self._packed) // tiles - EXTRA[group]) * group // 4
        self.fits = self._in % group == 0 and self._filled >= self._in
        pointers = (None if each is None else each.data_ptr() for each in self._held)
        self._pointers = (torch.ops.mkldnn.data_ptr(self._packed), *pointers)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out].

        Raises:
            RuntimeError: x is of another size or dtype, as torch's products have it.
        """
        if x.shape[-1] != self._in or x.dtype != self._input:
            raise RuntimeError(f"x is {x.dtype} [..., {x.shape[-1]}], not {self._input} [..., {self._in}]")
        x = x.contiguous()
        result = x.new_empty(*x.shape[:-1], self._out, dtype=self._dtype)
        rows = x.numel() // self._in
        sizes = rows, self._in, self._out, self._filled, torch.get_num_threads()
        self._call(ctypes.byref(JobStruct(x.data_ptr(), *self._pointers, result.data_ptr(), *sizes)))
        return result


def use_native_products(module: nn.Module) -> int:
    """Let compiled code multiply in the packed layers of a module, where that can read them; says in how many products.

    Raises:
        ModelError: it cannot be compiled or kept.
    """
    if not native_works():
        return 0
    with or_refuse("products"):
        code = library(SOURCE, FLAGS)
    products = {id(part.product): part.product for part in module.modules() if isinstance(part, PackedLinear)}
    return sum(_use(product, code) for product in products.values())


@torch.inference_mode()
def _use(product: Any, code: ctypes.CDLL) -> bool:
    """Whether it multiplies as before, so that the order of the weights is the one that is expected."""
    if not isinstance(product, (PackedProduct, Int8Product)):
        return False
    try:
        native = NativeProduct(product, code)
    except (AttributeError, RuntimeError):  # this torch does not say where packed weights are
        return False
    if native.fits and _agrees(native, product):
        product.instead = native
    return product.instead is not None


def _agrees(native: NativeProduct, product: PackedProduct | Int8Product) -> bool:
    draw = torch.Generator().manual_seed(0)
    if isinstance(product, Int8Product):
        x = torch.randint(1, 2 * ZERO, (2, product.shape[1]), generator=draw, dtype=torch.uint8)
        return torch.equal(native(x), product.multiply(x))
    x = torch.randn(2, product.shape[1], generator=draw).bfloat16()
    found, expected = native(x).float(), product.multiply(x).float()
    # Sums in float32 in another order, and one rounding to 8 bits.
    return bool(((found - expected).abs() <= expected.abs() / 128 + expected.abs().max() / 1000).all())
