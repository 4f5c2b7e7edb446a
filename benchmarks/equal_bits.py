"""Do passes of different shapes give the same bits, and what does that cost?

usage: python benchmarks/equal_bits.py [--model NAME] [--dtype D] [--out FILE]

Logits of one text, read in blocks of many sizes, in chunks and in a ragged batch, are compared bit by bit with those
read two tokens at a time. Then passes over 1 and 9 new tokens are timed with and without the measures that make the
bits equal, in turns. The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bozza import LLM
from bozza.bench import environment
from bozza.core import Draft
from bozza.models.runner import RaggedRunner, Row

LENGTH = 600


def block(slot: int, ids: Sequence[int]) -> Row:
    return Row(slot, ids[:1], Draft.chain(ids[1:], "bits"))


def alone(runner: RaggedRunner, ids: Sequence[int], sizes: Iterator[int]) -> torch.Tensor:
    """Logits of every position, the text read in blocks of the given sizes."""
    slot, done, logits = runner.alloc(), 0, []
    while done < len(ids):
        part = ids[done : done + next(sizes)]
        logits.append(runner.forward([block(slot, part)]).logits)
        done += len(part)
    runner.free(slot)
    return torch.cat(logits)


def batched(runner: RaggedRunner, ids: Sequence[int], requests: int) -> list[torch.Tensor]:
    """The same text read by several requests at different paces in the same passes."""
    slots = [runner.alloc() for _ in range(requests)]
    done, logits = [0] * requests, [[] for _ in range(requests)]
    while min(done) < len(ids):
        who = [i for i in range(requests) if done[i] < len(ids) and random.random() < 0.8]
        parts = [ids[done[i] : done[i] + random.randint(1, 9)] for i in who]
        if not who:
            continue
        out = runner.forward([block(slots[i], part) for i, part in zip(who, parts, strict=True)]).logits
        for i, part, rows in zip(who, parts, out.split([len(part) for part in parts]), strict=True):
            logits[i].append(rows)
            done[i] += len(part)
    for slot in slots:
        runner.free(slot)
    return [torch.cat(parts) for parts in logits]


def forever(size: int) -> Iterator[int]:
    while True:
        yield size


def differing(runner: RaggedRunner, ids: Sequence[int]) -> dict[str, int]:
    """How many positions have other bits, for every way of reading."""
    base = alone(runner, ids, forever(2))
    ways = {f"blocks of {n}": alone(runner, ids, forever(n)) for n in (1, 3, 4, 5, 9, 13, 17, 32, 33, 100, LENGTH)}
    ways["blocks of 1 to 12"] = alone(runner, ids, iter(lambda: random.randint(1, 12), 0))
    ways |= {f"batch of 6, request {i}": part for i, part in enumerate(batched(runner, ids, 6))}
    return {name: int((logits != base).any(dim=1).sum()) for name, logits in ways.items()}


def cost(runner: RaggedRunner, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Median milliseconds of a pass with and without equal bits, in turns."""
    rows = []
    for cached in (60, 200, 300, 500):
        slot = runner.alloc()
        runner.forward([Row(slot, ids[:cached], wanted=False)])
        for new in (1, 9):
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(60):
                runner._equal_bits = turn % 2 == 0
                started = time.perf_counter()
                runner.forward([block(slot, ids[cached : cached + new])])
                times[runner._equal_bits].append(time.perf_counter() - started)
                runner.truncate(slot, cached)
            on, off = (1e3 * statistics.median(times[kind][2:]) for kind in (True, False))
            rows.append({"cached": cached, "new": new, "ms": on, "ms_without": off, "cost": on / off - 1})
        runner.free(slot)
    runner._equal_bits = True
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "equal_bits.json")
    options = parser.parse_args()
    random.seed(0)
    llm = LLM(options.model, policy="off", dtype=options.dtype, device="cpu")
    ids = [random.randrange(3, llm.runner.vocab_size) for _ in range(LENGTH)]
    document = {
        "environment": environment(llm),
        "positions": LENGTH,
        "differing": differing(llm.runner, ids),
        "cost": cost(llm.runner, ids),
    }
    Console().print(document["differing"], document["cost"])
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
