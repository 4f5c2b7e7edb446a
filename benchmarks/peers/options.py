"""The command line, and what the machine has."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bozza.threads import default_threads

RESULTS = Path(__file__).parent.parent / "results"


def parse(about: str) -> argparse.Namespace:
    """The command line; `about` is the text of --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=Path, help="lines as for `bozza bench`")
    add("--model", default="smollm2", help="alias, folder or .gguf file")
    add("--assistant", help="a small model of the same vocabulary, for transformers and vLLM")
    add("--gguf", type=Path, help="the model for llama.cpp, Q4_K_M; default: --model when it is a .gguf file")
    add("--contestants", type=lambda text: text.split(","), help="names of contestants, workers or peers; default: all")
    add("--tokens", type=int, default=64)
    add("--limit", type=int, help="prompts of each workload")
    add("--batch", type=int, nargs="*", default=[8, 32], help="prompts at once; give none to leave this part out")
    add("--groups", type=int, default=2, help="groups of prompts of each size")
    add("--draft", nargs="+", default=["suffix", "recycling"], help="what Bozza's leader may choose from")
    add("--head", type=Path, help="one more drafter: an EAGLE head of this model")
    add("--proposer", metavar="MODULE.CLASS", help="one more contestant: a custom proposer inside vLLM")
    add("--proposer-path", type=Path, help="where its module is")
    add("--compile", dest="eager", action="store_false", help="compile the model, here and in vLLM")
    add("--threads", type=int, default=default_threads())
    add("--memory", type=float, default=most_memory(), help="GiB that all processes of a round may take")
    add("--patience", type=float, default=1800.0, help="seconds that loading or an answer may take")
    add("--out", type=Path, default=RESULTS / "peers.json")
    add("--setup", action="store_true", help="make what is missing and stop")
    given = parser.parse_args()
    if problem := wrong(given):
        parser.exit(2, f"{parser.prog}: {problem}\n")
    return given


def wrong(given: argparse.Namespace) -> str:
    """What is wrong with the command line."""
    for name in ("tokens", "limit", "groups", "threads", "memory", "patience"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            return f"--{name} is {value}: give more than 0"
    if any(size < 1 for size in given.batch):
        return f"--batch {min(given.batch)}: give more than 0"
    if given.prompts is None and not given.setup:
        return "--prompts is needed"
    for name in ("gguf", "head", "proposer_path"):
        path = getattr(given, name)
        if path is not None and not path.exists():
            return f"--{name.replace('_', '-')}: there is no {path}"
    if given.proposer and "." not in given.proposer:
        return f"--proposer {given.proposer}: write MODULE.CLASS"
    return ""


def most_memory() -> float:
    """What rounds are planned for, in GiB. A constant of the machine, so that a second start plans the same rounds."""
    return 0.85 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
