"""C++ beside this file becomes a shared library in Bozza's cache folder, once for each source and compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bozza.errors import ModelError, first_line
from bozza.models.catalog import cache_folder

# Sums stay in the order in which they are written: bits must not depend on what a compiler makes of them.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-fopenmp")


def native_works() -> bool:
    """Whether this processor is one that our kernels are for: AVX-512 with BF16 and VNNI, and none with AMX."""
    has: Any = torch.cpu
    bf16, vnni, amx = (
        bool(getattr(has, f"_is_{name}_supported", lambda: False)()) for name in ("avx512_bf16", "vnni", "amx_tile")
    )
    return bf16 and vnni and not amx


@contextmanager
def or_refuse(what: str) -> Iterator[None]:
    """Within, what `library` raises becomes a `ModelError`."""
    try:
        yield
    except OSError as problem:
        raise ModelError(
            f"compiled {what} cannot be kept ({first_line(problem)}): set BOZZA_CACHE to a folder that can be "
            "written, or drop compile"
        ) from problem
    except RuntimeError as problem:
        raise ModelError(f"{what} cannot be compiled ({first_line(problem)}): drop compile") from problem


def library(source: Path, flags: tuple[str, ...], folder: Path | None = None) -> ctypes.CDLL:
    """The compiled form of a source file. With g++, OpenMP is torch's own, since that is loaded
    already; clang brings another.

    Args:
        source: a file that includes nothing of ours.
        flags: beside `FLAGS`.
        folder: where libraries are kept; otherwise in Bozza's cache folder.

    Raises:
        OSError: it cannot be written or loaded.
        RuntimeError: there is no C++ compiler, or it refuses the source.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # the one that compiles layers

    compiler = get_cpp_compiler()
    command = [compiler, *FLAGS, *flags]
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.sha256("\0".join([source.read_text(), told, *command]).encode()).hexdigest()[:16]
    place = (folder or cache_folder() / "native") / f"{source.stem}-{key}.so"
    if not place.exists():
        _make([*command, str(source)], place)
    try:
        return ctypes.CDLL(str(place))
    except OSError:  # cut short, by a full disk or a loss of power
        _make([*command, str(source)], place)
        return ctypes.CDLL(str(place))


def _make(command: list[str], place: Path) -> None:
    """Compile to a file that is there as a whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=place.parent)
    os.close(handle)
    try:
        made = subprocess.run([*command, "-o", scratch], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(next((line for line in made.stderr.splitlines() if "error" in line), made.stderr))
        Path(scratch).replace(place)
    finally:
        Path(scratch).unlink(missing_ok=True)
