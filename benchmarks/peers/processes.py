"""A worker process that runs only while it is its turn, and does not outlive the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPTS = Path(__file__).parent / "workers"


class WorkerError(Exception):
    """A worker did not do what it was asked; the message is one line."""


class WorkerEndedError(WorkerError):
    """It will do nothing more."""


class Process:
    """A worker in a session of its own, stopped (SIGSTOP) except while it loads or answers.

    Args:
        name: for messages.
        python: of its environment.
        script: name of a file in `workers`.
        options: for the script.
        variables: added to the environment.
        log: where its standard error goes.
        patience: seconds that loading or an answer may take.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        log: Path,
        patience: float,
    ) -> None:
        self._name, self._log, self._patience = name, log, patience
        self._lines: queue.Queue[str] = queue.Queue()
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), str(SCRIPTS / script), json.dumps(dict(options))]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=os.environ | dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        self.ready: Mapping[str, Any] = {}

    def load(self) -> None:
        """Wait until it is ready, then stop it.

        Raises:
            WorkerError: it cannot load.
        """
        self.ready = self._answer()["ready"]
        self._signal(signal.SIGSTOP)

    def ask(self, variant: str, prompts: Sequence[Sequence[int]], tokens: int, fresh: bool = False) -> dict[str, Any]:
        """Let it decode.

        Raises:
            WorkerError: it failed, or did not do what was asked.
        """
        assert self._process.stdin is not None
        request = {"variant": variant, "prompts": prompts, "tokens": tokens, "fresh": fresh}
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
        except OSError as problem:
            raise WorkerEndedError(self._told("it ended")) from problem
        finally:
            self._signal(signal.SIGSTOP)
        lengths = {len(output) for output in answer["outputs"]}
        if len(answer["outputs"]) != len(prompts) or lengths != {tokens}:
            raise WorkerError(f"{self._name}: outputs of {sorted(lengths)} tokens instead of {tokens}")
        return answer

    def close(self) -> None:
        """End it and all that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._patience)
        except queue.Empty:
            raise WorkerEndedError(self._told(f"no answer in {self._patience:.0f} s")) from None
        if not line:
            raise WorkerEndedError(self._told("it ended"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(self._told(answer["error"]))
        return answer

    def _told(self, reason: str) -> str:
        return f"{self._name}: {reason} (log: {self._log})"
