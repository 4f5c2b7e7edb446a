"""Features and laws on disk are what a plain forward gives, however often the work was stopped."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bozza.errors import ConfigError
from bozza.models.probe import load_runner
from bozza.train import features as module
from bozza.train.data import Conversation
from bozza.train.features import KEPT, Features
from tiny import tiny
from training import conversations, filled


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def data(model: Any) -> list[Conversation]:
    return conversations(model, 60, answer=6)


@torch.inference_mode()
def test_features_and_laws_are_those_of_a_plain_forward(model: Any, data: list[Conversation], tmp_path: Path) -> None:
    features = filled(tmp_path, model, data, layers=(0, 3))
    for index in (0, 7, 59):
        tokens = data[index].tokens
        output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        expected = torch.cat([output.hidden_states[layer][0] for layer in (0, 3)], dim=1)
        assert features.features(index).dtype == torch.bfloat16
        torch.testing.assert_close(features.features(index).float(), expected, rtol=2**-7, atol=1e-4)
        ids, probs = features.laws(index)
        best = output.logits[0].softmax(dim=1).topk(KEPT, dim=1)
        assert torch.equal(ids[:, :3], best.indices[:, :3])
        torch.testing.assert_close(probs, best.values, rtol=2**-9, atol=1e-6)
        assert len(ids) == len(tokens)


def equal(one: Features, other: Features) -> None:
    """Up to the rounding of passes of another shape."""
    for index in range(len(one.conversations)):
        ours, theirs = one.features(index).float(), other.features(index).float()
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-4)
        assert float(ours.abs().max()) > 0
        torch.testing.assert_close(one.laws(index)[1], other.laws(index)[1], rtol=2**-8, atol=1e-6)


def killed_at(folder: Path, model: Any, data: list[Conversation], tokens: int) -> Features:
    """Features of which about so many tokens were done when the run was killed."""
    features = Features(folder, data, (0, 3), 64)

    def kill(done: int) -> None:
        if done >= tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.fill(load_runner(model), kill)
    return features


def test_a_fill_that_was_killed_goes_on_where_it_was_last_saved(
    model: Any, data: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 100)
    monkeypatch.setattr(module, "SAVED_EVERY", 20)
    whole = filled(tmp_path / "whole", model, data, (0, 3))
    half = killed_at(tmp_path / "killed", model, data, int(whole.starts[45]))
    again = Features(tmp_path / "killed", data, (0, 3), 64)
    assert 40 <= again.done <= half.done < 60
    told: list[int] = []
    again.fill(load_runner(model), told.append)
    assert told[0] > whole.starts[40]  # nothing before is computed again
    assert told == sorted(told)
    assert told[-1] == whole.starts[-1]
    equal(again, whole)
    assert Features(tmp_path / "killed", data, (0, 3), 64).done == 60


def test_a_fill_that_was_killed_before_anything_was_saved_starts_anew(
    model: Any, data: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 100)
    killed_at(tmp_path, model, data, 100)
    again = Features(tmp_path, data, (0, 3), 64)
    assert again.done == 0
    again.fill(load_runner(model))
    equal(again, filled(tmp_path / "whole", model, data, (0, 3)))


def test_more_data_keeps_what_is_there(model: Any, data: list[Conversation], tmp_path: Path) -> None:
    filled(tmp_path / "grown", model, data[:30], (0, 3))
    grown = Features(tmp_path / "grown", data, (0, 3), 64)
    assert grown.done == 30
    told: list[int] = []
    grown.fill(load_runner(model), told.append)
    assert told[0] > grown.starts[30]
    equal(grown, filled(tmp_path / "whole", model, data, (0, 3)))


@pytest.mark.parametrize("what", ["other data", "less data", "other layers"])
def test_what_was_computed_for_something_else_is_not_used(
    model: Any, data: list[Conversation], tmp_path: Path, what: str
) -> None:
    filled(tmp_path / "used", model, data[:40], (0, 3))
    changed = {"other data": [data[41], *data[1:40]], "less data": data[:20]}.get(what, data[:40])
    layers = (1, 3) if what == "other layers" else (0, 3)
    other = Features(tmp_path / "used", changed, layers, 64)
    assert other.done == 0
    # Killed at once, and back to the first data: its arrays have been written over.
    assert Features(tmp_path / "used", data[:40], (0, 3), 64).done == 0
    again = filled(tmp_path / "used", model, changed, layers)
    equal(again, filled(tmp_path / "fresh", model, changed, layers))


def test_laws_without_features(model: Any, data: list[Conversation], tmp_path: Path) -> None:
    """A small model needs no hidden states to learn from."""
    features = filled(tmp_path, model, data[:5], layers=())
    assert features.features(3).shape == (len(data[3].tokens), 0)
    assert float(features.laws(3)[1][:, 0].min()) > 0
    assert not (tmp_path / "hidden.bin").exists()


def test_slots_are_given_back_when_a_pass_fails(model: Any, data: list[Conversation], tmp_path: Path) -> None:
    runner = load_runner(model)
    features = Features(tmp_path, data[:5], (9,), 64)  # there is no such layer
    with pytest.raises((IndexError, KeyError)):
        features.fill(runner)
    assert runner.alloc() == 0


def test_a_disk_without_room_is_refused_before_anything_is_written(
    data: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ConfigError, match=r"needs .* GB for .* tokens") as caught:
        Features(tmp_path, data, (0, 3), 64)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.bin"))


def test_arrays_lie_end_to_end(model: Any, data: list[Conversation], tmp_path: Path) -> None:
    features = filled(tmp_path, model, data[:6])
    assert features.starts.tolist() == np.cumsum([0, *(len(each.tokens) for each in data[:6])]).tolist()
    assert features.hidden.shape == (features.starts[-1], 128)
