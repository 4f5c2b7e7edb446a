"""What the leader decided and what came of it, a JSON line each."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bozza.errors import ConfigError


class DecisionLog:
    """A file of decisions, which goes on where it ends if it exists. A context manager that closes it.

    Args:
        path: the file; its folder must exist.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("ab", buffering=0)  # nothing is left to write, or to fail, when it is closed
        except OSError as problem:
            raise self._refusal(problem) from problem

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record and hand it to the system at once: who follows the file sees whole decisions.

        Raises:
            ConfigError: the file cannot be written any more.
            ValueError: it is closed, or the record holds numbers that JSON does not have (infinite or none).
        """
        line = json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as problem:
            raise self._refusal(problem) from problem

    def close(self) -> None:
        """Close the file; more than once does no harm."""
        self._file.close()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _refusal(self, problem: OSError) -> ConfigError:
        return ConfigError(
            f"decisions cannot be written to {self.path} ({problem.strerror}): name a file in a folder of yours"
        )
