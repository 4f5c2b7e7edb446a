"""Does a pass of another shape give the same bits on this machine? Tried, not assumed: it is up to the kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bozza.core import Draft
from bozza.errors import ModelError
from bozza.models.runner import RaggedRunner, Row

LENGTH, COMPARED = 144, 24  # past the first boundary of padded lengths; the end of the text is read in all ways
TREE = (-1, -1, 0, 1, 1, 3, 4, 6)  # parents of nodes


def check_invariant(runner: RaggedRunner) -> None:
    """Read a short text in several ways and compare all logits bit by bit.

    Raises:
        ModelError: they differ, or can be expected to.
    """
    if runner.device.type != "cpu" or runner.dtype not in (torch.bfloat16, torch.float32):
        raise ModelError(
            f"invariant results are known for bfloat16 and float32 on a CPU, this is {runner.dtype} on "
            f"{runner.device.type}: drop invariant, or use those"
        )
    length = min(LENGTH, runner.context_length)
    head = max(0, length - COMPARED)
    ids = torch.randint(1, runner.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    differing = differing_positions(runner, ids, sizes=(1, 3, 5, 16, 33), requests=4, head=head)
    if wrong := {way: count for way, count in differing.items() if count}:
        way, count = max(wrong.items(), key=lambda item: item[1])
        raise ModelError(
            f"results depend on the shape of a pass on this machine ({count} of {length - head} positions with {way}): "
            "drop invariant; differences are then judged as near-ties"
        )


def differing_positions(
    runner: RaggedRunner, ids: Sequence[int], sizes: Sequence[int], requests: int, *, head: int = 0, seed: int = 0
) -> dict[str, int]:
    """How many positions of a text have other bits than when it is read two tokens at a time, for each way to read it.

    Args:
        runner: the model.
        ids: the text.
        sizes: block sizes to read it in.
        requests: how many requests read it together, at different paces.
        head: leading tokens that are read at once, to save time.
        seed: of the paces.
    """
    rng = random.Random(seed)
    base = read_alone(runner, ids, itertools.repeat(2), head)
    ways = {f"blocks of {size}": read_alone(runner, ids, itertools.repeat(size), head) for size in sizes}
    ways["blocks of 1 to 12"] = read_alone(runner, ids, iter(lambda: rng.randint(1, 12), 0), head)
    together = read_together(runner, ids, requests, rng, head)
    ways |= {f"a batch of {requests}, request {i}": logits for i, logits in enumerate(together)}
    return {name: int((logits != base).any(dim=1).sum()) for name, logits in ways.items()}


def read_alone(runner: RaggedRunner, ids: Sequence[int], sizes: Iterator[int], head: int) -> Tensor:
    """Logits of every position after the head of a text that is read in blocks of the given sizes."""
    slot, logits = _slot_with(runner, ids[:head]), []
    done = head
    while done < len(ids):
        part = ids[done : done + next(sizes)]
        logits.append(runner.forward([_block(slot, part)]).logits)
        done += len(part)
    runner.free(slot)
    return torch.cat(logits)


def read_together(
    runner: RaggedRunner, ids: Sequence[int], requests: int, rng: random.Random, head: int
) -> list[Tensor]:
    """The same text read by several requests at different paces in the same passes."""
    slots = [_slot_with(runner, ids[:head]) for _ in range(requests)]
    done = [head] * requests
    logits: list[list[Tensor]] = [[] for _ in range(requests)]
    while min(done) < len(ids):
        who = [i for i in range(requests) if done[i] < len(ids) and rng.random() < 0.8]
        if not who:
            continue
        parts = [ids[done[i] : done[i] + rng.randint(1, 9)] for i in who]
        out = runner.forward([_block(slots[i], part) for i, part in zip(who, parts, strict=True)]).logits
        for i, part, rows in zip(who, parts, torch.split(out, [len(part) for part in parts]), strict=True):
            logits[i].append(rows)
            done[i] += len(part)
    for slot in slots:
        runner.free(slot)
    return [torch.cat(parts) for parts in logits]


def branches_agree(runner: RaggedRunner) -> bool:
    """Whether the nodes of a tree have the bits of their branches read token by token, as far as one tree tells.

    With compiled attention they have by construction; this is for layers that it leaves to torch.
    """
    ids = torch.randint(1, runner.vocab_size, (128 + len(TREE),), generator=torch.Generator().manual_seed(0)).tolist()
    nodes = ids[: len(TREE)]
    for held in (3, 62, 126):
        line = ids[len(TREE) : len(TREE) + min(held + 1, runner.context_length - len(TREE))]
        slot = _slot_with(runner, line[:-1])
        found = runner.forward([Row(slot, line[-1:], Draft(tuple(nodes), TREE, ("probe",) * len(TREE)))]).logits[1:]
        runner.free(slot)
        for node, logits in enumerate(found):
            branch: list[int] = []
            while node >= 0:
                branch.insert(0, nodes[node])
                node = TREE[node]
            if not torch.equal(read_alone(runner, line + branch, itertools.repeat(1), len(line) - 1)[-1], logits):
                return False
    return True


def _slot_with(runner: RaggedRunner, ids: Sequence[int]) -> int:
    slot = runner.alloc()
    if ids:
        runner.forward([Row(slot, ids, wanted=0)])
    return slot


def _block(slot: int, ids: Sequence[int]) -> Row:
    return Row(slot, ids[:1], Draft.chain(ids[1:], "probe"))
