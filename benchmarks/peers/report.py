"""From records to rows, ratios and tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from contestants import OURS, REFERENCE
from rich.table import Table
from turns import Job

ALL = "all"  # prompts of all workloads, one at a time


def measured(records: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[Mapping[str, Any]]:
    """The runs that belong to these jobs."""
    keys = {job.key for job in jobs}
    return [record for record in records if record["job"] in keys]


def rows(runs: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Tokens per second of every contestant in every group, and how many outputs are those of transformers."""
    plain = {run["job"]: run["outputs"] for run in runs if run["contestant"] == REFERENCE}
    made = []
    for group, keys in _groups(jobs).items():
        for contestant in _contestants(runs):
            mine = [run for run in runs if run["contestant"] == contestant and run["job"] in keys]
            if not mine:
                continue
            pairs = [
                (output, wanted)
                for run in mine
                if run["job"] in plain
                for output, wanted in zip(run["outputs"], plain[run["job"]], strict=True)
            ]
            seconds = sum(run["seconds"] for run in mine)
            made.append(
                {
                    "group": group,
                    "contestant": contestant,
                    "runs": len(mine),
                    "seconds": seconds,
                    "tokens_per_s": sum(run["tokens"] for run in mine) / seconds,
                    "compared": len(pairs),
                    "identical": sum(output == wanted for output, wanted in pairs),
                }
            )
    return made


def ratios(runs: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """How many times as long everybody else takes as each of ours: the median of runs paired in one round."""
    seconds: dict[tuple[str, str, str], float] = {
        (run["round"], run["job"], run["contestant"]): run["seconds"] for run in runs
    }
    paired: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (turn, job, ours), mine in seconds.items():
        if ours.startswith(OURS):
            for other in _contestants(runs):
                if other != ours and (theirs := seconds.get((turn, job, other))) is not None:
                    paired[job, ours, other].append(theirs / mine)
    made = []
    for group, keys in _groups(jobs).items():
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (job, ours, other), each in paired.items():
            if job in keys:
                found[ours, other] += each
        for (ours, other), each in found.items():
            entry = {"group": group, "ours": ours, "other": other, "pairs": len(each)}
            made.append(entry | {"median": statistics.median(each), "least": min(each), "most": max(each)})
    return made


def _groups(jobs: Sequence[Job]) -> dict[str, set[str]]:
    """Keys of jobs by group, and of all jobs with one prompt."""
    found: dict[str, set[str]] = {job.group: set() for job in jobs if not job.batched} | {ALL: set()}
    for job in jobs:
        found.setdefault(job.group, set()).add(job.key)
        if not job.batched:
            found[ALL].add(job.key)
    return found


def _contestants(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ours first."""
    names = dict.fromkeys(run["contestant"] for run in runs)
    return sorted(names, key=lambda name: not name.startswith(OURS))


def speed_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Tokens per second."""
    groups = list(dict.fromkeys(row["group"] for row in found))
    speeds = {(row["contestant"], row["group"]): row for row in found}
    table = Table("tokens/s", *groups, "as transformers", title="Speed")
    for name in dict.fromkeys(row["contestant"] for row in found):
        mine = [speeds.get((name, group)) for group in groups]
        cells = [f"{row['tokens_per_s']:.1f}" if row else "-" for row in mine]
        counted = [row for group, row in zip(groups, mine, strict=True) if row and group != ALL]
        same = f"{sum(row['identical'] for row in counted)} of {sum(row['compared'] for row in counted)}"
        table.add_row(name, *cells, same)
    return table


def ratio_tables(found: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One for each of ours: how many times as fast it is as the others."""
    groups = list(dict.fromkeys(row["group"] for row in found))
    made = []
    for ours in sorted({row["ours"] for row in found}):
        medians = {(row["other"], row["group"]): row["median"] for row in found if row["ours"] == ours}
        table = Table("faster than", *groups, title=f"{ours}, medians of paired runs")
        for other in dict.fromkeys(name for name, _ in medians):
            table.add_row(other, *(_times(medians.get((other, group))) for group in groups))
        made.append(table)
    return made


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
