"""For tests of packed and quantized layers: marks for what this processor can do, and a product in plain torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bozza.models.products import int8_works, packing_works

needs_packing = pytest.mark.skipif(
    not packing_works(), reason="this processor or this torch has no products with packed bfloat16 weights"
)
needs_int8 = pytest.mark.skipif(not int8_works(), reason="this processor or this torch has no native int8 products")
needs_compiler = pytest.mark.skipif(
    not packing_works() or not any(map(shutil.which, ("g++", "clang++"))), reason="nothing to compile here, or with"
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal bfloat16 numbers, always the same for the same arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class PlainProduct:
    """`bozza.models.products.Product` on any processor; it counts how often it was computed."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        self._weight = torch.cat([weight.detach() for weight in weights])
        self._bias = bias
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return linear(x, self._weight, self._bias)

    def weight(self) -> Tensor:
        return self._weight
