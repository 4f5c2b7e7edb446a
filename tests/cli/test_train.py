"""`bozza train`, as a person calls it: mistakes are one line, and a run ends with a folder that drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM
from bozza.train import data
from training import talker

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(bozza: Command) -> Command:
    """Run `bozza train`."""
    return lambda *arguments: bozza("train", *arguments)


@pytest.fixture(scope="module")
def folder(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "talker"
    talker().save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"What is {number} and {number}?\n" for number in range(16)))
    return file


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model is loaded before the mistake is seen"))


@pytest.mark.parametrize("kind", ["eagle", "draft"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompts", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["--prompts", "{empty}"], "{empty} holds no prompts"),
        (["--prompts", "{keyless}"], 'line 2: no "prompt"'),
        (["--prompts", "{folder}"], "cannot read {folder}: Is a directory"),
        (["--out", "{empty}/below"], "--out {empty}/below: cannot be written to (Not a directory)"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_mistakes_are_a_line_before_any_work(
    command: Command, tmp_path: Path, kind: str, arguments: list[str], says: str
) -> None:
    names = {"empty": tmp_path / "empty", "keyless": tmp_path / "keyless", "folder": tmp_path}
    names["empty"].write_text("\n")
    names["keyless"].write_text('{"prompt": "one"}\n{"text": "two"}\n')
    arguments = [argument.format_map(names) for argument in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    code, out, err = command(kind, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error:")
    assert says.format_map(names) in err.replace("\n", " ")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        ("eagle", "--tokens", 10),
        ("eagle", "--tokens", "many"),
        ("eagle", "--epochs", 0),
        ("eagle", "--layers", 0),
        ("eagle", "--layers", 5),
        ("eagle", "--widen", 0),
        ("eagle", "--steps", 9),
        ("eagle", "--draft-vocab", 3),
        ("draft", "--tokens", 10),
        ("draft", "--epochs", -1),
        ("draft", "--layers", 0),
        ("draft", "--vocab", 3),
        ("draft", "--widen", 2),
        ("draft", "--steps", 2),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_numbers_out_of_range_and_foreign_options_are_refused_by_name(
    command: Command, tmp_path: Path, kind: str, flag: str, value: Any
) -> None:
    code, out, err = command(kind, "--out", tmp_path / "out", flag, value)
    assert (code, out) == (2, "")
    assert flag in err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.usefixtures("no_model")
def test_a_run_needs_a_folder(command: Command) -> None:
    code, _, err = command("eagle")
    assert code == 2
    assert "--out" in err


def test_what_only_the_target_can_tell_is_a_line_too(
    command: Command, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "ANSWER_TOKENS", 6)
    (tmp_path / "few").write_text("one\ntwo\n")
    for arguments, says in (
        (["draft", "--layers", 3], "--layers 3: the target has 3, use fewer"),
        (["eagle", "--prompts", tmp_path / "few"], "2 conversations are too few to train on"),
        (["eagle", "--model", tmp_path / "nowhere"], "no model"),
    ):
        code, out, err = command(*arguments, *([] if "--model" in arguments else ["-m", folder]),
                                 *([] if "--prompts" in arguments else ["--prompts", prompts]),
                                 "--out", tmp_path / str(arguments[0]))  # fmt: skip
        assert (code, out) == (2, "")
        assert says in err.replace("\n", " ")
        assert sum(line.startswith("error:") for line in err.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "flags", "name"),
    [("eagle", ["--draft-vocab", 80, "--steps", 2, "--widen", 1], "eagle"), ("draft", ["--layers", 2], "model")],
)
def test_a_run_ends_with_its_card_and_says_how_to_draft(
    command: Command,
    folder: Path,
    prompts: Path,
    tmp_path: Path,
    kind: str,
    flags: list[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "ANSWER_TOKENS", 10)
    out = tmp_path / "run"
    arguments = [kind, "-m", folder, "--prompts", prompts, "--epochs", 1, "--seed", 5, "--out", out, *flags]
    code, printed, err = command(*arguments, "--json")
    assert code == 0, err
    assert json.loads(printed) == json.loads((out / "card.json").read_text())
    assert json.loads(printed)["recipe"]["seed"] == json.loads(printed)["seed"] == 5
    assert f"--draft {name}:{out}" in err.replace("\n", "")
    code, printed, _ = command(*arguments)
    assert (code, printed) == (0, "")
    assert not (out / "work" / "writable").exists()
    llm = LLM(folder, policy="fixed", draft=[f"{name}:{out},k=3"])
    assert llm.generate("abc")[0].stats.drafted[name] > 0
