"""Threads are counted by cores, affinity and quota, on folders like the kernel's; what a user says comes first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bozza.errors import ConfigError
from bozza.threads import default_threads, use_threads

Machine = Callable[..., int]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Default threads on a machine that is described.

    Args of the function:
        siblings: what each processor says of its core; None says nothing.
        allowed: processors that this process may use.
        files: of the control group.
    """

    def described(siblings: list[str | None], allowed: set[int], files: dict[str, str] | None = None) -> int:
        for cpu, text in enumerate(siblings):
            topology = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            if text is not None:
                (topology / "thread_siblings_list").write_text(text + "\n")
        for name, text in (files or {}).items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
        return default_threads(tmp_path / "cpus", tmp_path / "cgroup")

    return described


HALVES = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"]  # four cores of two threads


@pytest.mark.parametrize(
    ("siblings", "allowed", "threads"),
    [
        (HALVES, set(range(8)), 4),
        (["0,4", "1,5", "2,6", "3,7"] * 2, set(range(8)), 4),
        (["0", "1", "2"], {0, 1, 2}, 3),
        (HALVES, {0, 1}, 1),  # two halves of one core
        (HALVES, {1, 2, 4}, 3),
        (HALVES, {7}, 1),
        ([None, None, None], {0, 1, 2}, 3),  # a kernel that does not say
        (["0-1", "0-1", None], {0, 1, 2}, 2),
        ([], {0, 1}, 2),
    ],
)
def test_one_thread_for_each_core_that_may_be_used(
    machine: Machine, siblings: list[str | None], allowed: set[int], threads: int
) -> None:
    assert machine(siblings, allowed) == threads


V1 = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "399999 100000\n"}, 3),  # a fourth would be put to sleep
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 4),  # more than there are cores
        ({V1[0]: "-1\n", V1[1]: "100000\n"}, 4),
        ({V1[0]: "250000\n", V1[1]: "100000\n"}, 2),
        ({V1[0]: "20000\n", V1[1]: "100000\n"}, 1),
        ({V1[0]: "100000\n"}, 4),
        ({"cpu.max": "300000 100000\n", V1[0]: "100000\n", V1[1]: "100000\n"}, 3),  # version 2 counts
        ({"cpu.max": ""}, 4),
        ({"cpu.max": "much 100000\n"}, 4),
        ({"cpu.max": "100000 0\n"}, 4),
        ({"cpu.max/folder": ""}, 4),
    ],
)
def test_no_more_threads_than_a_container_is_granted(machine: Machine, files: dict[str, str], threads: int) -> None:
    assert machine(list(HALVES), set(range(8)), files) == threads


def test_without_affinity_all_processors_count(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(list(HALVES), {0})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert default_threads(tmp_path / "cpus", tmp_path / "cgroup") == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(tmp_path / "cpus", tmp_path / "cgroup") == 1


def test_this_machine_has_a_core() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch was told, which does not happen."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1] if numbers else 77)
    monkeypatch.setattr("bozza.threads.default_threads", lambda: 5)
    return numbers


@pytest.mark.parametrize(
    ("threads", "variable", "expected"),
    [
        (None, None, [5]),
        (None, "", [5]),
        (None, "3", []),  # torch has heeded it already
        (2, None, [2]),
        (2, "3", [2]),
        (1, None, [1]),
        (1024, None, [1024]),
    ],
)
def test_what_a_user_says_comes_first(
    told: list[int], threads: int | None, variable: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert use_threads(threads) == (expected[0] if expected else 77)
    assert told == expected


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_impossible_numbers_are_refused_in_a_line(told: list[int], threads: int) -> None:
    with pytest.raises(ConfigError, match=f"--threads {threads}: use 1 to 1024, or leave it out") as caught:
        use_threads(threads)
    assert "\n" not in str(caught.value)
    assert told == []
