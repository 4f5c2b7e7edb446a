"""Products with packed weights by compiled code, which reads them as oneDNN packed them: nothing is held twice.

With int8 weights, activations are made integers and results are scaled in the same call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bozza.models.products import Int8Product, PackedProduct
from bozza.models.sharing import PackedLinear
from bozza.native.building import library, native_works, or_refuse

SOURCE = Path(__file__).parent / "multiply.cpp"
FLAGS = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "bf16", "vnni"))
TILE = 64  # outputs that are packed together
EXTRA = {4: 4, 2: 0}  # bytes for each output that oneDNN keeps behind packed integers, or other numbers
LINE = 128  # bytes of a row's inputs that are laid out together
FEW = 6  # rows in bfloat16 that are read where they are


class JobStruct(ctypes.Structure):
    """`Job` of multiply.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "sums", "bias", "result", "panels", "steps")),
        *((name, ctypes.c_int32) for name in ("rows", "in", "out", "packed", "threads")),
    )


class NativeProduct:
    """Takes the place of a product, with its bits if that is int8.

    Args:
        product: whose packed weights it reads.
        code: the library.
    """

    def __init__(self, product: PackedProduct | Int8Product, code: ctypes.CDLL) -> None:
        self._out, self._in = product.shape
        self._packed = product.packed  # alive as long as it is pointed at
        bias = None if product.bias is None else product.bias.float()
        self._held: tuple[Tensor | None, ...]
        self._integers = isinstance(product, Int8Product)
        if isinstance(product, Int8Product):
            self._held = (product.scale, product.sums, bias)
            self._call, group = code.bozza_multiply_integers, 4
        else:
            self._held = (None, None, bias)
            self._call, group = code.bozza_multiply_floats, 2
        tiles = -(-self._out // TILE) * TILE
        self._filled = (torch.ops.mkldnn._nbytes(self._packed) // tiles - EXTRA[group]) * group // 4
        self._laid_out = -(-self._in * 4 // group // LINE) * LINE  # bytes of a row
        self.fits = self._in % group == 0 and self._filled >= self._in
        pointers = (None if each is None else each.data_ptr() for each in self._held)
        self._pointers = (torch.ops.mkldnn.data_ptr(self._packed), *pointers)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] bfloat16 -> [..., out] bfloat16.

        Raises:
            RuntimeError: x is of another size or dtype, as torch's products have it.
        """
        if x.shape[-1] != self._in or x.dtype != torch.bfloat16:
            raise RuntimeError(f"x is {x.dtype} [..., {x.shape[-1]}], not {torch.bfloat16} [..., {self._in}]")
        x = x.contiguous()
        result = x.new_empty(*x.shape[:-1], self._out)
        rows = x.numel() // self._in
        room: tuple[int | None, int | None] = (None, None)
        if self._integers or rows > FEW:
            laid_out = rows * self._laid_out
            held = x.new_empty(laid_out + 4 * rows, dtype=torch.uint8)  # inputs, and a step of each row
            room = (held.data_ptr(), held.data_ptr() + laid_out)
        sizes = rows, self._in, self._out, self._filled, torch.get_num_threads()
        self._call(ctypes.byref(JobStruct(x.data_ptr(), *self._pointers, result.data_ptr(), *room, *sizes)))
        return result


def use_native_products(module: nn.Module) -> int:
    """Let compiled code multiply in the packed layers of a module, where that can read them; says in how many products.

    Layers are compiled for what multiplies in them, so this comes first.

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
    x = torch.randn(2, product.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = native(x).float(), product.in_torch(x).float()
    if isinstance(product, Int8Product):
        return torch.equal(found, expected)
    # Sums in float32 in another order, and one rounding to 8 bits.
    return bool(((found - expected).abs() <= expected.abs() / 128 + expected.abs().max() / 1000).all())
