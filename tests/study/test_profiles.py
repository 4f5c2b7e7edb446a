"""A profile is found again in its own setting and nowhere else; nothing on disk can break a generation."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM
from bozza.study import profiles
from bozza.study.profiles import Setting, costs_folder, load, path_of, save
from products import needs_int8

SETTING = Setting(
    processor="A chip",
    cores=2,
    threads=1,
    device="cpu",
    dtype="bfloat16",
    weights="packed",
    compiled=False,
    model="llama 3x64, 211 tokens, vocabulary 0123",
    drafters=("eagle:head,k=4", "model:small,k=2"),
    rule="coupled",
    invariant=False,
    bozza="0.1.0",
    torch="2.9.0",
    transformers="5.23.0",
    python="3.12.1",
)
COSTS = {
    "verify": {"knots": [[1, 0.03], [64, 0.08]], "per_row": 0.001, "per_cached": 1e-6},
    "overhead": 0.0,
    "drafters": {"eagle": {"base": 0.002, "per_depth": 0.001, "per_token": 0.0, "per_cached": 0.0}},
}
FIELDS = [entry.name for entry in fields(Setting)]


def other(value: Any) -> Any:
    """A value that is not the given one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return (*value, "ngram") if isinstance(value, tuple) else value + "x"


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    file = save(SETTING, COSTS, tmp_path / "not" / "there")
    assert file is not None
    assert file.parent == tmp_path / "not" / "there"
    assert load(SETTING, file.parent) == (COSTS, "")
    document = json.loads(file.read_text())
    assert document["setting"] == json.loads(json.dumps(asdict(SETTING)))
    assert document["costs"] == COSTS
    assert document["date"].startswith("20")
    assert list(file.parent.iterdir()) == [file]


def test_nothing_measured_is_no_profile(tmp_path: Path) -> None:
    costs, reason = load(SETTING, tmp_path / "nowhere")
    assert costs is None
    assert "nothing has been measured" in reason


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_setting_names_another_file(tmp_path: Path, name: str) -> None:
    save(SETTING, COSTS, tmp_path)
    strange = replace(SETTING, **{name: other(getattr(SETTING, name))})
    assert strange.key != SETTING.key
    assert load(strange, tmp_path).costs is None


@pytest.mark.parametrize("name", FIELDS)
def test_a_file_of_another_setting_is_refused_by_name(tmp_path: Path, name: str) -> None:
    strange = replace(SETTING, **{name: other(getattr(SETTING, name))})
    file = save(strange, COSTS, tmp_path)
    assert file is not None
    file.rename(path_of(SETTING, tmp_path))  # as if the digests were the same
    costs, reason = load(SETTING, tmp_path)
    assert costs is None
    assert f"another setting: {name} " in reason


@pytest.mark.parametrize("change", ["drop", "add"])
def test_a_setting_with_other_fields_is_refused(tmp_path: Path, change: str) -> None:
    known = asdict(SETTING)
    if change == "drop":
        known.pop("python")
    else:
        known["colour"] = "red"
    file = save(SETTING, COSTS, tmp_path)
    assert file is not None
    document = json.loads(file.read_text()) | {"setting": known}
    file.write_text(json.dumps(document | {"sum": profiles._sum(document)}))
    costs, reason = load(SETTING, tmp_path)
    assert costs is None
    assert ("python" if change == "drop" else "colour") in reason


def damage(text: str, how: str) -> bytes:
    document = json.loads(text)
    if how == "cut":
        return text[: len(text) // 2].encode()
    if how == "bytes":
        return b"\xff\xfe\x00"
    if how == "number":
        return text.replace("0.03", "0.05").encode()
    if how == "list":
        return b"[1]"
    if how == "empty":
        return b""
    if how == "version":
        document["version"] = 1
    if how == "costs":
        document["costs"] = {"verify": 3}
    if how == "no costs":
        del document["costs"]
    if how in ("costs", "no costs", "version"):
        document["sum"] = profiles._sum(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize("how", ["cut", "bytes", "number", "list", "empty", "version", "costs", "no costs"])
def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path, how: str) -> None:
    file = save(SETTING, COSTS, tmp_path)
    assert file is not None
    file.write_bytes(damage(file.read_text(), how))
    costs, reason = load(SETTING, tmp_path)
    assert costs is None
    assert str(file) in reason
    assert save(SETTING, COSTS, tmp_path) == file
    assert load(SETTING, tmp_path).costs == COSTS


def test_a_folder_in_the_place_of_the_file_is_a_reason(tmp_path: Path) -> None:
    path_of(SETTING, tmp_path).mkdir()
    costs, reason = load(SETTING, tmp_path)
    assert costs is None
    assert "cannot be read" in reason


def test_what_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            assert save(SETTING, COSTS, tmp_path / "file" / "costs") is None
    assert len(heard) == 1
    assert "BOZZA_CACHE" in str(heard[0].message)
    assert heard[0].filename == __file__


def test_an_interrupted_write_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(SETTING, COSTS, tmp_path)

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(SETTING, COSTS | {"overhead": 1.0}, tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert load(SETTING, tmp_path).costs == COSTS


def test_the_folder_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOZZA_CACHE", str(tmp_path))
    assert costs_folder() == tmp_path / "costs"


def test_the_setting_of_an_llm(target: Any, folders: dict[str, Path]) -> None:
    draft = ["ngram", f"model:{folders['shallow']},k=2"]
    llm = LLM(folders["target"], draft=draft, policy="fixed")
    setting = profiles.setting_of(llm)
    assert setting.drafters == (f"model:{folders['shallow']},k=2",)
    assert (setting.device, setting.dtype, setting.rule, setting.invariant) == ("cpu", "float32", "coupled", False)
    assert setting.weights == "plain"
    assert "llama" in setting.model
    assert setting.processor
    assert setting == profiles.setting_of(llm.with_policy("fixed", draft[::-1], max_batch=2))
    assert setting != profiles.setting_of(llm.with_policy("fixed", [f"model:{folders['shallow']},k=3"]))
    assert profiles.setting_of(llm.with_policy("off")).drafters == ()
    assert profiles.setting_of(llm.with_policy("off", rule="block")).rule == "block"


@needs_int8
def test_costs_of_quantized_weights_are_kept_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    packed, quantized = (
        LLM(folders["target"], policy="off", dtype="bfloat16", device="cpu", quantize=quantize)
        for quantize in (None, "int8")
    )
    settings = [profiles.setting_of(llm) for llm in (packed, quantized)]
    assert [setting.weights for setting in settings] == [packed.weights, "int8"]
    assert replace(settings[0], weights="int8") == settings[1]
    save(settings[0], COSTS, tmp_path)
    assert load(settings[0], tmp_path).costs == COSTS
    assert load(settings[1], tmp_path).costs is None


def test_it_imports_no_torch() -> None:
    code = "import sys, bozza.study.profiles; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
