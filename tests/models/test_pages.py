"""Memory moved to large pages holds what it held, and lies in them if Linux says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from bozza.models import pages
from bozza.models.pages import LEAST, collapse, in_large_pages
from bozza.models.products import Int8Product, PackedProduct
from products import draw, needs_int8, needs_packing


def huge(address: int) -> int:
    """Bytes in large pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping holds it")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_memory_lies_in_large_pages_then_and_holds_what_it_held() -> None:
    held = torch.arange(1 << 21)  # 16 MiB
    before = held.clone()
    if not collapse(held.data_ptr(), held.nbytes):
        pytest.skip("this Linux has no large pages, or none left")
    assert huge(held.data_ptr() + held.nbytes // 2) >= held.nbytes // 2
    assert torch.equal(held, before)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_memory_that_is_not_there_is_left_alone() -> None:
    assert not collapse(1 << 46, LEAST)


@needs_packing
@needs_int8
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("kind", [PackedProduct, Int8Product])
def test_weights_are_moved_once_they_are_packed(
    kind: type[PackedProduct] | type[Int8Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(pages, "collapse", lambda *place: asked.append(place))
        product = kind([draw(3000, 2000)], None)
        kind([draw(64, 64)], None)  # no large page is in this
    assert asked == [(torch.ops.mkldnn.data_ptr(product.packed), torch.ops.mkldnn._nbytes(product.packed))]
    x = draw(3, 2000, seed=1)
    before = product(x)
    assert in_large_pages(product.packed) is product.packed
    assert torch.equal(product(x), before)
