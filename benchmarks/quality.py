"""What int8 costs in quality: perplexity, and how often the likeliest next token is another.

usage: python benchmarks/quality.py --prompts FILE [--models NAME ...] [--tokens N] [--out FILE]

Texts are the prompts of a file (lines as for `bozza bench`), each cut to 512 tokens, up to N tokens in all of each
model. Compared with bfloat16: all linear layers in int8 (what --quantize int8 does), and all but the output head. The
last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from bozza import LLM
from bozza.bench import environment, load_cases
from bozza.core import Draft
from bozza.models.loading import load
from bozza.models.packing import linears, pack
from bozza.models.products import Int8Product
from bozza.models.runner import Row
from bozza.models.sharing import seen_together

LONGEST = 512


def read(llm: LLM, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Loss of each token in nats, and the likeliest token at each place."""
    losses, likeliest = [], []
    for ids in texts:
        slot = llm.runner.alloc()
        logits = llm.runner.forward([Row(slot, ids[:1], Draft.chain(ids[1:], "text"))]).logits
        llm.runner.free(slot)
        losses.append(cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none"))
        likeliest.append(logits[:-1].argmax(dim=1))
    return torch.cat(losses), torch.cat(likeliest)


def all_but_the_head(name: str) -> LLM:
    """Int8 with the output head as it is."""
    loaded = load(name)
    names = [each for each in linears(loaded.model, 0.5) if each != "lm_head"]
    pack(loaded.model, seen_together(loaded.model, names), Int8Product)
    return LLM(loaded.model, tokenizer=loaded.tokenizer, policy="off")


def measure(name: str, prompts: Path, most: int) -> list[dict[str, Any]]:
    """One row for each form of a model."""
    llm = LLM(name, policy="off")
    texts: list[list[int]] = []
    for case in load_cases(prompts, llm, None):
        if len(case.prompt) >= 32 and sum(map(len, texts)) < most:
            texts.append(list(case.prompt[:LONGEST]))
    base, expected = read(llm, texts)
    facts = environment(llm)
    rows = [{"model": facts["model"], "weights": "bfloat16", "perplexity": base.mean().exp().item(), "agreement": 1.0}]
    del llm
    for kind, make in (
        ("int8", lambda: LLM(name, policy="off", quantize="int8")),
        ("int8, head in bfloat16", lambda: all_but_the_head(name)),
    ):
        losses, likeliest = read(make(), texts)
        row = {"perplexity": losses.mean().exp().item(), "agreement": (likeliest == expected).double().mean().item()}
        rows.append({"model": facts["model"], "weights": kind, **row})
    return [row | {"tokens": len(base), "texts": len(texts), "environment": facts} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quality.json")
    options = parser.parse_args()
    rows = [row for name in options.models for row in measure(name, options.prompts, options.tokens)]
    table = Table("model", "weights", "perplexity", "same next token", "tokens")
    for row in rows:
        table.add_row(
            str(row["model"]), row["weights"], f"{row['perplexity']:.3f}", f"{row['agreement']:.4f}", str(row["tokens"])
        )
    Console().print(table)
    options.out.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
