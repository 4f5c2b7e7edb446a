"""vLLM's side of the protocol, on outputs that are known in advance: what is called when, and with what.

Per step, as in vLLM 0.32's `GPUModelRunner.sample_tokens`: the pass commits tokens, the table of rows is brought up to
date, the proposer is called with all rows of the pass, and then requests that have ended leave; the last row takes the
place of one that left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Propose = Callable[[list[list[int]], Any, Any], list[list[int]]]


@dataclass
class Job:
    """A request whose output is known."""

    name: str
    prompt: list[int]
    output: list[int]
    done: int = 0  # output tokens committed
    read: int = 0  # tokens of the prompt, or of what is read anew, that passes have read
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output[: self.done]


class FakeEngine:
    """Runs jobs.

    Args:
        propose: the proposer's method.
        context: most tokens of a request.
        chunk: most tokens of a prompt that a pass reads.
        rows: of the table.
    """

    def __init__(self, propose: Propose, context: int = 512, chunk: int = 10_000, rows: int = 16) -> None:
        self.propose = propose
        self.context = context
        self.chunk = chunk
        self.running: list[Job] = []
        self.calls: list[dict[str, list[int]]] = []  # per step, what was drafted for whom
        self.table = np.full((rows, context), 7, dtype=np.int32)  # what is beyond a row's length is left over
        self.lengths = np.zeros(rows, dtype=np.int32)

    def add(self, *jobs: Job) -> None:
        """Requests that take part from the next step on."""
        self.running += jobs

    def remove(self, name: str) -> Job:
        """A request that is aborted or preempted; the last row moves to its place."""
        place = next(place for place, job in enumerate(self.running) if job.name == name)
        job = self.running[place]
        self.running[place] = self.running[-1]
        self.running.pop()
        job.draft = []
        return job

    def step(self) -> dict[str, list[int]]:
        """One pass and one call of the proposer; returns the drafts by request."""
        sampled = [self._advance(job) for job in self.running]
        for row, job in enumerate(self.running):
            self.table[row, : len(job.tokens)] = job.tokens
            self.lengths[row] = len(job.tokens)
        drafts = self.propose(sampled, self.lengths, self.table)
        assert len(drafts) == len(self.running)
        for job, draft in zip(self.running, drafts, strict=True):
            job.draft = draft
        told = {job.name: job.draft for job in self.running}
        for job in [job for job in self.running if job.done >= len(job.output) or len(job.tokens) >= self.context]:
            self.remove(job.name)
        self.calls.append(told)
        return told

    def run(self, most: int = 1000) -> int:
        """Step until nothing runs; returns the number of steps."""
        for number in range(most):
            if not self.running:
                return number
            self.step()
        raise AssertionError("requests do not end")

    def _advance(self, job: Job) -> list[int]:
        before = job.done
        if job.read < len(job.tokens):
            job.read = min(job.read + self.chunk, len(job.tokens))
            if job.read < len(job.tokens):
                return []
            job.done += 1
        else:
            ahead = job.output[job.done :]
            right = 0
            while right < min(len(job.draft), len(ahead) - 1) and job.draft[right] == ahead[right]:
                right += 1
            job.done += right + 1
        job.done = min(job.done, self.context - len(job.prompt))
        job.read = len(job.tokens)
        return job.output[before : job.done]


def prose(count: int, start: int) -> list[int]:
    """Tokens that never come again."""
    return list(range(start, start + count))


def copying(name: str, start: int, length: int = 60, before: int = 5) -> Job:
    """A request that repeats its prompt after a few tokens of its own."""
    passage = prose(length, start)
    return Job(name, passage, [*prose(before, start + 500), *passage[length // 6 :]])


def drafted(calls: Sequence[dict[str, list[int]]], name: str) -> int:
    """Tokens drafted for a request."""
    return sum(len(call.get(name, [])) for call in calls)
