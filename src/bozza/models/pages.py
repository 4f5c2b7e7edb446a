"""Weights in large pages of memory: where each of a million small ones lies takes the processor time to look up."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1 and later
LEAST = 1 << 21  # bytes; in less there is no whole large page


def in_large_pages(packed: Tensor) -> Tensor:
    """A tensor of oneDNN's, its bytes moved to large pages where the system has some; otherwise it is as it was."""
    size = int(torch.ops.mkldnn._nbytes(packed))
    if sys.platform == "linux" and size >= LEAST:
        collapse(torch.ops.mkldnn.data_ptr(packed), size)
    return packed


def collapse(address: int, size: int) -> bool:
    """Whether Linux put the memory there in large pages, as far as it fills whole ones."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    libc: Any = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE) == 0)
