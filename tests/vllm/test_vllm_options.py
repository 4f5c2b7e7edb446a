"""Options inside vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bozza.errors import ConfigError
from bozza.vllm.options import VARIABLE, Options, read_options


def test_without_the_variable_the_defaults_hold() -> None:
    assert read_options({}) == Options() == read_options({VARIABLE: " "})
    assert Options().policy == "adaptive"


def test_the_variable_holds_json_or_names_a_file(tmp_path: Path) -> None:
    given = {"draft": ["suffix:k=8", "ngram"], "clock": "steps", "metrics_port": 9000}
    wanted = Options(draft=("suffix:k=8", "ngram"), clock="steps", metrics_port=9000)
    file = tmp_path / "options.json"
    file.write_text(json.dumps(given))
    assert read_options({VARIABLE: json.dumps(given)}) == wanted
    assert read_options({VARIABLE: str(file)}) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drafts": ["suffix"]}, "unknown option 'drafts'"),
        ({"draft": "suffix"}, "use a list"),
        ({"draft": []}, "use a list"),
        ({"draft": [3]}, "use a list"),
        ({"draft": ["model:x"]}, "'model' does not work inside vLLM"),
        ({"draft": ["prediction"]}, "does not work inside vLLM"),
        ({"draft": ["suffix:k=0"]}, "out of range"),
        ({"draft": ["ngram", "ngram"]}, "named twice"),
        ({"policy": "off"}, "policy is 'off'"),
        ({"clock": "cpu"}, "clock is 'cpu'"),
        ({"shared_history": 1}, "shared_history=1"),
        ({"shared_history": True, "draft": ["ngram"]}, "only drafter 'suffix'"),
        ({"costs": {"verify": {}}}, "costs"),
        ({"costs": 5}, "costs"),
        ({"trace": ""}, "trace is ''"),
        ({"trace": True}, "trace is True"),
        ({"metrics_port": 0}, "metrics_port is 0"),
        ({"metrics_port": True}, "metrics_port is True"),
        ({"metrics_port": "9000"}, "metrics_port is '9000'"),
        ({"policy": "fixed", "clock": "steps"}, "no use for clock"),
        ({"policy": "fixed", "costs": {"verify": {"base": 1.0}}}, "no use for costs"),
        ({"policy": "fixed", "trace": "x"}, "no use for trace"),
    ],
)
def test_wrong_options_are_refused_in_a_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_options({VARIABLE: json.dumps(given)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("/nowhere/options.json", "cannot be read"), ("{]", "is not JSON")]
)
def test_what_cannot_be_read_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_options({VARIABLE: text})
    assert "\n" not in str(caught.value)


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="write a JSON object"):
        read_options({VARIABLE: str(file)})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        read_options({VARIABLE: str(file)})
