"""Training a head: what it is shown, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eagle3
from bozza.train import eagle as module
from bozza.train.data import Conversation
from bozza.train.eagle import DECAY, EagleTrainer, frequent_tokens
from bozza.train.features import Features
from bozza.train.loop import Agreement, Recipe
from tiny import tiny
from training import conversations, filled, rule_bound, untrained


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama").requires_grad_(False)


@pytest.fixture(scope="module")
def features(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return filled(tmp_path_factory.mktemp("features"), model, conversations(model, 80))


def trainer(
    model: Any, features: Features, path: Path, *, count: int = 211, from_target: bool = True, **recipe: Any
) -> EagleTrainer:
    targets, _ = frequent_tokens(features.conversations, count, [2])
    options = {"draft_vocab": count, "batch_tokens": 300, "held_out": 0.1, "epochs": 5} | recipe
    return EagleTrainer(untrained(model, targets, from_target=from_target), features, Recipe(**options), path / "c.pt")


def test_the_most_frequent_tokens_of_the_answers_are_chosen() -> None:
    data = [Conversation(0, 2, (50, 50, 9, 9, 9, 4)), Conversation(1, 1, (50, 4, 7, 8, 8))]
    tokens, covered = frequent_tokens(data, 3, [])
    assert tokens.tolist() == [4, 8, 9]  # three times, twice, twice; prompts do not count
    assert tokens.dtype == torch.int64
    assert covered == pytest.approx(7 / 8)
    assert frequent_tokens(data, 2, [])[0].tolist() == [4, 9]  # of 4 and 8 the lower one
    assert frequent_tokens(data, 3, [100, 2])[0].tolist() == [2, 9, 100]  # some must be there
    assert frequent_tokens(data, 3, [9])[0].tolist() == [4, 8, 9]
    assert frequent_tokens(data, 99, [9])[1] == pytest.approx(1.0)
    assert frequent_tokens(data, 99, [9])[0].tolist() == [4, 7, 8, 9]


def test_a_batch_lays_conversations_side_by_side(model: Any, features: Features, tmp_path: Path) -> None:
    """Slot s has the features of token s, the embedding of token s + 1, and guesses token s + 2."""
    learner = trainer(model, features, tmp_path, count=60)
    batch = learner.batch([3, 8, 20])
    slots = iter(range(len(batch.labels)))
    for line, index in enumerate([3, 8, 20]):
        conversation, law = features.conversations[index], features.laws(index)
        tokens = conversation.tokens
        assert batch.ids[line, : len(tokens) - 1].tolist() == list(tokens[1:])
        assert torch.equal(batch.features[line, : len(tokens) - 1], features.features(index)[:-1])
        due = batch.due[line].nonzero()[:, 0].tolist()
        assert due == [place - 2 for place in range(max(conversation.prompt_len, 2), len(tokens))]
        for slot in due:
            place = next(slots)
            assert int(batch.labels[place]) == tokens[slot + 2]
            kept = {
                int(token): float(share)
                for token, share in zip(law[0][slot + 1], law[1][slot + 1], strict=True)
                if int(token) in learner.head.targets.tolist()
            }
            found = {
                int(learner.head.targets[token]): float(share)
                for token, share in zip(batch.law_ids[place], batch.law_probs[place], strict=True)
                if share > 0
            }
            total = max(sum(kept.values()), 1e-3)
            assert found == pytest.approx({token: share / total for token, share in kept.items() if share > 0})
    assert next(slots, None) is None
    assert len(batch.law_probs) == len(batch.labels)


def test_the_loss_is_the_cross_entropy_with_the_targets_law_over_all_steps(
    model: Any, features: Features, tmp_path: Path
) -> None:
    learner = trainer(model, features, tmp_path, steps=3)
    head = learner.head
    conversation, (law_ids, law_probs) = features.conversations[5], features.laws(5)
    tokens, weights = conversation.tokens, eagle3.named(head)
    known = features.features(5).float()
    total, shares = 0.0, 0.0
    for step in range(3):
        losses = []
        for slot in range(max(conversation.prompt_len - 2, 0), len(tokens) - 2):
            if slot < step or (step and (slot + step) % 2):
                continue
            read = slot - step + 2
            with torch.no_grad():
                hidden = eagle3.unrolled(head, tokens[:read], known[: read - 1], tokens[read : slot + 2])
                scores = eagle3.logits(weights, head.shape.layer, hidden).log_softmax(dim=1)[0]
            places = [
                head.targets.tolist().index(int(token)) if token in head.targets else -1 for token in law_ids[slot + 1]
            ]
            kept = [(place, float(p)) for place, p in zip(places, law_probs[slot + 1], strict=True) if place >= 0]
            losses.append(-sum(p * float(scores[place]) for place, p in kept) / max(sum(p for _, p in kept), 1e-3))
        total += DECAY**step * sum(losses) / len(losses)
        shares += DECAY**step
    assert learner.loss([5]).item() == pytest.approx(total / shares, rel=0.03)  # it is computed in 16 bits


def test_two_updates_together_look_at_every_slot_of_each_later_step_once(
    model: Any, features: Features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = trainer(model, features, tmp_path, steps=4)
    seen: list[int] = []
    logits = learner.head.logits
    monkeypatch.setattr(learner.head, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    chosen = [3, 8, 20]
    for updates in (0, 1):
        learner.updates = updates
        learner.loss(chosen)
    due = [int(learner.batch(chosen).due[:, step:].sum()) for step in range(4)]
    assert seen[0] == seen[4] == due[0]
    assert [seen[step] + seen[4 + step] for step in (1, 2, 3)] == due[1:]
    assert all(abs(seen[step] - due[step] / 2) <= 3 for step in (1, 2, 3))


def test_an_answer_of_one_token_has_a_loss(model: Any, tmp_path: Path) -> None:
    """Its only slot has no later step; what is not a number would show in the report."""
    data = [Conversation(index, 3, (5, 6, 7 + index, 9)) for index in range(12)]
    learner = trainer(model, filled(tmp_path, model, data), tmp_path, steps=5)
    for updates in (0, 1):
        learner.updates = updates
        assert learner.loss([0]).isfinite()


def test_only_what_is_the_heads_own_is_trained(model: Any, features: Features, tmp_path: Path) -> None:
    learner = trainer(model, features, tmp_path, from_target=False)
    before = {name: weight.detach().clone() for name, weight in learner.head.named_parameters()}
    embedding = model.get_input_embeddings().weight.detach().clone()
    learner.run(lambda updates, loss: None, 100, until=2)
    moved = {name for name, weight in learner.head.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == before.keys() - {"lm_head.weight"}
    assert torch.equal(model.get_input_embeddings().weight, embedding)


@pytest.fixture(scope="module")
def learned(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[EagleTrainer, list[float], Agreement]:
    """A head that was trained on a rule, its losses, and how it agreed before."""
    folder = tmp_path_factory.mktemp("learned")
    features = rule_bound(folder / "features", model)
    learner = trainer(model, features, folder, count=24, from_target=False, learning_rate=3e-3, epochs=6)
    losses: list[float] = []
    before = learner.agreement()
    learner.run(lambda updates, loss: losses.append(loss), 1000)
    return learner, losses, before


def test_a_head_learns_what_its_target_says(learned: tuple[EagleTrainer, list[float], Agreement]) -> None:
    """From nothing, in seconds: the loss falls, and it guesses what it has never seen, several tokens ahead."""
    learner, losses, before = learned
    after = learner.agreement()
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert before.depths[0] < 0.2
    assert after.depths[0] > 0.7
    assert after.depths[2] > 0.5
    assert after.per_pass > before.per_pass + 1.0


def test_the_agreement_is_that_of_chains_of_first_guesses(learned: tuple[EagleTrainer, list[float], Agreement]) -> None:
    learner, _, _ = learned
    features = learner._features
    head, weights = learner.head, eagle3.named(learner.head)
    right, tried = [0] * module.DEPTHS, [0] * module.DEPTHS
    for index in learner.held_out[:3]:
        conversation, known = features.conversations[index], features.features(index).float()
        tokens = conversation.tokens
        for slot in range(max(conversation.prompt_len - 2, 0), len(tokens) - 2):  # where a chain begins
            for step in range(min(module.DEPTHS, len(tokens) - 2 - slot)):
                tried[step] += 1
                with torch.no_grad():
                    path = tokens[slot + 2 : slot + 2 + step]
                    hidden = eagle3.unrolled(head, tokens[: slot + 2], known[: slot + 1], path)
                    guess = int(head.targets[eagle3.logits(weights, head.shape.layer, hidden).argmax()])
                if guess != tokens[slot + 2 + step]:
                    break
                right[step] += 1
    expected = [hits / max(count, 1) for hits, count in zip(right, tried, strict=True)]
    assert learner.agreement(most=3).depths == pytest.approx(expected, abs=0.08)  # it is computed in 16 bits
    assert expected[0] > 0.5
