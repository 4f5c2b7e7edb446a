"""What each drafter commits per pass of the target, and what it makes of the time, against plain decoding in turns.

usage: python benchmarks/drafters.py --prompts FILE [--model NAME] [--drafts "SPEC SPEC" ...] [--tokens N] [--limit N]
       [--out FILE]

Greedy, batch 1, a fixed number of tokens. Each --drafts names one set of drafters whose drafts are merged. The prompt
file has lines as for `bozza bench`. Every output is compared with the plain one. What is stored last is shown in
README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from bozza import LLM, SamplingParams
from bozza.bench import Case, environment, load_cases
from bozza.llm import Output

HERE = Path(__file__).parent
DRAFTS = [
    "ngram", "suffix", "recycling:k=8", "recycling:k=24", "suffix recycling:k=24", "eagle:k=8", "eagle:k=32",
    "ngram eagle:k=24", "suffix eagle:k=8", "suffix eagle:k=24",
]  # fmt: skip


def seconds_of(output: Output) -> float:
    """Wall time of the passes that decoded; what reads the prompt is the same for all."""
    return sum(output.stats.seconds.values())


def measure(llm: LLM, cases: Sequence[Case], drafts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """One row for each set of drafters and workload."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    plain = llm.with_policy("off")
    # One engine for each set: what `recycling` learns from one prompt serves the next, as in a running process.
    engines = {draft: llm.with_policy("fixed", draft.split()) for draft in drafts}
    found: dict[tuple[str, str], list[tuple[Output, Output]]] = defaultdict(list)
    for case in cases:
        slow = plain.generate([case.prompt], params)[0]
        for draft, engine in engines.items():
            found[draft, case.workload].append((slow, engine.generate([case.prompt], params)[0]))
    rows = []
    for (draft, workload), pairs in found.items():
        passes = sum(fast.stats.passes for _, fast in pairs)
        rows.append(
            {
                "draft": draft,
                "workload": workload,
                "prompts": len(pairs),
                "committed_per_pass": sum(fast.stats.committed for _, fast in pairs) / passes,
                "ratio": statistics.median(seconds_of(slow) / seconds_of(fast) for slow, fast in pairs),
                "draft_ms_per_pass": 1e3 * sum(sum(f.stats.draft_seconds.values()) for _, f in pairs) / passes,
                "identical": sum(slow.token_ids == fast.token_ids for slow, fast in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "drafters.json")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    every = list(dict.fromkeys(spec for draft in options.drafts for spec in draft.split()))
    llm = LLM(options.model, draft=every)
    cases = load_cases(options.prompts, llm, options.limit)
    llm.generate([cases[0].prompt], SamplingParams(max_tokens=8))
    rows = measure(llm, cases, options.drafts, options.tokens)
    table = Table()
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    document = {"environment": environment(llm) | {"tokens": options.tokens}, "rows": rows}
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
