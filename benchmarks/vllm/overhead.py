"""What one call of the proposer costs, per request, beside a context of 4,096 tokens: no vLLM, only its calls.

usage: python benchmarks/vllm/overhead.py [--context N] [--steps N] [--batches N ...] [--out FILE]

Half of the requests copy from their prompt (most of it is drafted and accepted), half write text in which short
sequences come again by chance (drafts are looked for, and rarely pay).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bozza.vllm.drafting import Drafting, Limits
from bozza.vllm.options import Options

RESULTS = Path(__file__).parent.parent / "results"


def texts(batch: int, context: int, steps: int, coins: random.Random) -> list[list[int]]:
    """Per request, a prompt of `context` tokens and more output than is needed."""
    made = []
    for number in range(batch):
        need = 17 * steps + 32
        if number % 2:
            prompt = [coins.randrange(30_000) for _ in range(context)]
            output = [token for _ in range(need // 40 + 1) for token in _passage(prompt, coins)]
        else:
            prompt = [int(30_000 * coins.random() ** 6) for _ in range(context)]
            output = [int(30_000 * coins.random() ** 6) for _ in range(need)]
        made.append(prompt + output)
    return made


def _passage(prompt: list[int], coins: random.Random) -> list[int]:
    begin = coins.randrange(len(prompt) - 60)
    return [*prompt[begin : begin + 36], *(coins.randrange(30_000) for _ in range(4))]


def measure(batch: int, context: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Microseconds per request of each step, the first ones left out, and what came of it."""
    made = texts(batch, context, steps, random.Random(0))
    room = max(map(len, made)) + 1
    # Steps take no time here, so what they cost is not learned.
    drafting = Drafting(Options(clock="steps"), Limits(16, room, 1 << 30, 30_000), time.monotonic)
    table = np.zeros((batch, room), dtype=np.int32)
    lengths = np.full(batch, context, dtype=np.int32)
    for row, text in enumerate(made):
        table[row, : len(text)] = text
    drafts: list[list[int]] = [[] for _ in range(batch)]
    spent = []
    for _ in range(steps):
        sampled = []
        for row, draft in enumerate(drafts):
            ahead = made[row][lengths[row] : lengths[row] + 17]
            right = next((place for place, token in enumerate(draft) if token != ahead[place]), len(draft))
            sampled.append(ahead[: right + 1])
            lengths[row] += right + 1
        begun = time.perf_counter()
        drafts = drafting.propose(sampled, lengths, table)
        spent.append((time.perf_counter() - begun) / batch * 1e6)
    counts = drafting.counts
    told = {"committed per step": counts.committed / steps / batch}
    told["drafted per step"] = sum(counts.drafted.values()) / steps / batch
    return spent[len(spent) // 10 :], told


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm-overhead.json")
    given = parser.parse_args()
    rows = []
    for batch in given.batches:
        spent, told = measure(batch, given.context, given.steps)
        tail = sorted(spent)[int(len(spent) * 0.99) - 1]
        row = {"requests": batch, "median_us": statistics.median(spent), "mean_us": statistics.mean(spent)}
        rows.append(row | {"p99_us": tail} | told)
        print(
            f"{batch:3} requests: median {row['median_us']:.0f} us, mean {row['mean_us']:.0f} us, "
            f"p99 {tail:.0f} us per request and step; "
            + ", ".join(f"{name} {value:.2f}" for name, value in told.items())
        )
    facts = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    facts |= {"python": platform.python_version(), "numpy": np.__version__, "context": given.context}
    facts |= {"steps": given.steps, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    scratch = given.out.with_suffix(".tmp")
    scratch.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    scratch.replace(given.out)


if __name__ == "__main__":
    main()
