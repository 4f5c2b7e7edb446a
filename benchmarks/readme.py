"""Write the tables of README.md and of the documents from the stored results, or check that they agree.

usage: python benchmarks/readme.py [--check]

A table stands between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def demo() -> str:
    document = load("demo")
    rows = [
        [
            row["prompt"],
            str(row["tokens"]),
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['speculative_tokens_per_s']:.1f}",
            f"**{row['ratio']:.2f}**",
            f"{row['committed_per_pass']:.2f}",
            ", ".join(f"{name} {share:.0%}" for name, share in row["share"].items()) or "-",
            row["identical"],
        ]
        for row in document["rows"]
    ]
    headings = ["prompt", "tokens", "plain tokens/s", "speculative", "ratio", "tokens per pass", "guessed", "identical"]
    return table(headings, rows) + "\n\n" + footnote(document["environment"])


def plain() -> str:
    document = load("plain")
    rows = [
        [
            row["contestant"],
            row["dtype"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_transformers']:.2f}",
            f"{row['equal_to_transformers']} of {row['runs']}",
        ]
        for row in document["rows"]
    ]
    headings = ["decoder", "dtype", "tokens/s", "ratio to transformers", "outputs equal to transformers'"]
    return table(headings, rows)


def overhead() -> str:
    rows = [
        [
            str(row["batch"]),
            row["drafter"],
            row["sampling"],
            *(f"{row[key]:.2f}" for key in ("draft", "sample", "other")),
            f"**{row['outside_ms']:.2f}**",
            f"{row['sample_share']:.1%}",
        ]
        for row in load("overhead")["engine"]
    ]
    return table(
        ["batch", "drafter", "sampling", "draft", "sample", "other", "together, ms per step", "sampling's share"], rows
    )


def drafters() -> str:
    document = load("drafters")
    workloads = list(dict.fromkeys(row["workload"] for row in document["rows"]))
    found = {(row["draft"], row["workload"]): row for row in document["rows"]}
    rows = [
        [
            f"`{draft.replace(' ', '` + `')}`",
            *(
                f"{found[draft, workload]['committed_per_pass']:.2f} ({found[draft, workload]['ratio']:.2f}x)"
                for workload in workloads
            ),
        ]
        for draft in dict.fromkeys(row["draft"] for row in document["rows"])
    ]
    facts = document["environment"]
    prompts = document["rows"][0]["prompts"]
    about = f"{prompts} prompts of each workload, {facts['tokens']} tokens, batch 1, policy `fixed`. "
    return table(["drafters", *(name.replace("_", " ") for name in workloads)], rows) + "\n\n" + about + footnote(facts)


def leader() -> str:
    document = load("leader")
    ratios = {(row["contestant"], row["group"]): row["ratio"] for row in document["rows"]}
    runs = {row["group"]: row["runs"] for row in document["rows"]}
    levels = [group for group in runs if group.endswith(" at once")]
    hard = [group for group in runs if group in ("random tokens",) or "temperature" in group]
    stream = [group for group in runs if group not in (*levels, *hard, "all")] + ["all"]
    parts = []
    for groups in (stream, levels):
        contestants = [name for name, group in ratios if group == groups[-1] and name != "off"]
        rows = []
        for name in dict.fromkeys(contestants):
            called = f"`{name.replace(' ', '` + `')}`" if name != "adaptive" else "**adaptive**, all drafters"
            best = {group: max(r for (_, g), r in ratios.items() if g == group) for group in groups}
            cells = [f"{ratios[name, group]:.2f}x" for group in groups]
            rows.append(
                [called]
                + [
                    f"**{cell}**" if ratios[name, group] == best[group] else cell
                    for cell, group in zip(cells, groups, strict=True)
                ]
            )
        parts.append(table(["drafts", *(group.replace("_", " ") for group in groups)], rows))
    told = [f"{group} {max(r for (n, g), r in ratios.items() if g == group and n != 'off'):.2f}x" for group in hard]
    facts = document["environment"]
    about = (
        f"Speed against plain decoding, whole requests, {runs['all']} prompts of {document['tokens']} tokens in the "
        f"first table, half as many tokens in the second. Where nothing can be guessed: {', '.join(told)}. "
    )
    return "\n\n".join([*parts, about + footnote(facts)])


def quality() -> str:
    document = load("quality")
    rows = [
        [f"{row['model']}, {row['weights']}", f"{row['perplexity']:.2f}", f"{row['agreement']:.1%}", str(row["tokens"])]
        for row in document["rows"]
    ]
    return table(["model", "perplexity", "same likeliest next token", "tokens"], rows)


def passes() -> str:
    rows = []
    for row in load("speed")["rows"]:
        limit = f"{row['limit_ms']:.1f}" if "limit_ms" in row else ""
        cells = [f"{milliseconds:.1f}" for milliseconds in row["pass_ms"].values()]
        rows.append([f"{row['model']}, {row['side']}", limit, *cells])
    sizes = load("speed")["rows"][0]["pass_ms"]
    return table(["", "limit", *(f"n={new}" for new in sizes)], rows)


def prefill() -> str:
    read = [row for row in load("speed")["rows"] if "prefill_tokens_per_s" in row]
    rows = [
        [f"{row['model']}, {row['side']}"]
        + [f"{speed:.0f}" for speed in (*row["prefill_tokens_per_s"].values(), row["products_alone_tokens_per_s"])]
        for row in read
    ]
    return table(["", *read[0]["prefill_tokens_per_s"], "products alone"], rows)


def peers() -> str:
    document = load("peers")
    speeds = {(row["contestant"], row["group"]): row for row in document["rows"]}
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    # Ours run in each round, so theirs say how many runs are all.
    others = [row for row in document["rows"] if not row["contestant"].startswith("bozza")]
    whole = {group: max(row["runs"] for row in others if row["group"] == group) for group in groups}
    rows = []
    for name in dict.fromkeys(row["contestant"] for row in document["rows"]):
        cells = [shown(speeds.get((name, group)), whole[group]) for group in groups]
        rows.append([f"**{name}**" if name.startswith("bozza") else name, *cells])
    facts = document["environment"]
    about = f"{facts['tokens']} tokens, {whole['all']} prompts; in brackets: not on all of them."
    return table(["", *(group.replace("_", " ") for group in groups)], rows) + f"\n\n{about} {footnote(facts)}"


def shown(row: dict[str, Any] | None, whole: int) -> str:
    """Tokens per second; in brackets if not all prompts were done."""
    if row is None:
        return ""
    speed = f"{row['tokens_per_s']:.1f}"
    return speed if row["runs"] >= whole else f"({speed})"


def ratios() -> str:
    document = load("peers")
    groups = list(dict.fromkeys(row["group"] for row in document["ratios"]))
    medians = {(row["ours"], row["other"], row["group"]): row["median"] for row in document["ratios"]}
    others = [name for name in dict.fromkeys(key[1] for key in medians) if not name.startswith("bozza")]
    rows = []
    for other in others:
        pairs = [[medians.get((f"bozza-{ours}-adaptive", other, g)) for ours in ("int8", "bf16")] for g in groups]
        cells = [" / ".join(f"{ratio:.2f}" for ratio in pair if ratio is not None) for pair in pairs]
        rows.append([other, *cells])
    return table(["adaptive, int8 / bf16", *(group.replace("_", " ") for group in groups)], rows)


def served() -> str:
    parts = []
    for name in ("vllm-1.5b", "vllm", "vllm-128"):
        document = load(name)
        workloads = list(dict.fromkeys(row["workload"] for row in document["rows"]))
        found = {(row["at_once"], row["contestant"], row["workload"]): row for row in document["rows"]}
        rows = []
        for at_once, contestant in dict.fromkeys(key[:2] for key in found):
            mine = [found[at_once, contestant, workload] for workload in workloads]
            cells = [f"{row['tokens_per_s']:.1f} ({row['ratio_to_plain']:.2f}x)" for row in mine]
            rows.append([f"{contestant}, {at_once} at once", *cells])
        facts = document["environment"]
        about = f"{document['rows'][0]['model']}, {facts['tokens']} tokens, {facts['rounds']} rounds, {facts['vllm']}"
        headings = ["tokens/s", *(workload.replace("_", " ") for workload in workloads)]
        parts.append(f"{table(headings, rows)}\n\n{about}, {facts['date'][:10]}.")
    return "\n\n".join(parts)


def equal() -> str:
    rows = []
    for name in ("vllm-1.5b", "vllm", "vllm-128", "vllm-float32"):
        document = load(name)
        for check in document["checks"]:
            gaps = [difference["gap"] for difference in check["differences"]]
            cells = [str(check["at_once"]), str(check["outputs"]), str(len(gaps)), f"{max(gaps):.4f}" if gaps else ""]
            stored = "" if document["environment"]["dtype"] == "auto" else f", {document['environment']['dtype']}"
            rows.append([f"{check['model']}{stored}, {check['contestant']}", *cells])
    return table(["", "at once", "outputs", "other than plain, one at a time", "largest gap there"], rows)


def proposer() -> str:
    document = load("vllm-overhead")
    rows = [[str(row["requests"]), *(f"{row[key]:.0f}" for key in MICROSECONDS)] for row in document["rows"]]
    about = f"At a context of {document['environment']['context']:,} tokens, {document['environment']['date'][:10]}."
    return table(["requests", "median", "mean", "99 of 100 below"], rows) + "\n\n" + about


def footnote(facts: dict[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['dtype']}, {facts['threads']} threads of an {facts['processor']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}, {facts['date'][:10]}."
    )


MICROSECONDS = ("median_us", "mean_us", "p99_us")
SHOWN: dict[str, Sequence[Callable[[], str]]] = {
    "README.md": (demo, passes, leader, drafters, plain, overhead),
    "docs/speed.md": (quality, passes, prefill, peers, ratios),
    "docs/vllm.md": (served, equal, proposer),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when README.md is stale")
    options = parser.parse_args()
    for name, tables in SHOWN.items():
        file = ROOT / name
        text = written = file.read_text(encoding="utf-8")
        for make in tables:
            block = re.compile(rf"(<!-- {make.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
            written, found = block.subn(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", written)
            if not found:
                sys.exit(f"{name} has no <!-- {make.__name__} --> block")
        if options.check and written != text:
            sys.exit(f"{name} does not show the stored results: run make readme")
        file.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
