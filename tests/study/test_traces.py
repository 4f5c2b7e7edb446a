"""Files of traces: what is read, what is refused, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bozza.errors import PromptError
from bozza.study.traces import Trace, load_traces, read_line

RECORD: dict[str, Any] = {"prompt": [1, 2], "output": [3, 4, 5], "accept": {"eagle": [2, 0, 1], "mtp": [0, 0, 0, 4]}}


def line(**changes: Any) -> str:
    return json.dumps({key: value for key, value in (RECORD | changes).items() if value is not None})


def test_a_line_is_what_the_trace_says() -> None:
    trace = read_line(line(), "here")
    assert (trace.prompt, trace.output) == ((1, 2), (3, 4, 5))
    assert trace.accept == {"eagle": (2, 0, 1), "mtp": (0, 0, 0, 4)}
    assert (trace.workload, trace.confidence) == (None, {})


def test_the_cap_is_the_lines_else_the_files_else_the_largest_number() -> None:
    assert read_line(line(), "here").cap == {"eagle": 2, "mtp": 4}
    assert read_line(line(cap={"eagle": 7}), "here", {"eagle": 9, "mtp": 5, "other": 1}).cap == {"eagle": 7, "mtp": 5}


def test_nothing_is_right_beyond_the_output() -> None:
    trace = read_line(line(accept={"eagle": [9, 9, 9]}), "here")
    assert [trace.right("eagle", place) for place in range(3)] == [3, 2, 1]


def test_confidences_go_on_with_the_last_that_was_said() -> None:
    trace = read_line(line(confidence={"eagle": [[0.9, 0.5], [], [1]]}), "here")
    assert trace.sure("eagle", 0, 1) == (0.9,)
    assert trace.sure("eagle", 0, 4) == (0.9, 0.5, 0.5, 0.5)
    assert trace.sure("eagle", 1, 4) == ()
    assert trace.sure("eagle", 2, 2) == (1, 1)
    assert trace.sure("mtp", 0, 2) == ()


def test_a_drafter_goes_as_far_as_it_said_something_or_to_its_cap() -> None:
    trace = read_line(line(confidence={"eagle": [[0.9, 0.5, 0.4], [], []]}, cap={"eagle": 7}), "here")
    assert [trace.reach("eagle", place) for place in range(3)] == [3, 0, 1]
    assert trace.reach("mtp", 0) == 4


def test_a_trace_is_written_as_it_is_read(tmp_path: Path) -> None:
    first = read_line(line(workload="code", confidence={"eagle": [[0.5], [], [0.25, 0.125]]}), "here")
    second = Trace((7,), (8,), {}, {})
    (tmp_path / "traces.jsonl").write_text(f"{first.line()}\n\n{second.line()}\n")
    assert load_traces(tmp_path / "traces.jsonl") == [first, second]
    assert "confidence" not in second.line()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", 'write {"prompt"'),
        (line(prompt=None), 'write {"prompt"'),
        (line(accept=None), 'write {"prompt"'),
        (line(colour="red"), "unknown key 'colour'"),
        (line(workload=3), "the workload is a text, this is 3"),
        (line(prompt="text"), "prompt is a list of whole numbers"),
        (line(prompt=[]), "the prompt is empty"),
        (line(output=[], accept={}), "the output is empty"),
        (line(output=[3, -4, 5]), "output holds -4"),
        (line(output=[3, True, 5]), "output holds True"),
        (line(accept=[1]), "accept is an object"),
        (line(accept={"eagle": 3}), "accept.eagle is a list of whole numbers"),
        (line(accept={"eagle": [1, 2.5, 0]}), "accept.eagle holds 2.5"),
        (line(accept={"eagle": [1, 2]}), "accept.eagle has 2 entries for 3 output tokens"),
        (line(accept={"eagle": [1, 2, 3, 4, 5]}), "accept.eagle has 5 entries for 3 output tokens"),
        (line(cap=[4]), "cap is an object"),
        (line(cap={"medusa": 4}), "cap.medusa is of a drafter that accept does not have"),
        (line(cap={"eagle": 1.5}), "cap.eagle is 1.5"),
        (line(cap={"eagle": 1}), "accept.eagle holds 2, which is more than its cap of 1"),
        (line(confidence={"medusa": []}), "confidence.medusa is of a drafter that accept does not have"),
        (line(confidence={"eagle": [0.5, 0.5, 0.5]}), "confidence.eagle is a list of lists"),
        (line(confidence={"eagle": [[1.5], [], []]}), "confidence.eagle holds 1.5"),
        (line(confidence={"eagle": [[0.5], []]}), "confidence.eagle has 2 entries, accept.eagle has 3"),
    ],
)
def test_mistakes_are_one_line_that_names_the_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(f"{line()}\n{text}\n")
    with pytest.raises(PromptError) as caught:
        load_traces(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:2")
    assert says in message
    assert "\n" not in message


def test_a_file_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(PromptError, match="holds no traces"):
        load_traces(tmp_path / "empty.jsonl")
    with pytest.raises(PromptError, match="cannot read"):
        load_traces(tmp_path / "nowhere.jsonl")
