"""What every worker does: load, say what it can, answer requests. Standard library only.

A worker is started with its options as one JSON argument. It writes one JSON object a line:
    {"ready": {"variants": [NAME, ...], "versions": {...}, "settings": {...}, "failed": {NAME: REASON}}}
and then answers each line {"variant", "prompts", "tokens", "fresh"} of its standard input with
    {"seconds", "tokens", "outputs"} or {"error"}.
Only the decoding is timed. What libraries print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]  # prompts, tokens -> new tokens of each


@dataclass
class Offer:
    """What a worker has loaded."""

    variants: dict[str, Decode] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None  # drop what was learnt from earlier requests

    def add(self, name: str, make: Callable[[], Decode]) -> None:
        """Load a variant, or note why it cannot be."""
        try:
            self.variants[name] = make()
        except Exception as problem:  # whatever a library raises
            self.failed[name] = reason(problem)


def reason(problem: BaseException) -> str:
    """An exception in one line."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"


def serve(load: Callable[[dict[str, Any]], Offer], packages: Sequence[str]) -> None:
    """Load with the options of the command line and answer until standard input ends.

    `load` gets the options; "variants" in them names what is wanted.
    """
    _die_with_parent()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        offer = load(json.loads(sys.argv[1]))
    except Exception as problem:
        say({"error": reason(problem)})
        raise
    versions = {package: version(package) for package in packages}
    say(
        {
            "ready": {
                "variants": list(offer.variants),
                "versions": versions,
                "settings": offer.settings,
                "failed": offer.failed,
            }
        }
    )
    for line in sys.stdin:
        say(_answer(offer, json.loads(line)))


def _answer(offer: Offer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["fresh"]:
            offer.forget()
        decode = offer.variants[request["variant"]]
        begun = time.perf_counter()
        outputs = decode(request["prompts"], request["tokens"])
        seconds = time.perf_counter() - begun
    except Exception as problem:
        return {"error": reason(problem)}
    return {"seconds": seconds, "tokens": sum(map(len, outputs)), "outputs": outputs}


def _die_with_parent() -> None:
    """Let the kernel end this process when the benchmark is killed: a stopped worker could not notice."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
