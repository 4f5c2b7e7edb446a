"""How far from the limit of the memory is a pass, and how fast is a long prompt read?

usage: python benchmarks/speed.py [--models NAME ...] [--rounds N] [--out FILE]

For each model: transformers' own forward pass with its cache, Bozza's in bfloat16 and in int8, both as they are and
compiled, over 1 to 32 new tokens after 256, in turns in one process, medians. The limit is what must be read in a
pass (all weights but the embedding, and the keys and values) over the speed at which this machine reads memory,
measured between the passes. Then prompts of 2,048 tokens, read in chunks of several sizes, in turns; beside it the
matrix products of the best chunk alone. The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from bozza import LLM
from bozza.bench import environment
from bozza.core import Draft
from bozza.models.loading import load
from bozza.models.runner import Row
from bozza.models.sharing import PackedLinear
from bozza.threads import use_threads

GIGABYTE = 1_000_000_000
CACHED, SIZES = 256, (1, 2, 4, 8, 16, 32)
PROMPT, CHUNKS = 2048, (128, 256, 512, 1024, 2048)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def memory() -> Callable[[int], float]:
    """Seconds of reading a gigabyte, which no cache holds."""
    data = torch.ones(GIGABYTE // 8, dtype=torch.int64)
    return lambda new: timed(data.sum)


def ours(llm: LLM, ids: Sequence[int]) -> Callable[[int], float]:
    """Seconds of a pass over n new tokens."""
    runner = llm.runner
    slot = runner.alloc()
    runner.forward([Row(slot, ids[:CACHED], wanted=0)])

    def run(new: int) -> float:
        row = Row(slot, ids[:1], Draft.chain(ids[1:new], "x"))
        spent = timed(lambda: runner.forward([row]))
        runner.truncate(slot, CACHED)
        return spent

    return run


def theirs(model: Any, ids: Sequence[int]) -> Callable[[int], float]:
    """The same with transformers."""
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(torch.tensor([ids[:CACHED]]), **{name: cache})

    def run(new: int) -> float:
        given = torch.tensor([ids[:new]])
        with torch.inference_mode():
            spent = timed(lambda: model(given, **{name: cache}))
        cache.crop(-new)
        return spent

    return run


def must_read(llm: LLM) -> int:
    """Bytes that any pass reads: weights but the embedding table, of which it reads a row per token, and the cache."""
    config = llm.model.config.get_text_config(decoder=True)
    size = 1 if llm.weights == "int8" else 2
    packed = sum(m.in_features * m.out_features for m in llm.model.modules() if isinstance(m, PackedLinear))
    table = llm.model.get_input_embeddings().weight.nbytes
    rest = sum(parameter.nbytes for parameter in llm.model.parameters()) - table
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * CACHED * config.num_hidden_layers * config.num_key_value_heads * heads
    return size * packed + rest + cache


def passes(sides: dict[str, Callable[[int], float]], rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass of each side, by new tokens."""
    found: dict[str, dict[int, float]] = {name: {} for name in sides}
    for new in SIZES:
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds + 1):
            for name in sides if turn % 2 else reversed(sides):
                spent[name].append(sides[name](new))
        for name in sides:
            found[name][new] = 1e3 * statistics.median(spent[name][1:])
    return found


def prefill(llm: LLM, ids: Sequence[int], rounds: int) -> dict[int, float]:
    """Tokens per second of reading a prompt, by chunk."""
    runner = llm.runner
    spent: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}

    def run(chunk: int) -> None:
        slot = runner.alloc()
        for start in range(0, PROMPT, chunk):
            runner.forward([Row(slot, ids[start : start + chunk], wanted=int(start + chunk >= PROMPT))])
        runner.free(slot)

    for turn in range(rounds + 1):
        for chunk in CHUNKS if turn % 2 else reversed(CHUNKS):
            spent[chunk].append(timed(lambda chunk=chunk: run(chunk)))  # type: ignore[misc]
    return {chunk: PROMPT / statistics.median(seconds[1:]) for chunk, seconds in spent.items()}


def products(llm: LLM, rows: int) -> float:
    """Tokens per second if a pass over so many rows were its matrix products alone, the head's left out."""
    seen: dict[int, Any] = {}
    for name, module in llm.model.named_modules():
        if isinstance(module, PackedLinear) and name != "lm_head":
            seen[id(module._shared)] = (module._shared.product, module.in_features)
    inputs = {width: torch.randn(rows, width).bfloat16() for _, width in seen.values()}

    def run() -> None:
        with torch.inference_mode():
            for product, width in seen.values():
                product(inputs[width])

    run()
    return rows / statistics.median(timed(run) for _ in range(3))


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each side of a model."""
    llms = {
        f"Bozza {kind or 'bfloat16'}{', compiled' if compiled else ''}": LLM(
            name, policy="off", quantize=kind, compile=compiled
        )
        for kind in (None, "int8")
        for compiled in (False, True)
    }
    plain = load(name).model
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, llms["Bozza bfloat16"].runner.vocab_size, (PROMPT,), generator=draw).tolist()
    sides: dict[str, Callable[[int], float]] = {"reading a gigabyte": memory()}
    sides |= {"transformers bfloat16": theirs(plain, ids)} | {side: ours(llm, ids) for side, llm in llms.items()}
    found = passes(sides, rounds)
    del plain
    speed = 1e3 * GIGABYTE / statistics.median(found["reading a gigabyte"].values())
    rows = []
    for side, milliseconds in found.items():
        row: dict[str, Any] = {"model": Path(name).name, "side": side, "pass_ms": milliseconds}
        if llm := llms.get(side):
            reading = prefill(llm, ids, max(1, rounds // 8))
            best = max(reading, key=lambda chunk: reading[chunk])
            row |= {
                "read_gb": must_read(llm) / 1e9,
                "limit_ms": 1e3 * must_read(llm) / speed,
                "prefill_tokens_per_s": reading,
                "products_alone_tokens_per_s": products(llm, best),
                "gb_per_s": speed / 1e9,
                "environment": environment(llm),
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "speed.json")
    options = parser.parse_args()
    use_threads(None)
    rows = [row for name in options.models for row in measure(name, options.rounds)]
    table = Table("model", "side", *map(str, SIZES), "limit", *(f"prompt/{chunk}" for chunk in CHUNKS), "products")
    for row in rows:
        more = []
        if "limit_ms" in row:
            speeds = [*row["prefill_tokens_per_s"].values(), row["products_alone_tokens_per_s"]]
            more = [f"{row['limit_ms']:.1f}", *(f"{speed:.0f}" for speed in speeds)]
        table.add_row(row["model"], row["side"], *(f"{row['pass_ms'][n]:.1f}" for n in SIZES), *more)
    Console().print(table)
    document = {"cached": CACHED, "prompt": PROMPT, "rows": rows}
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
