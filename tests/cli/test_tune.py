"""`bozza tune`, as a person calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM
from bozza.cli import app as cli
from bozza.study import tuning

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run `bozza tune` with a cache of its own; returns exit code, standard output and standard error."""
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "SECONDS", 0.3)

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bozza", "tune", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"workload": load, "prompt": text} for load in ("a", "b") for text in ("abcabc", "hello there")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_document_has_predictions_for_each_batch_and_names_the_profile(
    command: Command, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    code, out, err = command(
        "-m", folders["target"], "--prompts", prompts, "--draft", "ngram:k=5", "--draft", f"eagle:{folders['head']},k=4",
        "--batch", 8, "--tokens", 12, "--limit", 1, "--json",
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
    assert Path(found["profile"]).parent == tmp_path / "cache" / "costs"
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
    for words in ("batch 1 ", "batch 64", "suffix", "model", "all together", "adaptive", "best possible", "x k="):
        assert words in out
    assert "tokens a step" in out
    assert "draft free" in out
    assert "wrote the costs to" in err
    table = out[out.index("drafter") :]
    assert max(map(len, table.splitlines())) <= 80


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
