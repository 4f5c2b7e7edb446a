"""Compiled attention: the numbers of attention written out, and a token's bits whatever shares its pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bozza import LLM, SamplingParams
from bozza.core import NO_DRAFT, Draft
from bozza.models.attention import PLAIN, How
from bozza.models.heads import save_head
from bozza.models.kvstore import KVStore
from bozza.models.packing import pack_model
from bozza.models.probe import load_runner
from bozza.models.runner import RaggedRunner, Row, lay_out
from bozza.models.spans import Span
from bozza.native.attention import AttentionKernel, attention_kernel, pass_over
from bozza.native.building import native_works
from products import draw, needs_compiler
from tiny import VOCAB, shallower, tiny, tiny_head, token_prompts

CPU = torch.device("cpu")
Rows = dict[int, tuple[Sequence[int], Draft]]  # request -> tokens and a draft
SHAPES = [
    (12, 2, 128, 128),
    (9, 3, 64, 64),
    (4, 4, 32, 96),
    (16, 1, 96, 64),
    (7, 1, 512, 32),
]  # heads, kv heads, size, value size
needs_kernel = [needs_compiler, pytest.mark.skipif(not native_works(), reason="not for this processor")]
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


def paths(line: tuple[int, ...], row: Row) -> list[tuple[int, ...]]:
    """For each new token, the request and its tokens up to this one; `line` is what is held."""
    found = [(*line, *row.tokens[: end + 1]) for end in range(len(row.tokens))]
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(row.draft.tokens, row.draft.parents, strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else (*line, *row.tokens)), token))
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
    """A store with some requests in it."""

    def __init__(self, texts: Texts, kernel: AttentionKernel | None, how: How = PLAIN) -> None:
        self.texts, self.kernel, self.how = texts, kernel, how
        self.store = KVStore(CPU)
        self.slots: dict[int, int] = {}
        self.lines: dict[int, tuple[int, ...]] = {}  # a request, and its tokens

    def begin(self, request: int, held: int) -> None:
        """With tokens 0, 1, ..."""
        self.slots[request] = self.store.alloc()
        self.lines[request] = (request,)
        if held:
            self.run({request: (range(held), NO_DRAFT)})

    def run(self, rows: Rows, fed: int | None = None, filler: int = 0) -> dict[tuple[int, ...], Tensor]:
        """One pass; for each token [heads, value size]. Tokens are kept, drafts forgotten unless they come in parts."""
        spans: list[Span] = []
        along: list[tuple[int, ...]] = []
        for request, (tokens, draft) in rows.items():
            row = Row(self.slots[request], list(tokens), draft, fed=fed)
            spans.append(lay_out(self.store, row, len(along)))
            along += paths(self.lines[request], row)
        parts = zip(*(self.texts.of(path) for path in along), strict=True)
        query, key, value = (torch.stack([*part, *part[:filler]]).transpose(0, 1) for part in parts)
        made = pass_over(self.store, spans, CPU, True, self.kernel).attend(0, query, key, value, self.how)
        assert not made[len(along) :].any()
        for request, (tokens, _) in rows.items():
            self.lines[request] += tuple(tokens)
            if fed is None:
                self.store.truncate(self.slots[request], len(self.lines[request]) - 1)
        return dict(zip(along, made, strict=False))

    def kept(self, request: int) -> list[Tensor]:
        slot = self.slots[request]
        return list(self.store.read(0, slice(slot, slot + 1), self.store.length(slot)))


def tree(rng: random.Random, nodes: int) -> Draft:
    parents = tuple(rng.randint(-1, node - 1) for node in range(nodes))
    return Draft(tuple(1000 + node for node in range(nodes)), parents, ("x",) * nodes)


def mixed(rng: random.Random) -> Rows:
    """What a pass may hold: decoding, chains, trees and prompts."""
    return {
        0: ([900], NO_DRAFT),
        1: ([901], Draft.chain(range(902, 910), "x")),
        2: ([911], tree(rng, 14)),
        3: (range(920, 990), NO_DRAFT),  # longer than a tile
        4: ([991, 992, 993], tree(rng, 5)),
        5: ([994], NO_DRAFT),  # the first token of a text
    }


@pytest.fixture(params=SHAPES, ids=str)
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(*request.param)


@pytest.mark.parametrize("window", [None, 50])
def test_it_is_attention_written_out(kernel: AttentionKernel, texts: Texts, window: int | None) -> None:
    how = How(scale=0.11, window=window)
    ours, theirs = Stand(texts, kernel, how), Stand(texts, None, how)
    found: list[dict[tuple[int, ...], Tensor]] = []
    for stand in (ours, theirs):
        for request, held in enumerate((127, 300, 60, 64, 9, 0)):
            stand.begin(request, held)
        found.append(stand.run(mixed(random.Random(0))))
    expected = {path: written_out(texts, path, how) for path in found[0]}

    def errors(results: dict[tuple[int, ...], Tensor]) -> list[float]:
        return [float((results[path].double() - right).norm() / right.norm()) for path, right in expected.items()]

    assert len(expected) == 1 + 9 + 15 + 70 + 8 + 1
    assert max(errors(found[0])) < 6e-3
    assert sum(errors(found[0])) < 1.3 * sum(errors(found[1]))  # torch keeps the weights of a few rows in float32
    for request in ours.slots:
        for mine, other in zip(ours.kept(request), theirs.kept(request), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("held", [0, 50, 63, 64, 130])
def test_a_token_has_the_same_bits_in_any_company(
    kernel: AttentionKernel, texts: Texts, window: int | None, held: int
) -> None:
    how = How(window=window)
    together = Stand(texts, kernel, how)
    rows = mixed(random.Random(held))
    for request in rows:
        together.begin(request, held)
    for path, found in together.run(rows).items():
        if path[0] in (3, 5) and len(path) % 9:
            continue  # they are many
        alone = Stand(texts, kernel, how)
        alone.begin(path[0], held)
        for token in path[1 + held :]:
            (last,) = alone.run({path[0]: ([token], NO_DRAFT)}, filler=1).values()
        assert torch.equal(last, found), path[held:]


def deep(nodes: int) -> Draft:
    """A branch longer than a block of keys, and one beside it."""
    return Draft(tuple(range(1000, 1000 + nodes)), (-1, -1, *range(nodes - 2)), ("x",) * nodes)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("held", "draft"), [(70, tree(random.Random(2), 20)), (63, deep(150)), (2, deep(20))])
def test_a_tree_that_comes_in_parts_has_the_bits_of_a_whole_one(
    kernel: AttentionKernel, texts: Texts, held: int, draft: Draft, window: int | None
) -> None:
    whole, parts = (Stand(texts, kernel, How(window=window)) for _ in range(2))
    for stand in (whole, parts):
        stand.begin(0, held)
    expected = whole.run({0: ([900], draft)})
    for path in list(expected)[-2:]:
        right = written_out(texts, path, How(window=window))
        assert (expected[path].double() - right).norm() < 6e-3 * right.norm()
    found = parts.run({0: ([900], NO_DRAFT)})
    for fed, upto in ((0, 1), (1, 6), (6, len(draft))):
        found |= parts.run({0: ([], draft.head(upto))}, fed=fed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[path], expected[path]) for path in expected)


def test_threads_change_no_bit(kernel: AttentionKernel, texts: Texts) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            stand = Stand(texts, kernel)
            for request in range(6):
                stand.begin(request, 90)
            results.append(stand.run(mixed(random.Random(3))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(other[path], bits) for path, bits in results[0].items())


def test_what_lies_behind_a_text_is_not_read(kernel: AttentionKernel, texts: Texts) -> None:
    stand = Stand(texts, kernel)
    stand.begin(0, 70)
    row = {0: ([900], Draft.chain([901, 902], "x"))}
    before = stand.run(row)
    stand.store.flat(0, *[torch.empty(0)] * 2)[1][stand.store.flat_index(stand.slots[0]) + 73 :] = math.nan
    stand.lines[0] = stand.lines[0][:-1]
    stand.store.truncate(stand.slots[0], 70)
    assert all(torch.equal(found, before[path]) for path, found in stand.run(row).items())


@pytest.mark.parametrize("how", [How(softcap=5.0), How(sinks=torch.ones(4))])
def test_what_the_kernel_lacks_is_computed_by_torch(kernel: AttentionKernel, how: How) -> None:
    texts = Texts(4, 2, 32, 32)
    results = []
    for each in (kernel, None):
        stand = Stand(texts, each, how)
        stand.begin(0, 40)
        results.append(stand.run({0: ([900], tree(random.Random(4), 9))}))
    assert all(torch.equal(found, results[1][path]) for path, found in results[0].items())


@pytest.mark.parametrize(
    ("shapes", "dtype", "fits"),
    [
        ((64, 64), torch.bfloat16, True),
        ((64, 64), torch.float32, False),
        ((80, 64), torch.bfloat16, False),
        ((64, 16), torch.bfloat16, False),
        ((576, 64), torch.bfloat16, False),
    ],
)
def test_what_fits(shapes: tuple[int, int], dtype: torch.dtype, fits: bool) -> None:
    size, value_size = shapes
    query, key, value = (torch.ones(heads, 3, n, dtype=dtype) for heads, n in ((4, size), (2, size), (2, value_size)))
    assert AttentionKernel.fits(query, key, value) == fits


# Whole models

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def compiled(architecture: str, **options: Any) -> RaggedRunner:
    model = tiny(architecture, dtype=torch.bfloat16, **(WIDE | options))
    pack_model(model)
    return load_runner(model, compiled=True)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_logits_of_a_tree_are_those_of_its_branches(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = compiled(architecture)
    rng = random.Random(5)
    draft = Draft(tuple(rng.randrange(3, VOCAB) for _ in range(16)), tree(rng, 16).parents, ("x",) * 16)
    line = [rng.randrange(3, VOCAB) for _ in range(61)]
    slot = runner.alloc()
    found = runner.forward([Row(slot, line, draft)]).logits
    same = 0
    for path, logits in zip(paths((), Row(slot, line, draft))[len(line) - 1 :], found, strict=True):
        alone = runner.alloc()
        runner.forward([Row(alone, path[:50], wanted=0)])
        for token in path[50:]:
            last = runner.forward([Row(alone, [token])]).logits[0]
        runner.free(alone)
        same += torch.equal(last, logits)
    assert same == 17


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("invariant", [False, True])
def test_outputs_with_trees_are_the_plain_ones_to_the_last_bit(
    tmp_path: Path, byte_tokenizer: Any, invariant: bool, temperature: float
) -> None:
    target = tiny("llama", dtype=torch.bfloat16, **WIDE)
    save_head(tiny_head(target), tmp_path / "head", "target", own_rows=True)
    for name, model in (("target", target), ("shallow", shallower(target, 2))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer.save_pretrained(tmp_path / name)
    drafts = [f"model:{tmp_path}/shallow,k=4,width=3", "recycling:k=6", f"eagle:{tmp_path}/head,k=4,width=2"]
    options = {"dtype": "bfloat16", "device": "cpu", "compile": True, "invariant": invariant}
    llm = LLM(tmp_path / "target", policy="fixed", draft=drafts, **options)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
    prompts = [ids * 5 for ids in token_prompts(8)]
    steps: list[Any] = []
    outs = llm.generate(prompts, params, on_step=steps.append)
    alone = [llm.with_policy("off").generate([prompt], params)[0] for prompt in prompts]
    assert [out.logprobs for out in outs] == [out.logprobs for out in alone]
    assert sum(out.stats.accepted.get("model", 0) for out in outs) > 20
