"""Rounds of workers that fit in memory, and jobs that all contestants of a round do one after the other."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contestants import OURS, Worker
from processes import Process, WorkerEndedError, WorkerError

from bozza.bench import Case, mixed

WARM_UP = 8  # tokens
Start = Callable[[Worker], Process]
Tell = Callable[[str], None]


class Job(NamedTuple):
    """Prompts that are decoded together."""

    key: str
    group: str  # what it is counted under
    prompts: Sequence[Sequence[int]]
    tokens: int
    batched: bool  # only for those who decode several prompts at once, with nothing learnt from earlier jobs


class Round(NamedTuple):
    """Workers that are in memory together: ours and some peers."""

    name: str
    workers: Sequence[Worker]


class Kept:
    """Records in a file, each written as soon as it is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._records = {self._key(record): record for record in map(json.loads, lines)}

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them, the last of each kind."""
        return list(self._records.values())

    def find(self, name: str, job: str, contestant: str) -> dict[str, Any] | None:
        """What was done in this run or an earlier one."""
        return self._records.get((name, job, contestant))

    def add(self, record: dict[str, Any]) -> None:
        """Keep one more."""
        self._records[self._key(record)] = record
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")

    @staticmethod
    def _key(record: Mapping[str, Any]) -> tuple[str, str, str]:
        return record["round"], record["job"], record["contestant"]


def jobs(cases: Sequence[Case], tokens: int, batches: Sequence[int], groups: int, about: Any) -> list[Job]:
    """One prompt of each workload after the other; then groups of all workloads together.

    `about` is whatever else a measurement depends on: with another one, nothing that is kept is taken up.
    """
    ordered = mixed(cases)
    made = [_job(case.workload, [case.prompt], tokens, False, about) for case in ordered]
    for size in batches:
        for turn in range(groups):
            chosen = [ordered[(turn * size + place) % len(ordered)].prompt for place in range(size)]
            made.append(_job(f"{size} at once", chosen, tokens, True, about))
    return made


def _job(group: str, prompts: Sequence[Sequence[int]], tokens: int, batched: bool, about: Any) -> Job:
    key = hashlib.sha256(json.dumps([group, prompts, tokens, about]).encode()).hexdigest()[:16]
    return Job(key, group, prompts, tokens, batched)


def plan(workers: Sequence[Worker], budget: float, tell: Tell) -> list[Round]:
    """Rounds of ours and as many peers as fit in a budget of GiB."""
    ours = [worker for worker in workers if worker.peer == OURS]
    left = budget - sum(worker.memory for worker in ours)
    packed: list[list[Worker]] = []
    for worker in workers:
        if worker.peer == OURS:
            continue
        if worker.memory > left:
            tell(f"{worker.name}: left out, needs about {worker.memory:.1f} GiB and {left:.1f} are left (--memory)")
            continue
        room = (mates for mates in packed if sum(mate.memory for mate in mates) + worker.memory <= left)
        mates = next(room, None)
        if mates is None:
            packed.append([worker])
        else:
            mates.append(worker)
    if not packed and ours:
        packed = [[]]
    return [Round("+".join(mate.name for mate in mates) or OURS, [*ours, *mates]) for mates in packed]


class Turns:
    """A round under way: its processes, and who can still go on.

    Args:
        current: the round.
        kept: what has been done, and where records go.
        tell: shows a line.
    """

    def __init__(self, current: Round, kept: Kept, tell: Tell) -> None:
        self._round, self._kept, self._tell = current, kept, tell
        self._running: dict[str, Process] = {}  # by contestant

    def play(self, todo: Sequence[Job], start: Start) -> None:
        """Do what is missing."""
        if not any(map(self._missing, todo)):
            return
        with contextlib.ExitStack() as stack:
            for worker in self._round.workers:
                self._load(worker, stack.enter_context(start(worker)))
            warm_up = list(reversed(todo[0].prompts[0]))  # of no use for what is measured
            for worker, contestant in self._contestants(batched=False):
                self._ask(worker, contestant, [warm_up], WARM_UP, fresh=False)
            for turn, job in enumerate(todo):
                order = self._missing(job)
                shift = turn % max(1, len(order))
                for worker, contestant in [*order[shift:], *order[:shift]]:
                    self._do(job, worker, contestant)
                if order:
                    self._tell(f"{self._round.name}, {job.group}: {self._told(job)}")

    def _contestants(self, batched: bool) -> list[tuple[Worker, str]]:
        return [
            (worker, contestant)
            for worker in self._round.workers
            for contestant in worker.variants
            if not batched or contestant in worker.batched
        ]

    def _missing(self, job: Job) -> list[tuple[Worker, str]]:
        name = self._round.name
        return [pair for pair in self._contestants(job.batched) if not self._kept.find(name, job.key, pair[1])]

    def _load(self, worker: Worker, process: Process) -> None:
        try:
            process.load()
        except WorkerError as problem:
            process.close()
            self._tell(f"{worker.name}: skipped, {problem}")
            return
        self._kept.add({"round": "", "job": "", "contestant": worker.name, "ready": process.ready})
        for contestant, variant in worker.variants.items():
            if variant in process.ready["variants"]:
                self._running[contestant] = process
            else:
                self._tell(f"{contestant}: skipped, {process.ready['failed'].get(variant, 'not offered')}")

    def _ask(
        self, worker: Worker, contestant: str, prompts: Sequence[Sequence[int]], tokens: int, fresh: bool
    ) -> dict[str, Any] | None:
        """The answer, or None and a line when there is none: then that is the end of the contestant."""
        if (process := self._running.get(contestant)) is None:
            return None
        try:
            return process.ask(worker.variants[contestant], prompts, tokens, fresh)
        except WorkerError as problem:
            self._tell(f"{contestant}: given up, {problem}")
            lost = worker.variants if isinstance(problem, WorkerEndedError) else [contestant]
            for name in lost:
                self._running.pop(name, None)
            return None

    def _do(self, job: Job, worker: Worker, contestant: str) -> None:
        answer = self._ask(worker, contestant, job.prompts, job.tokens, fresh=job.batched)
        if answer is not None:
            about = {"round": self._round.name, "job": job.key, "group": job.group, "contestant": contestant}
            self._kept.add(about | answer)

    def _told(self, job: Job) -> str:
        found = [(name, self._kept.find(self._round.name, job.key, name)) for _, name in self._contestants(False)]
        return ", ".join(f"{name} {record['tokens'] / record['seconds']:.1f}" for name, record in found if record)
