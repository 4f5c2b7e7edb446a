"""Conversations side by side: what belongs to which token, and which tokens are learned from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bozza.train.features import Features
from bozza.train.lines import Frequent, lay_out
from tiny import tiny
from training import conversations, filled

CHOSEN = [4, 9, 11]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama").requires_grad_(False)


@pytest.fixture(scope="module")
def features(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return filled(tmp_path_factory.mktemp("features"), model, conversations(model, 12, answer=8))


def test_each_place_has_its_own_token_features_and_law(features: Features) -> None:
    """What is learned from are the places before each token of the answer."""
    lines = lay_out(features, CHOSEN, CPU)
    for line, index in enumerate(CHOSEN):
        conversation = features.conversations[index]
        count = len(conversation.tokens)
        assert lines.tokens[line, :count].tolist() == list(conversation.tokens)
        assert torch.equal(lines.hidden[line, :count], features.features(index))
        assert torch.equal(lines.law_ids[line, :count], features.laws(index)[0])
        assert torch.equal(lines.law_probs[line, :count], features.laws(index)[1])
        assert lines.due[line].nonzero()[:, 0].tolist() == list(range(conversation.prompt_len - 1, count - 1))
        assert lines.next_tokens[line, : count - 1].tolist() == list(conversation.tokens[1:])
    assert lines.next_tokens[:, -1].tolist() == [-1] * 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_ahead_shows_what_stands_further_on(features: Features, steps: int) -> None:
    lines = lay_out(features, CHOSEN, CPU)
    ahead, length = lines.ahead(steps), lines.tokens.shape[1]
    for name in ("tokens", "hidden", "due", "law_ids", "law_probs"):
        ours, theirs = getattr(ahead, name), getattr(lines, name)
        assert ours.shape == theirs.shape
        assert torch.equal(ours[:, : length - steps], theirs[:, steps:])
    assert not ahead.due[:, length - steps :].any()


def test_the_entropy_is_against_the_law_on_the_frequent_tokens_alone(model: Any) -> None:
    targets = torch.tensor([3, 8, 100])
    frequent = Frequent(targets, model.lm_head.weight[targets], 211)
    hidden = torch.randn(3, 64)
    logits = frequent.logits(hidden)
    torch.testing.assert_close(logits, model.lm_head(hidden)[:, targets])
    ids = torch.tensor([[8, 5, 3], [100, 8, 7], [1, 2, 4]])
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]])
    likely = logits.log_softmax(dim=1)
    expected = -(6 / 7 * likely[0, 1] + 1 / 7 * likely[0, 0] + 0.5 * likely[1, 2] + 0.5 * likely[1, 1]) / 3
    assert frequent.entropy(logits, ids, probs).item() == pytest.approx(float(expected), rel=1e-5)
