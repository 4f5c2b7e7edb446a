"""Training sequential heads: what they compute in training is what they draft with, and they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bozza import LLM, SamplingParams
from bozza.models.eagle import head_rows
from bozza.models.heads import layer_like
from bozza.models.mtp import MtpHead, hidden_layer, sequential_heads
from bozza.models.mtp_files import save_mtp
from bozza.train.features import Features
from bozza.train.lines import Frequent, lay_out
from bozza.train.loop import Recipe
from bozza.train.mtp import MtpTrainer, start_modules
from tiny import VOCAB, tiny
from training import rule_bound


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama").requires_grad_(False)


@pytest.fixture(scope="module")
def features(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return rule_bound(tmp_path_factory.mktemp("features"), model, layers=(hidden_layer(model),))


def heads(model: Any, modules: int = 2) -> MtpHead:
    torch.manual_seed(0)
    head = sequential_heads(model, layer_like(model, modules)).float()
    start_modules(head, model)
    return head


def trainer(model: Any, features: Features, path: Path, **recipe: Any) -> MtpTrainer:
    targets = torch.arange(VOCAB)
    options = {"batch_tokens": 300, "held_out": 0.1, "epochs": 6, "learning_rate": 3e-3} | recipe
    frequent = Frequent(targets, head_rows(model, targets), VOCAB)
    return MtpTrainer(heads(model), frequent, features, Recipe(**options), path / "c.pt")


def test_the_loss_is_the_cross_entropy_of_each_module_at_its_distance(
    model: Any, features: Features, tmp_path: Path
) -> None:
    """Written out for one conversation: module k at slot s against the law after token s + k."""
    learner = trainer(model, features, tmp_path)
    conversation, (ids, probs) = features.conversations[3], features.laws(3)
    outputs = learner._run(lay_out(features, [3], torch.device("cpu")))
    losses = []
    for depth, hidden in enumerate(outputs, 1):
        logits = torch.nn.functional.linear(hidden[0].detach().float(), model.get_output_embeddings().weight)
        terms = []
        for slot in range(max(conversation.prompt_len - 1 - depth, 0), len(conversation.tokens) - 1 - depth):
            law = torch.zeros(VOCAB).index_add(0, ids[slot + depth], probs[slot + depth])
            terms.append(-float((law / law.sum() * logits[slot].log_softmax(dim=0)).sum()))
        losses.append(sum(terms) / len(terms))
    assert learner.loss([3]).item() == pytest.approx(sum(losses) / len(losses), rel=0.03)  # in 16 bits


def test_later_tokens_do_not_change_what_a_module_makes_of_a_slot(
    model: Any, features: Features, tmp_path: Path
) -> None:
    learner = trainer(model, features, tmp_path)
    for module in learner.head.steps:  # or the embedding has no say yet
        torch.nn.init.normal_(module.eh_proj.weight, std=0.2)
    lines = lay_out(features, [3], torch.device("cpu"))
    before = learner._run(lines)
    lines.tokens[0, 8:] = 5
    lines.hidden[0, 8:] = 1.0
    for depth, (one, other) in enumerate(zip(before, learner._run(lines), strict=True), 1):
        assert torch.equal(one[0, : 8 - depth], other[0, : 8 - depth])
        assert not torch.equal(one[0, 8 - depth], other[0, 8 - depth])


def test_heads_learn_and_draft_what_they_learned(model: Any, features: Features, tmp_path: Path) -> None:
    learner = trainer(model, features, tmp_path)
    losses: list[float] = []
    before = learner.agreement()
    learner.run(lambda updates, loss: losses.append(loss), 1000)
    after = learner.agreement()
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert after.depths[0] > before.depths[0] + 0.3
    save_mtp(learner.head, tmp_path / "trained", "tiny")
    save_mtp(heads(model), tmp_path / "untrained", "tiny")
    prompts = [list(each.tokens[:-8]) for each in features.conversations[-6:]]
    accepted = []
    for name in ("untrained", "trained"):
        llm = LLM(model, policy="fixed", draft=[f"mtp:{tmp_path / name},k=2"])
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        outs, plain = (each.generate(prompts, params) for each in (llm, llm.with_policy("off")))
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        accepted.append(sum(out.stats.accepted["mtp"] for out in outs))
    assert accepted[1] >= accepted[0]
