"""Runs tests against other copies of the sources, without importing torch and transformers anew for each.

A process of its own, spoken to through stdin and stdout. It imports what the tests need, never bozza, and forks for
each run; the child puts a copy of the sources before all other paths and only then imports bozza. Each run is a line of
JSON, the arguments of `child`; the answer is a line with its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

HEAVY = (
    "accelerate",
    "hypothesis.strategies",
    "llguidance",
    "torch.nn.attention.flex_attention",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "typer",
)
# What was imported early cannot be rewritten by plugins, and need not be.
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
OTHER_SOURCES = 99  # none of pytest's own


def child(source: str, tests: Sequence[str], log: str, seconds: int) -> NoReturn:
    """Run the tests until one fails, their output into a file, and end with pytest's status."""
    status = OTHER_SOURCES
    try:
        signal.alarm(seconds)  # a mutant may never come to an end
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.path.insert(0, source)
        ended = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", IMPORTED, *tests]))
        if Path(str(sys.modules["bozza"].__file__)).is_relative_to(source):
            status = ended
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what is after it belongs to the parent


def main() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    assert "bozza" not in sys.modules
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
