"""How many threads to compute with: one for each physical core that this process may use, and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bozza.errors import ConfigError

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def default_threads(cpus: Path = CPUS, cgroup: Path = CGROUP) -> int:
    """Physical cores within the process's affinity, or what a container's quota amounts to if that is less.

    Two threads on the two halves of a core share what a matrix product needs, and threads beyond a quota are put to
    sleep in the middle of a pass while the others wait for them.

    Args:
        cpus: where the kernel describes the processors.
        cgroup: where it mounts this process's control group.
    """
    cores = len({_siblings(cpus, cpu) for cpu in _allowed()})
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _allowed() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _siblings(cpus: Path, cpu: int) -> str:
    """What all hardware threads of one core have in common."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu {cpu}"


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the control group grants (version 2, then version 1), None without a limit."""
    try:
        if (file := cgroup / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if quota.strip() not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def use_threads(threads: int | None) -> int:
    """Compute with so many threads from now on, in the whole process; returns how many.

    Without a number, `OMP_NUM_THREADS` is heeded, then `default_threads`.

    Raises:
        ConfigError: there cannot be so many.
    """
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError(f"--threads {threads}: use 1 to 1024, or leave it out for one for each physical core")
    import torch

    if threads is not None or not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads or default_threads())
    return torch.get_num_threads()
