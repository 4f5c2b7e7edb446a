"""Compiled attention: the numbers of attention written out, and a token's bits whatever shares its pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bozza import LLM, SamplingParams
from bozza.core import NO_DRAFT, Draft
from bozza.models.attention import PLAIN, How, Pass
from bozza.models.kvstore import KVStore
from bozza.models.packing import pack_model
from bozza.models.probe import load_runner
from bozza.models.runner import RaggedRunner, Row, lay_out
from bozza.models.spans import Span
from bozza.native import attention
from bozza.native.attention import AttentionKernel, NativePass, attention_kernel, pass_over
from products import draw, needs_compiler
from tiny import VOCAB, shallower, tiny, tiny_head, token_prompts

CPU = torch.device("cpu")
SHAPES = [(12, 2, 128, 128), (9, 3, 64, 64), (4, 4, 32, 96), (16, 1, 96, 64)]  # heads, kv heads, size, value size
needs_kernel = [needs_compiler, pytest.mark.skipif(not attention.kernel_works(), reason="not for this processor")]
pytestmark = needs_kernel


@pytest.fixture(scope="module")
def kernel() -> AttentionKernel:
    made = attention_kernel()
    assert made is not None
    return made


class Texts:
    """Random queries, keys and values for each (request, path of tokens), so that a text has the same ones anywhere."""

    def __init__(self, heads: int, kv_heads: int, size: int, value_size: int) -> None:
        self._shapes = (heads, size), (kv_heads, size), (kv_heads, value_size)
        self._made: dict[tuple[int, ...], list[Tensor]] = {}

    def of(self, path: tuple[int, ...]) -> list[Tensor]:
        """Query, key and value of the last token of a path; some scores stand out."""
        if path not in self._made:
            seed = hash(path) % 2**31
            made = [draw(*shape, seed=seed + part) for part, shape in enumerate(self._shapes)]
            self._made[path] = [made[0] * 2, made[1], made[2]]
        return self._made[path]


def paths(request: int, row: Row, held: int) -> list[tuple[int, ...]]:
    """For each new token, the tokens up to it: those held are (request, 0), (request, 1), ..."""
    line = (request, *range(held), *row.tokens)
    found = [line[: 1 + held + i + 1] for i in range(len(row.tokens))]
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(row.draft.tokens, row.draft.parents, strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else line), token))
    return found + nodes[row.fed or 0 :]


def written_out(texts: Texts, path: tuple[int, ...], how: How) -> Tensor:
    """Attention of a path's last token in float64, [heads, value size]."""
    along = [texts.of(path[:end]) for end in range(2, len(path) + 1)]
    along = along[-how.window :] if how.window else along
    query, keys, values = along[-1][0], *(torch.stack([each[part] for each in along], dim=1) for part in (1, 2))
    share = query.shape[0] // keys.shape[0]
    keys, values = (each.double().repeat_interleave(share, dim=0) for each in (keys, values))
    scores = (keys @ query.double()[:, :, None])[:, :, 0] * (how.scale or query.shape[1] ** -0.5)
    return (scores.softmax(dim=1)[:, None] @ values)[:, 0]


class Stand:
    """A store with some requests in it, of which tokens (request, 0), (request, 1), ... are held."""

    def __init__(self, texts: Texts, kernel: AttentionKernel | None, how: How = PLAIN) -> None:
        self.texts, self.kernel, self.how = texts, kernel, how
        self.store = KVStore(CPU)
        self.held: dict[int, tuple[int, int]] = {}  # request -> slot, tokens

    def hold(self, request: int, tokens: int) -> None:
        self.held[request] = self.store.alloc(), 0
        if tokens:
            self.run({request: (list(range(tokens)), NO_DRAFT)})
            self.held[request] = self.held[request][0], tokens

    def run(self, rows: dict[int, tuple[Sequence[int], Draft]], fed: int | None = None, filler: int = 0) -> Tensor:
        """One pass; [tokens, heads, value size]."""
        spans: list[Span] = []
        along: list[tuple[int, ...]] = []
        for request, (tokens, draft) in rows.items():
            slot, held = self.held[request]
            row = Row(slot, tokens, draft, fed=fed)
            spans.append(lay_out(self.store, row, len(along)))
            along += paths(request, row, held)
        parts = zip(*(self.texts.of(path) for path in along), strict=True)
        query, key, value = (torch.stack([*part, *part[:filler]]).transpose(0, 1) for part in parts)
        made = pass_over(self.store, spans, CPU, True, self.kernel).attend(0, query, key, value, self.how)
        self.along = along
        return made


def tree(rng: random.Random, nodes: int) -> Draft:
    parents = tuple(rng.randint(-1, node - 1) for node in range(nodes))
    return Draft(tuple(1000 + rng.randrange(10**6) for _ in range(nodes)), parents, ("x",) * nodes)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_attention_written_out(kernel: AttentionKernel, shape: tuple[int, int, int, int], window: int | None) -> None:
    rng, texts, how = random.Random(0), Texts(*shape), How(scale=0.11, window=window)
    ours, torchs = (Stand(texts, each, how) for each in (kernel, None))
    rows: dict[int, tuple[Sequence[int], Draft]] = {
        0: ([900], NO_DRAFT),  # decoding
        1: ([901], Draft.chain(range(902, 910), "x")),
        2: ([911], tree(rng, 12)),  # on both sides of the end of a block
        3: (list(range(920, 990)), NO_DRAFT),  # a prompt, longer than a tile
        4: ([991, 992, 993], tree(rng, 5)),
        5: ([994], NO_DRAFT),  # the first token of a text
    }
    for stand in (ours, torchs):
        for request, held in enumerate((127, 300, 60, 64, 0, 0)):
            stand.hold(request, held)
    found, theirs = ours.run(rows), torchs.run(rows)
    expected = torch.stack([written_out(texts, path, how) for path in ours.along])

    def error(result: Tensor) -> Tensor:
        return (result.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))

    assert error(found).max() < 5e-3
    assert error(found).mean() < 1.1 * error(theirs).mean()
    for (slot, _), span in zip(ours.held.values(), torchs.held.values(), strict=True):
        for mine, other in zip(ours.store.read(0, slice(slot, slot + 1), 400), torchs.store.read(0, slice(span[0], span[0] + 1), 400), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_company(kernel: AttentionKernel, shape: tuple[int, int, int, int], window: int | None) -> None:
    rng, texts, how = random.Random(1), Texts(*shape), How(window=window)
    for held in (0, 1, 62, 63, 64, 130):
        stand = Stand(texts, kernel, how)
        stand.hold(0, held)
        stand.hold(1, 200)
        stand.hold(2, 3)
        rows = {1: (list(range(500, 560)), NO_DRAFT), 0: ([901], tree(rng, 14)), 2: ([7], Draft.chain([8, 9], "x"))}
        for path, mixed in zip(list(stand.along), stand.run(rows), strict=False):
            del path, mixed
        mixed = dict(zip(stand.along, stand.run_again(rows) if False else [], strict=False))
        del mixed
