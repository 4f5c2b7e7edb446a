"""`bozza train` end to end: a folder that drafts, a card that says how it was made, and nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bozza
from bozza import LLM, SamplingParams
from bozza.errors import ConfigError
from bozza.models.products import packing_works
from bozza.models.sharing import PackedLinear
from bozza.train import data as data_module
from bozza.train import pipeline
from bozza.train.loop import Agreement, Recipe
from bozza.train.pipeline import Order, features_read, train_draft, train_eagle
from training import talker

PROMPTS = tuple(f"What is {number} and {number}?" for number in range(24))
RECIPE = Recipe(draft_vocab=50, epochs=2, batch_tokens=300, steps=2, held_out=0.1)


class Listener:
    """Hears a run, and can stop it."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.parts: dict[str, list[tuple[int, int]]] = {}
        self.agreements: list[Agreement] = []
        self._stop_at = stop_at

    def part(self, name: str, done: int, total: int) -> None:
        self.parts.setdefault(name, []).append((done, total))
        if self._stop_at is not None and name == self._stop_at[0] and done >= self._stop_at[1]:
            raise KeyboardInterrupt

    def agreement(self, agreement: Agreement) -> None:
        self.agreements.append(agreement)


@pytest.fixture(scope="module")
def folder(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "talker"
    talker().save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(data_module, "USER_TOKENS", 12)
    monkeypatch.setattr(pipeline, "INTERVAL", 3)


def order(folder: Path, out: Path, **options: Any) -> Order:
    return Order(str(folder), out, **({"tokens": 10**6, "prompts": PROMPTS, "recipe": RECIPE} | options))


def everything(out: Path) -> dict[str, bytes]:
    """All files of a run but those that tell the time."""
    told = {"card.json", "seconds.json"}
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in told
    }


@pytest.mark.parametrize("kind", ["eagle", "draft"])
def test_a_second_call_changes_nothing_and_a_killed_one_ends_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    # So wide that a part of the head begins at random.
    train = train_eagle if kind == "eagle" else train_draft
    first, second = Listener(), Listener()
    card = train(order(folder, tmp_path / "whole", widen=3), first)
    before = everything(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "card.json").read_text()) == json.loads(json.dumps(card))
    assert list(first.parts) == ["conversations", "features", "training"]
    updates = first.parts["training"][-1][1]
    assert first.parts["training"] == [(update, updates) for update in range(updates + 1)]
    assert len(first.agreements) == (updates - 1) // 3 + 1

    again = train(order(folder, tmp_path / "whole", widen=3), second)
    assert second.parts["training"] == [(updates, updates)]
    assert second.parts["features"] == [first.parts["features"][-1]]
    assert everything(tmp_path / "whole") == before
    assert again["held_out"] == card["held_out"]

    for stop_at in (("conversations", 1), ("features", 1), ("training", 4)):
        with pytest.raises(KeyboardInterrupt):
            train(order(folder, tmp_path / "killed", widen=3), Listener(stop_at))
        assert not (tmp_path / "killed" / "card.json").exists()
    assert train(order(folder, tmp_path / "killed", widen=3), Listener())["held_out"] == card["held_out"]
    after = everything(tmp_path / "killed")
    assert after.keys() == before.keys()
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] | weights[1])


def test_the_card_says_how_the_head_was_made(folder: Path, tmp_path: Path) -> None:
    card = train_eagle(order(folder, tmp_path, seed=3, widen=3), Listener())
    assert card["target"] == "talker"
    assert card["bozza"] == bozza.__version__
    assert card["torch"] == torch.__version__
    lines = (tmp_path / "work" / "conversations.jsonl").read_text().splitlines()[1:]
    assert card["conversations"] == len(lines) == 24
    assert card["tokens"] == sum(len(json.loads(line)[2]) for line in lines)
    assert card["prompts"] == "24 of a file"
    assert (card["seed"], card["widen"]) == (3, 3)
    assert card["recipe"]["draft_vocab"] == 50
    assert set(card["minutes"]) == {"data", "features", "training"}
    assert len(card["held_out"]["agreement_by_depth"]) == 5
    assert card["held_out"]["chain_tokens_per_pass"] >= 1.0
    vocabulary = card["draft_vocabulary"]
    assert vocabulary["tokens"] == 50
    assert 0.3 < vocabulary["covers"] <= 1.0
    tensors = load_file(tmp_path / "model.safetensors")
    assert card["parameters"] == sum(tensor.numel() for key, tensor in tensors.items() if key != "d2t")
    assert "lm_head.weight" not in tensors  # they are the target's
    assert tensors["layers.0.mlp.down_proj.weight"].shape == (64, 3 * 96)


