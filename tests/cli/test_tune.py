"""`bozza tune`, as a person calls it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bozza import LLM
from bozza.cli.tune import card, reason
from bozza.study import profiles

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(bozza: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Run `bozza tune` with profiles of its own."""
    monkeypatch.setattr(profiles, "costs_folder", lambda: tmp_path / "costs")
    return lambda *arguments: bozza("tune", *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"workload": load, "prompt": load + text} for load in ("a", "b") for text in ("abcabc", "hello there")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_document_has_predictions_for_each_batch_and_names_the_profile(
    command: Command, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    code, out, err = command(
        "-m", folders["target"], "--prompts", prompts,
        "--draft", "ngram:k=5", "--draft", f"eagle:{folders['head']},k=4", "--batch", 8, "--tokens", 12,
        "--limit", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["batches"] == [1, 4, 8]
    assert found["predicted"] is True
    assert found["requests"] == 2  # one of each workload
    assert found["tokens"] <= 24
    assert [entry["name"] for entry in found["drafters"]] == ["ngram", "eagle"]
    assert list(found["drafters"][0]["lengths"]["8"]) == ["1", "2", "4", "5"]
    assert set(found["sets"]) == {"merged", "adaptive", "oracle"}
    assert Path(found["profile"]).parent == tmp_path / "costs"
    assert json.loads(Path(found["profile"]).read_text())["costs"] == found["costs"]
    assert found["profile"] in err
    assert found["environment"]["draft"] == ["ngram:k=5", f"eagle:{folders['head']},k=4"]


def test_the_table_fits_and_says_that_it_predicts(
    command: Command, folders: dict[str, Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bozza.cli.options.out.width", 80)
    code, out, err = command(
        "-m", folders["target"], "--prompts", prompts, "-d", "suffix", "-d", f"model:{folders['shallow']},k=3",
        "--batch", 64, "--tokens", 8,
    )  # fmt: skip
    assert code == 0, err
    assert "predicted" in out
    assert "Predictions" in out
    for words in ("batch 1 ", "batch 64", "suffix", "model", "all together", "adaptive", "best possible"):
        assert words in out
    assert "tokens a step" in out
    assert "draft free" in out
    assert "wrote the costs to" in err
    table = out[out.index("drafter") :]
    assert max(map(len, table.splitlines())) <= 80


def test_the_best_length_is_shown_and_off_where_nothing_pays() -> None:
    entry = {"name": "eagle", "speedup": {1: 1.5, 64: 0.934}, "best": {1: 12, 64: 0}}
    sets = {"merged": {1: 1.4, 64: 0.8}, "adaptive": {1: 1.6, 64: 1.0}, "oracle": {1: 2.0, 64: 1.2}}
    found = {"batches": [1, 64], "drafters": [entry], "sets": sets}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(card(found))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["eagle", "1.50x", "k=12", "0.93x", "off"] in lines
    assert ["adaptive", "1.60x", "1.00x"] in lines
    assert not any("together" in line for line in lines)  # one drafter alone is no set


def test_a_reason_fits_in_a_line() -> None:
    entry = {"free": False, "tokens_per_step": 10.25, "first_token": 1.0, "draft_ms": 1234.5, "token_ms": 100.25}
    assert reason(entry) == "10.25 tokens a step · first right 100% · draft 1234.5 ms · token 100.2 ms"
    assert len(reason(entry)) < 80
    assert "draft free" in reason(entry | {"free": True})


def test_drafters_need_not_be_named(command: Command, folders: dict[str, Path], prompts: Path) -> None:
    code, out, err = command("-m", folders["target"], "--prompts", prompts, "--tokens", 6, "--batch", 1, "--json")
    assert code == 0, err
    assert "ngram" in [entry["name"] for entry in json.loads(out)["drafters"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompts", "/no/such/file"], "--prompts /no/such/file: there is no such file"),
        (["--draft", "grammar"], "drafter grammar has nothing to say"),
        (["--draft", "psychic"], "no drafter 'psychic'"),
        (["--draft", "ngram", "--draft", "ngram"], "ngram is named twice"),
        (["--batch", 0], "--batch"),
        (["--tokens", 1], "--tokens"),
        (["--limit", 0], "--limit"),
    ],
)
def test_mistakes_are_told_before_a_model_is_read(
    command: Command, prompts: Path, arguments: list[Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model is loaded before the mistake is seen"))
    given = arguments if "--prompts" in arguments else [*arguments, "--prompts", prompts]
    code, out, err = command(*given)
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())


def test_prompts_are_needed(command: Command) -> None:
    code, _, err = command()
    assert code == 2
    assert "--prompts" in err
