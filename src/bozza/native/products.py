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
CLOSE = 0.02  # error of a product in bfloat16, as a part of its largest result


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
            self._dtype, self._call, group = torch.float32, code.bozza_multiply_integers, 4
        else:
            self._held = (None, None, None if product.bias is None else product.bias.float())
            self._dtype, self._call, group = torch.bfloat16, code.bozza_multiply_floats, 2
        tiles = -(-self._out // TILE) * TILE
        self._filled = (torch.ops.mkldnn._nbytes(self._packed) // tiles - EXTRA[group]) * group // 4
        self.fits = self._in % group == 0 and self._filled >= self._in
        pointers = (None if each is None else each.data_ptr() for each in self._held)
        self._pointers = (torch.ops.mkldnn.data_ptr(self._packed), *pointers)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
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
    native = NativeProduct(product, code)
    if not native.fits:
        return False
    draw = torch.Generator().manual_seed(0)
    if isinstance(product, Int8Product):
        x = torch.randint(1, 2 * ZERO, (2, product.shape[1]), generator=draw, dtype=torch.uint8)
        same = torch.equal(native(x), product.multiply(x))
    else:
        x = torch.randn(2, product.shape[1], generator=draw).bfloat16()
        expected = product.multiply(x).float()
        same = bool((native(x).float() - expected).abs().max() <= CLOSE * expected.abs().max())
    if same:
        product.instead = native
    return same
