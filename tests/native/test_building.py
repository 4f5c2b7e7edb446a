"""Libraries are made once, whole, and with one line where they cannot be made."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from bozza.errors import ModelError
from bozza.models.catalog import cache_folder
from bozza.native import attention, plan, products
from bozza.native.building import library, native_works
from bozza.native.plan import PlanStruct
from products import needs_compiler

TWICE = 'extern "C" int twice(int x) { return 2 * x; }'


def source(folder: Path, text: str) -> Path:
    file = folder / "twice.cpp"
    file.write_text(text)
    return file


@needs_compiler
def test_a_library_is_made_once_for_each_source_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    for _ in range(2):
        assert library(source(tmp_path, TWICE), (), kept).twice(21) == 42
        assert len(list(kept.iterdir())) == 1
    stamp = next(kept.iterdir()).stat().st_mtime_ns
    assert library(source(tmp_path, TWICE), (), kept).twice(4) == 8
    assert next(kept.iterdir()).stat().st_mtime_ns == stamp
    assert library(source(tmp_path, TWICE.replace("2", "3")), (), kept).twice(4) == 12
    library(source(tmp_path, TWICE), ("-DOTHER",), kept)
    assert len(list(kept.iterdir())) == 3
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path / "cache"))
    library(source(tmp_path, TWICE), ())
    assert len(list((cache_folder() / "native").iterdir())) == 1


@needs_compiler
def test_a_refused_source_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"error: .*nonsense") as caught:
        library(source(tmp_path, TWICE + " nonsense;"), (), tmp_path / "kept")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "kept").iterdir())


@needs_compiler
@pytest.mark.parametrize("problem", ["folder", "compiler"])
def test_attention_that_cannot_be_compiled_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    from torch._inductor import config

    monkeypatch.setattr(attention, "native_works", lambda: True)
    if problem == "folder":  # none can be made below a file
        monkeypatch.setenv("BOZZA_CACHE", str(source(tmp_path, "")))
    patch = config.patch({"cpp.cxx": ("no-such-compiler",)} if problem == "compiler" else {})
    says = "attention cannot be kept .*: set BOZZA_CACHE" if problem == "folder" else "attention cannot be compiled"
    with patch, pytest.raises(ModelError, match=says) as caught:
        attention.attention_kernel()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("drop compile")


def test_other_processors_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "native_works", lambda: False)
    assert attention.attention_kernel() is None


@pytest.mark.parametrize(("bf16", "amx", "works"), [(True, False, True), (True, True, False), (False, False, False)])
def test_which_processors_it_is_for(monkeypatch: pytest.MonkeyPatch, bf16: bool, amx: bool, works: bool) -> None:
    import torch

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert native_works() == works


TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def members(text: str, name: str) -> list[tuple[str, Any]]:
    """Names and types of a structure in C++."""
    body = text.partition(f"struct {name} {{")[2].partition("};")[0]
    found = []
    for line in (line.partition("//")[0].strip().rstrip(";") for line in body.splitlines()):
        kind, _, names = line.removeprefix("const ").partition(" ")
        kind = TYPES.get(kind, ctypes.c_void_p) if not kind.endswith("*") else ctypes.c_void_p
        found += [(each.strip(), kind) for each in names.split(",") if each]
    return found


def test_structures_and_sizes_are_those_of_the_source() -> None:
    """What crosses the border, both ways."""
    attend, multiply = attention.SOURCE.read_text(), products.SOURCE.read_text()
    structures = [(attend, "Plan", PlanStruct), (attend, "Layer", attention.LayerStruct)]
    for text, name, struct in [*structures, (multiply, "Job", products.JobStruct)]:
        assert members(text, name) == list(struct._fields_)
    assert [kind for _, kind in members(attend, "Tile")] == [ctypes.c_int32] * 5
    constants = [("BLOCK", plan.BLOCK), ("WIDEST", attention.WIDEST)]
    assert all(f"constexpr int {name} = {value};" in attend for name, value in constants)
    assert products.TILE == 16 * 4
    assert all(f"constexpr int {name} = {value};" in multiply for name, value in (("LANES", 16), ("VECTORS", 4)))


@needs_compiler
def test_a_library_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    file, kept, cut = source(tmp_path, TWICE), tmp_path / "kept", tmp_path / "cut"
    library(file, (), kept)
    whole = next(kept.iterdir())
    cut.mkdir()
    (cut / whole.name).write_bytes(whole.read_bytes()[:100])
    assert library(file, (), cut).twice(3) == 6
    assert (cut / whole.name).stat().st_size == whole.stat().st_size