def test_a_head_drafts_for_its_target_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """Written by the target itself, from its end tokens on."""
    train_eagle(order(folder, tmp_path, prompts=None, tokens=500), Listener())
    llm = LLM(folder, policy="fixed", draft=[f"eagle:{tmp_path},k=6"])
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outs, plain = (each.generate(["abc", "What is 3?"], params) for each in (llm, llm.with_policy("off")))
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(out.stats.drafted["eagle"] for out in outs)
    ends = llm.model.generation_config.eos_token_id
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(ends) <= set((tensors["d2t"] + torch.arange(50)).tolist())


def test_a_small_model_drafts_for_its_target_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    card = train_draft(order(folder, tmp_path, recipe=Recipe(layers=2, epochs=1, batch_tokens=300)), Listener())
    llm = LLM(folder, policy="fixed", draft=[f"model:{tmp_path},k=3"])
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outs, plain = (each.generate(["abc", "What is 3?"], params) for each in (llm, llm.with_policy("off")))
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(out.stats.drafted["model"] for out in outs)
    assert card["trained_vocabulary"]["covers"] == 1.0
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (2, "bfloat16")


def test_a_target_is_learned_from_as_it_is_and_its_packed_twin_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[LLM] = []
    said = pipeline.Synthesis.__init__

    def noting(self: Any, llm: LLM, *arguments: Any) -> None:
        writers.append(llm)
        said(self, llm, *arguments)

    monkeypatch.setattr(pipeline.Synthesis, "__init__", noting)
    runs = [pipeline.Run(order(folder, tmp_path, tokens=500), Listener()) for _ in "ab"]
    for run in runs:
        run.data()
        assert run.llm.weights == "plain"
        assert not any(isinstance(each, PackedLinear) for each in run.target.modules())
    assert writers[0].weights == ("packed" if packing_works() else "plain")
    assert writers[0] is not runs[0].llm
    assert writers[1] is runs[1].llm  # with nothing left to write, no model is loaded for it


def test_a_folder_is_of_one_run(folder: Path, tmp_path: Path) -> None:
    train_eagle(order(folder, tmp_path), Listener())
    before = everything(tmp_path)
    for other, says in (
        ({"seed": 1}, "another seed"),
        ({"prompts": PROMPTS[:20]}, "another prompts"),
        ({"prompts": ("What else?", *PROMPTS[1:])}, "another prompts"),
        ({"recipe": Recipe(draft_vocab=50, epochs=3, batch_tokens=300)}, "another recipe"),
        ({"widen": 1}, "of another size"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            train_eagle(order(folder, tmp_path, **other), Listener())
        assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before


def test_too_little_to_learn_from_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="9 conversations are too few to train on: give more prompts or tokens"):
        train_eagle(order(folder, tmp_path / "few", prompts=PROMPTS[:9]), Listener())
    with pytest.raises(ConfigError, match="--layers 3: the target has 3, use fewer"):
        train_draft(order(folder, tmp_path / "deep", recipe=Recipe(layers=3)), Listener())


@pytest.mark.parametrize(("layers", "read"), [(1, (0,)), (2, (1,)), (3, (1, 2)), (4, (2, 3)), (30, (2, 15, 29))])
def test_a_trained_head_reads_the_input_of_the_last_layer(layers: int, read: tuple[int, ...]) -> None:
    assert features_read(layers) == read
