"""Distilling a small decoder: it begins with layers of the target, and comes to agree with it more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bozza import LLM, SamplingParams
from bozza.train.draft import DraftTrainer, fewer_layers
from bozza.train.eagle import frequent_tokens
from bozza.train.features import Features
from bozza.train.loop import Recipe
from tiny import tiny
from training import conversations, filled, rule_bound


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=4).requires_grad_(False)


@pytest.fixture(scope="module")
def features(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return filled(tmp_path_factory.mktemp("features"), model, conversations(model, 80), layers=())


@pytest.mark.parametrize(("layers", "chosen"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (4, [0, 1, 3, 4])])
def test_the_first_and_the_last_layer_are_among_those_that_are_copied(layers: int, chosen: list[int]) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    target = tiny("gemma2", num_hidden_layers=5, layer_types=kinds)
    small = fewer_layers(target, layers)
    assert small.config.num_hidden_layers == layers
    assert small.config.layer_types == [kinds[layer] for layer in chosen]
    theirs = target.state_dict()
    for name, weight in small.state_dict().items():
        if ".layers." in name:
            place = int(name.split(".layers.")[1].split(".")[0])
            name = name.replace(f".layers.{place}.", f".layers.{chosen[place]}.")
        assert torch.equal(weight, theirs[name]), name
    assert target.config.num_hidden_layers == 5


@pytest.mark.parametrize("tied", [True, False])
def test_a_target_in_16_bits_gives_a_model_that_can_be_trained(tied: bool) -> None:
    small = fewer_layers(tiny("llama", dtype=torch.bfloat16, tie_word_embeddings=tied), 2)
    assert {weight.dtype for weight in small.parameters()} == {torch.float32}
    assert not small.get_input_embeddings().weight.requires_grad
    assert not small.get_output_embeddings().weight.requires_grad
    assert all(weight.requires_grad for weight in small.base_model.layers.parameters())


def trainer(model: Any, features: Features, path: Path, **recipe: Any) -> DraftTrainer:
    targets, _ = frequent_tokens(features.conversations, 150, [2])
    options = {"batch_tokens": 300, "held_out": 0.1, "epochs": 6, "learning_rate": 2e-3} | recipe
    return DraftTrainer(fewer_layers(model, 2), targets, features, Recipe(**options), path / "c.pt")


def test_the_loss_is_the_cross_entropy_with_the_targets_law(model: Any, features: Features, tmp_path: Path) -> None:
    learner = trainer(model, features, tmp_path)
    targets, losses = learner._frequent.targets, []
    for index in (4, 9):
        conversation, (ids, probs) = features.conversations[index], features.laws(index)
        with torch.no_grad():
            logits = learner.model(input_ids=torch.tensor([conversation.tokens]), use_cache=False).logits[0]
        for place in range(conversation.prompt_len - 1, len(conversation.tokens) - 1):
            law = torch.zeros(logits.shape[1]).index_add(0, ids[place], probs[place])[targets]
            losses.append(-float((law / law.sum().clamp(min=1e-3) * logits[place, targets].log_softmax(dim=0)).sum()))
    assert learner.loss([4, 9]).item() == pytest.approx(sum(losses) / len(losses), rel=0.03)  # in 16 bits


def test_a_small_model_learns_what_its_target_says(model: Any, tmp_path: Path) -> None:
    """The loss falls, and it guesses what it has never seen, several tokens ahead."""
    learner = trainer(model, rule_bound(tmp_path, model, layers=()), tmp_path)
    losses: list[float] = []
    before = learner.agreement()
    learner.run(lambda updates, loss: losses.append(loss), 1000)
    after = learner.agreement()
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert before.depths[0] < 0.3
    assert after.depths[0] > 0.7
    assert after.depths[2] > 0.5


def test_a_trained_model_drafts_from_its_folder_and_more_of_it_stands(
    model: Any, features: Features, tmp_path: Path
) -> None:
    learner = trainer(model, features, tmp_path, epochs=7)
    learner.run(lambda updates, loss: None, 1000)
    for name, weight in learner.model.state_dict().items():  # rows are still the target's
        if "embed_tokens" in name or "lm_head" in name:
            assert torch.equal(weight, model.state_dict()[name])
    prompts = [list(each.tokens[: each.prompt_len]) for each in features.conversations[:20]]
    params = SamplingParams(max_tokens=16)
    accepted = []
    for name, small in (("untrained", fewer_layers(model, 2)), ("trained", learner.model)):
        small.save_pretrained(tmp_path / name)
        llm = LLM(model, policy="fixed", draft=[f"model:{tmp_path / name},k=3"])
        outs, plain = (each.generate(prompts, params) for each in (llm, llm.with_policy("off")))
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        accepted.append(sum(out.stats.accepted["model"] for out in outs))
    assert accepted[1] > 1.5 * accepted[0]


def test_a_killed_run_ends_bit_for_bit_the_same(model: Any, features: Features, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = trainer(model, features, tmp_path / "whole", epochs=1)
    whole.run(lambda updates, loss: None, 1000)
    trainer(model, features, tmp_path, epochs=1).run(lambda updates, loss: None, 1000, until=3)
    again = trainer(model, features, tmp_path, epochs=1)
    again.run(lambda updates, loss: None, 1000)
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name
