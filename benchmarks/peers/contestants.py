"""Who takes part: contestants (variants) by the worker process that runs them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 2**30
OURS = "bozza"
REFERENCE = "transformers-plain"  # whose outputs all others are compared with
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Worker:
    """A process and what it runs.

    Args:
        name: unique.
        peer: whose environment and script it uses.
        variants: contestant -> what the worker calls it.
        batched: contestants that decode several prompts at once.
        memory: GiB, an estimate for planning rounds.
        options: for the script.
        variables: of its environment.
        missing: what it lacks, when it cannot run.
    """

    name: str
    peer: str
    variants: Mapping[str, str]
    batched: tuple[str, ...]
    memory: float
    options: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    def only(self, variants: Mapping[str, str]) -> Worker:
        """The same with fewer variants."""
        return replace(self, variants=variants, batched=tuple(name for name in self.batched if name in variants))


@dataclass(frozen=True)
class Sizes:
    """Sizes in GiB of what is loaded; 0 for what is not given."""

    model: float
    assistant: float
    gguf: float


def weight(path: Path | None) -> float:
    """GiB of a file, or of the weights in a folder."""
    if path is None:
        return 0.0
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return sum(file.stat().st_size for file in files) / GIB


def workers(given: argparse.Namespace, context: int, exports: Mapping[str, Path]) -> list[Worker]:
    """All that the options allow for, ours first."""
    sizes = Sizes(weight(given.model), weight(given.assistant), weight(given.gguf))
    return [
        *_bozza(given, sizes),
        _transformers(given, sizes),
        _llama(given, sizes, context),
        *_openvino(given, sizes, exports),
        *_vllm(given, sizes, context),
    ]


def _bozza(given: argparse.Namespace, sizes: Sizes) -> list[Worker]:
    draft = [*given.draft, *([f"eagle:{given.head}"] if given.head else [])]
    made = []
    for name, quantize, share in (("bf16", None, 1.1), ("int8", "int8", 0.7)):
        variants = {f"bozza-{name}-{policy}": policy for policy in ("off", "adaptive")}
        options = {"model": str(given.model), "draft": draft, "quantize": quantize, "threads": given.threads}
        options["compile"] = not given.eager
        memory = share * sizes.model + 1.0
        made.append(Worker(f"bozza-{name}", OURS, variants, tuple(variants), memory, options))
    return made


def _transformers(given: argparse.Namespace, sizes: Sizes) -> Worker:
    variants = {REFERENCE: "plain", "transformers-lookup": "lookup"}
    if given.assistant:
        variants["transformers-assistant"] = "assistant"
    options = {"model": str(given.model), "assistant": str(given.assistant), "threads": given.threads}
    memory = sizes.model + sizes.assistant + 1.5
    return Worker("transformers", "transformers", variants, (REFERENCE,), memory, options)


def _llama(given: argparse.Namespace, sizes: Sizes, context: int) -> Worker:
    options = {"gguf": str(given.gguf), "context": context, "threads": given.threads}
    variants = {"llama.cpp-plain": "plain", "llama.cpp-lookup": "lookup"}
    missing = "" if given.gguf else "no --gguf FILE"
    memory = 2 * 1.6 * sizes.gguf + 1.5  # two contexts, weights repacked in each
    return Worker("llama.cpp", "llama.cpp", variants, (), memory, options, missing=missing)


def _openvino(given: argparse.Namespace, sizes: Sizes, exports: Mapping[str, Path]) -> list[Worker]:
    made = []
    for bits, share in (("int8", 0.5), ("int4", 0.35)):
        variants = {f"openvino-{bits}-plain": "plain", f"openvino-{bits}-lookup": "lookup"}
        options = {"model": str(exports[bits]), "threads": given.threads}
        memory = 2 * share * sizes.model * 1.3 + 1.5  # two pipelines
        missing = "" if (exports[bits] / ".ready").exists() else f"no {bits} export of this model: run --setup"
        made.append(Worker(f"openvino-{bits}", "openvino", variants, tuple(variants), memory, options, missing=missing))
    return made


def _vllm(given: argparse.Namespace, sizes: Sizes, context: int) -> list[Worker]:
    draft = {"method": "draft_model", "model": str(given.assistant), "num_speculative_tokens": 4}
    custom = {"method": "custom_class", "model": given.proposer, "num_speculative_tokens": 16}
    kinds: dict[str, dict[str, Any] | None] = {"vllm-plain": None, "vllm-ngram": LOOKUP}
    kinds |= {"vllm-draft": draft} if given.assistant else {}
    kinds |= {"vllm-proposer": custom} if given.proposer else {}
    made = []
    for name, speculative in kinds.items():
        options = {
            "model": str(given.model),
            "context": context,
            "batch": max([1, *given.batch]),
            "eager": given.eager,
            "speculative": speculative,
        }
        extra = sizes.assistant if name == "vllm-draft" else 0.0
        memory = sizes.model + extra + 4.0  # 2 of them for keys and values
        made.append(Worker(name, "vllm", {name: name}, (name,), memory, options, _vllm_variables(given)))
    return made


def _vllm_variables(given: argparse.Namespace) -> dict[str, str]:
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that it can be stopped as one
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(given.proposer_path or ""),
    }
    usable = sorted(os.sched_getaffinity(0))
    if given.threads < len(usable):
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, usable[: given.threads]))
    return variables
