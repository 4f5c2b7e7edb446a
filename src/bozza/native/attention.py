"""Attention of a ragged pass as one call of compiled code, for bfloat16 on CPUs with AVX-512 BF16 and without AMX.

Torch's fused attention has products of its own only where there is AMX; elsewhere it computes at a fifth of what the
processor can do (docs/log.md). `attend.cpp` says what is computed and why a token's bits do not depend on its company.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bozza.models.attention import Attends, How, Pass
from bozza.models.kvstore import KVStore
from bozza.models.spans import Span
from bozza.native.building import library, native_works, or_refuse
from bozza.native.plan import Plan

SOURCE = Path(__file__).parent / "attend.cpp"
FLAGS = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16"))
ROWS = 128  # query rows of a tile, about: packing keys for them costs little then, and they stay in the cache
STEP, WIDEST = 32, 512  # sizes of a head are multiples of one and at most the other


class LayerStruct(ctypes.Structure):
    """`Layer` of attend.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "out")),
        *((f"{name}_{by}", ctypes.c_int64) for name in ("query", "key", "value") for by in ("head", "token")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "size", "value_size")),
        ("scale", ctypes.c_float),
    )


class AttentionKernel:
    """The compiled code.

    Raises:
        OSError, RuntimeError: as for `bozza.native.building.library`.
    """

    def __init__(self) -> None:
        self._attend: Any = library(SOURCE, FLAGS).bozza_attend

    @staticmethod
    def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether it is for tensors like these; each [heads, tokens, size]."""
        sizes = query.shape[2], value.shape[2]
        return (
            all(each.dtype == torch.bfloat16 and each.device.type == "cpu" for each in (query, key, value))
            and all(size % STEP == 0 and size <= WIDEST for size in sizes)
            and query.shape[0] % key.shape[0] == 0
            and query.shape[1:] == key.shape[1:]
            and key.shape[:2] == value.shape[:2]
        )

    @staticmethod
    def tile(heads: int, kv_heads: int, tokens: int) -> int:
        """Tokens of a tile: few enough for all threads to have some."""
        each = -(-tokens * kv_heads // torch.get_num_threads())
        return max(1, min(ROWS * kv_heads // heads, each))

    def __call__(
        self, plan: Plan, store: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """Put the keys and values of a pass in the store, and attend.

        Args:
            plan: of the pass.
            store: keys and values, each [places, kv heads, size], dense.
            query: [heads, tokens, size]; tokens beyond those of the plan are left out, and come out as zeros.
            key: [kv heads, tokens, size].
            value: [kv heads, tokens, value size].
            scale: of scores; None for size ** -0.5.

        Returns:
            [tokens, heads, value size].
        """
        query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
        heads, tokens, size = query.shape
        shape = tokens, heads, value.shape[2]
        out = query.new_empty(shape) if tokens == plan.struct.tokens else query.new_zeros(shape)
        pointers = (each.data_ptr() for each in (query, key, value, *store, out))
        strides = (stride for each in (query, key, value) for stride in each.stride()[:2])
        scale = size**-0.5 if scale is None else scale
        layer = LayerStruct(*pointers, *strides, heads, key.shape[0], size, value.shape[2], scale)
        if self._attend(ctypes.byref(plan.struct), ctypes.byref(layer)):
            raise MemoryError("attention has no memory to work in")
        return out


def attention_kernel() -> AttentionKernel | None:
    """The compiled code, or None on a processor that our kernels are not for.

    Raises:
        ModelError: it cannot be compiled or kept.
    """
    if not native_works():
        return None
    with or_refuse("attention"):
        return AttentionKernel()


class NativePass:
    """`bozza.models.attention.Pass` with the kernel, save for what that lacks: capped scores, sinks, odd sizes."""

    def __init__(
        self, kernel: AttentionKernel, store: KVStore, spans: Sequence[Span], in_torch: Callable[[], Pass]
    ) -> None:
        self._kernel, self._store, self._spans = kernel, store, spans
        self._torch = cache(in_torch)
        self._plans: dict[tuple[int | None, int], Plan] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """See `Attends.attend`."""
        if how.softcap is not None or how.sinks is not None or not self._kernel.fits(query, key, value):
            return self._torch().attend(layer, query, key, value, how)
        at = how.window, self._kernel.tile(query.shape[0], *key.shape[:2])
        if at not in self._plans:
            begins = [self._store.flat_index(span.slot) for span in self._spans]
            self._plans[at] = Plan(self._spans, begins, *at)
        return self._kernel(self._plans[at], self._store.flat(layer, key, value), query, key, value, how.scale)


def pass_over(
    store: KVStore, spans: Sequence[Span], device: torch.device, equal_bits: bool, kernel: AttentionKernel | None
) -> Attends:
    """One forward pass as attention sees it, with the kernel if there is one."""

    def in_torch() -> Pass:
        return Pass(store, spans, device, equal_bits)

    return in_torch() if kernel is None else NativePass(kernel, store, spans, in_torch)
