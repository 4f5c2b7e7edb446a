"""Trees that come to the runner in parts, level by level, as a drafter grows them."""

import itertools
import random

import pytest
import torch

from bozza.core import Draft
from bozza.models.runner import RaggedRunner, Row
from tiny import VOCAB, tiny

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"]
DTYPES = [torch.float32, torch.bfloat16]


def close(a, b, dtype):
    bound = 2e-4 if dtype == torch.float32 else 0.05
    assert float((a - b).abs().max()) < bound * max(1.0, float(b.abs().max()))


def grown(rng, nodes):
    """A random tree."""
    parents = [rng.randrange(-1, min(node, 6)) if node else -1 for node in range(nodes)]
    return Draft(tuple(rng.randrange(3, VOCAB) for _ in parents), tuple(parents), ("",) * nodes)


def parts(rng, nodes):
    """Places to cut a tree at."""
    return [0, *sorted(rng.sample(range(1, nodes), min(3, nodes - 1))), nodes]


def cases(seed):
    """Prompts on both sides of a window and of a padded length, and a tree for each."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 3, 9, 40, 122, 130)]
    return [(prompt, grown(rng, rng.randint(1, 14)), rng) for prompt in prompts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tree_in_parts_gives_the_logits_of_the_whole(architecture, dtype):
    runner = RaggedRunner(tiny(architecture, dtype=dtype))
    for prompt, tree, rng in cases(0):
        whole, slot = runner.alloc(), runner.alloc()
        expected = runner.forward([Row(whole, prompt, tree)]).logits
        found = [runner.forward([Row(slot, prompt)]).logits]
        cuts = parts(rng, len(tree))
        for fed, end in itertools.pairwise(cuts):
            found.append(runner.forward([Row(slot, (), tree.head(end), fed=fed)]).logits)
            assert len(found[-1]) == end - fed
        close(torch.cat(found), expected, dtype)
        # What follows is as if the tree had never been.
        runner.truncate(slot, len(prompt))
        runner.truncate(whole, len(prompt))
        close(runner.forward([Row(slot, [5, 6])]).logits, runner.forward([Row(whole, [5, 6])]).logits, dtype)
        runner.free(whole)
        runner.free(slot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_of_many_requests_grow_in_shared_passes(architecture, dtype):
    """Each at its own pace, some done early, beside prompts and ordinary rows."""
    runner = RaggedRunner(tiny(architecture, dtype=dtype))
    known = cases(1)
    expected = [runner.forward([Row(runner.alloc(), prompt, tree)]).logits[1:] for prompt, tree, _ in known]
    slots = [runner.alloc() for _ in known]
    other = runner.alloc()
    runner.forward([Row(slot, prompt) for slot, (prompt, _, _) in zip(slots, known, strict=True)])
    cuts = [parts(rng, len(tree)) for _, tree, rng in known]
    found = [[] for _ in known]
    for step in range(max(map(len, cuts)) - 1):
        growing = [index for index, cut in enumerate(cuts) if step + 1 < len(cut)]
        rows = [
            Row(slots[index], (), known[index][1].head(cuts[index][step + 1]), fed=cuts[index][step])
            for index in growing
        ]
        result = runner.forward([Row(other, [7, 8, 9]), *rows])
        start = 1
        for index, row in zip(growing, rows, strict=True):
            found[index].append(result.logits[start : start + row.outputs])
            start += row.outputs
        assert start == len(result.logits)
    for logits, wanted in zip(found, expected, strict=True):
        close(torch.cat(logits), wanted, dtype)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_a_single_node_does_not_see_a_sibling_that_came_before(architecture):
    """Alone in its pass it would need no mask, if it were no branch."""
    runner = RaggedRunner(tiny(architecture))
    tree = Draft((5, 6), (-1, -1), ("",) * 2)
    slot = runner.alloc()
    runner.forward([Row(slot, [3, 4])])
    runner.forward([Row(slot, (), tree.head(1), fed=0)])
    found = runner.forward([Row(slot, (), tree, fed=1)]).logits
    close(found, runner.forward([Row(runner.alloc(), [3, 4, 6])]).logits, torch.float32)


def test_negative_control_siblings_that_see_each_other_are_noticed(monkeypatch):
    from bozza.models.spans import Span

    ancestors = Span.ancestors
    monkeypatch.setattr(Span, "ancestors", lambda span: ancestors(span) | ancestors(span).roll(-1, 1))
    runner = RaggedRunner(tiny("llama"))
    tree = Draft((5, 6, 7, 8), (-1, -1, 0, 1), ("",) * 4)
    slot = runner.alloc()
    runner.forward([Row(slot, [3, 4])])
    wrong = runner.forward([Row(slot, (), tree, fed=0)]).logits
    monkeypatch.undo()
    right = runner.forward([Row(runner.alloc(), [3, 4], tree)]).logits[1:]
    with pytest.raises(AssertionError):
        close(wrong, right, torch.float32)
