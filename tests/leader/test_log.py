"""The file of decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bozza.errors import ConfigError
from bozza.leader.log import DecisionLog

RECORD: dict[str, Any] = {
    "step": 3,
    "request": 0,
    "candidates": [{"drafters": ["suffix", "eagle"], "tokens": 12, "gain": 2.5, "seconds": 0.0421}],
    "choice": "suffix+eagle",
    "expected": 3.5,
}


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_record_is_a_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    with DecisionLog(file) as log:
        for step in range(3):
            log.write(RECORD | {"step": step, "choice": "naïve\n"})
            assert lines(file)[step:] == [RECORD | {"step": step, "choice": "naïve\n"}]
    assert file.read_bytes().endswith(b"\n")
    with pytest.raises(ValueError, match="closed"):
        log.write(RECORD)


def test_an_existing_file_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    for step in range(2):
        log = DecisionLog(str(file))
        log.write({"step": step})
        log.close()
        log.close()
    assert lines(file) == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize("name", ["no/such/folder.jsonl", "."])
def test_a_file_that_cannot_be_written_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name a file in a folder of yours") as refusal:
        DecisionLog(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_full_disk_is_a_line_too() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(ConfigError, match="cannot be written to /dev/full"), DecisionLog(full) as log:
        log.write(RECORD)


def test_numbers_that_json_does_not_have_are_not_written(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "decisions.jsonl") as log, pytest.raises(ValueError, match="JSON"):
        log.write({"gain": float("inf")})
    assert lines(tmp_path / "decisions.jsonl") == []
