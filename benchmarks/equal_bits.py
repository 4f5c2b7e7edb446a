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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bozza import LLM
from bozza.bench import environment
from bozza.core import Draft
from bozza.models.invariance import differing_positions
from bozza.models.runner import RaggedRunner, Row

LENGTH = 600
SIZES = (1, 3, 4, 5, 9, 13, 17, 32, 33, 100, LENGTH)


def cost(runner: RaggedRunner, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Median milliseconds of a pass with and without equal bits, in turns."""
    rows = []
    for cached in (60, 200, 300, 500):
        slot = runner.alloc()
        runner.forward([Row(slot, ids[:cached], wanted=0)])
        for new in (1, 9):
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(60):
                runner._equal_bits = turn % 2 == 0
                started = time.perf_counter()
                runner.forward([Row(slot, ids[cached : cached + 1], Draft.chain(ids[cached + 1 : cached + new], "x"))])
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
    runner = RaggedRunner(llm.model, invariant=True)
    ids = [random.randrange(3, llm.runner.vocab_size) for _ in range(LENGTH)]
    document = {
        "environment": environment(llm),
        "positions": LENGTH,
        "differing": differing_positions(runner, ids, SIZES, requests=6),
        "cost": cost(runner, ids),
    }
    Console().print(document["differing"], document["cost"])
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
