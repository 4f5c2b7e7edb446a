"""The training loop: every conversation once per epoch, and a run that was killed is none the worse for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bozza.errors import ConfigError
from bozza.train.data import Conversation
from bozza.train.eagle import EagleTrainer, frequent_tokens
from bozza.train.features import Features
from bozza.train.loop import Agreement, Recipe, Trainer
from tiny import tiny
from training import conversations, filled, untrained

LENGTHS = [3 + (7 * index) % 23 for index in range(57)]


class Fit(Trainer):
    """Learns the mean length of conversations."""

    def loss(self, chosen: Sequence[int]) -> Tensor:
        lengths = torch.tensor([[float(len(self._features.conversations[index].tokens))] for index in chosen])
        loss: Tensor = (self._module(lengths) - 2.0 * lengths).square().mean()
        return loss

    def agreement(self, most: int = 60) -> Agreement:
        return Agreement.of([0], [0])


def fit(path: Path, **recipe: Any) -> Fit:
    torch.manual_seed(4)
    data = [Conversation(index, 1, (0,) * length) for index, length in enumerate(LENGTHS)]
    options = {"batch_tokens": 60, "epochs": 3, "held_out": 0.1, "learning_rate": 0.05} | recipe
    features: Any = SimpleNamespace(conversations=data)
    return Fit(nn.Linear(1, 1), features, Recipe(**options), path)


def test_each_conversation_is_learned_from_once_per_epoch(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "c.pt")
    assert trainer.held_out == list(range(51, 57))
    seen: list[list[int]] = []
    loss = trainer.loss
    trainer.loss = lambda chosen: seen.append(list(chosen)) or loss(chosen)  # type: ignore[method-assign, func-returns-value]
    trainer.run(lambda updates, loss: None, 1000)
    each = len(seen) // 3
    assert len(seen) == trainer.total == trainer.updates == 3 * each
    epochs = [seen[epoch * each : (epoch + 1) * each] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == list(range(51))
    assert epochs[0] != epochs[1]
    assert all(max(LENGTHS[index] for index in batch) * len(batch) <= 60 for batch in seen)


def test_every_epoch_has_as_many_batches_as_the_first(tmp_path: Path) -> None:
    """Otherwise an interrupted run could not tell which epoch it is in."""
    trainer = fit(tmp_path / "c.pt")
    assert len({len(trainer._epoch(epoch)) for epoch in range(40)}) == 1


def test_the_order_depends_on_the_seed(tmp_path: Path) -> None:
    one, same, other = (fit(tmp_path / "c.pt", seed=seed)._epoch(1) for seed in (0, 0, 1))
    assert one == same != other


def test_a_conversation_longer_than_a_batch_has_one_of_its_own(tmp_path: Path) -> None:
    batches = fit(tmp_path / "c.pt", batch_tokens=10)._epoch(0)
    assert all(len(batch) == 1 for batch in batches if max(LENGTHS[index] for index in batch) > 10)
    assert sum(map(len, batches)) == 51


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine_to_a_twentieth(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "c.pt", warmup=0.2, epochs=10)
    warm = round(0.2 * trainer.total)
    rates = []
    update = trainer._update

    def noted(chosen: Sequence[int]) -> float:
        loss = update(chosen)
        rates.append(trainer._optimizer.param_groups[0]["lr"] / 0.05)
        return loss

    trainer._update = noted  # type: ignore[method-assign]
    trainer.run(lambda updates, loss: None, 1000)
    assert rates[:warm] == pytest.approx([(step + 1) / warm for step in range(warm)])
    assert rates[warm] == pytest.approx(1.0)
    falling = [0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / (len(rates) - warm))) for step in range(len(rates))]
    assert rates[warm:] == pytest.approx(falling[: len(rates) - warm])
    assert 0.05 < rates[-1] < 0.06


def state_of(trainer: Trainer) -> list[Tensor]:
    kept = trainer._optimizer.state_dict()["state"]
    return [
        *(weight.detach().clone() for weight in trainer._module.parameters()),
        *(kept[place][name] for place in sorted(kept) for name in ("exp_avg", "exp_avg_sq", "step")),
    ]


@pytest.mark.parametrize("killed", [1, 4, 5, 11, 12, 13, 30])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path: Path, killed: int) -> None:
    whole = fit(tmp_path / "whole.pt")
    losses: dict[int, float] = {}
    whole.run(losses.__setitem__, 4)

    def kill(updates: int, loss: float) -> None:
        if updates == killed:
            raise KeyboardInterrupt

    trainer = fit(tmp_path / "killed.pt")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(kill, 4)
    again = fit(tmp_path / "killed.pt")
    assert again.updates == killed // 4 * 4
    later: dict[int, float] = {}
    again.run(later.__setitem__, 4)
    assert later == {update: loss for update, loss in losses.items() if update > again.total - len(later)}
    assert len(later) == whole.total - killed // 4 * 4
    for ours, theirs in zip(state_of(again), state_of(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    fit(tmp_path / "c.pt").run(lambda updates, loss: None, 1000)
    before = (tmp_path / "c.pt").read_bytes()
    again = fit(tmp_path / "c.pt")
    assert again.updates == again.total
    again.run(lambda updates, loss: pytest.fail("it goes on"), 1)
    assert (tmp_path / "c.pt").read_bytes() == before


def test_until_stops_and_saves(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "c.pt")
    trainer.run(lambda updates, loss: None, 1000, until=5)
    assert trainer.updates == 5
    assert fit(tmp_path / "c.pt").updates == 5


def test_a_checkpoint_of_another_recipe_or_size_is_refused_and_stays(tmp_path: Path) -> None:
    fit(tmp_path / "c.pt").run(lambda updates, loss: None, 1000, until=2)
    for other in ({"seed": 1}, {"learning_rate": 0.1}, {"epochs": 4}):
        with pytest.raises(ConfigError, match=r"c\.pt was made with another recipe: use another folder") as caught:
            fit(tmp_path / "c.pt", **other)
        assert "\n" not in str(caught.value)
    trainer = fit(tmp_path / "c.pt")
    for module in (nn.Linear(1, 1, bias=False), nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 1))):
        with pytest.raises(ConfigError, match=r"c\.pt is of another size"):
            Fit(module, trainer._features, trainer.recipe, tmp_path / "c.pt")
    assert fit(tmp_path / "c.pt").updates == 2


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fit(tmp_path / "c.pt")
    trainer.run(lambda updates, loss: None, 1000, until=2)

    def full_disk(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError):  # noqa: PT011 - the one above
        trainer.run(lambda updates, loss: None, 1000, until=4)
    assert fit(tmp_path / "c.pt").updates == 2


def test_the_agreement_of_a_chain_counts_what_stands_and_one_more() -> None:
    agreement = Agreement.of([8, 3, 0], [10, 6, 3])
    assert agreement.depths == pytest.approx([0.8, 0.5, 0.0])
    assert agreement.per_pass == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    assert Agreement.of([0], [0]) == Agreement([0.0], 1.0)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Features]:
    model = tiny("llama").requires_grad_(False)
    return model, filled(tmp_path_factory.mktemp("features"), model, conversations(model, 40))


def test_a_killed_training_of_a_head_ends_bit_for_bit_the_same(learned: tuple[Any, Features], tmp_path: Path) -> None:
    """Which slots of later steps are looked at depends on the number of updates: it must go on too."""
    model, features = learned
    targets, _ = frequent_tokens(features.conversations, 80, [2])
    recipe = Recipe(draft_vocab=80, epochs=2, batch_tokens=200, held_out=0.1, steps=3)

    def trainer(name: str) -> EagleTrainer:
        return EagleTrainer(untrained(model, targets), features, recipe, tmp_path / name)

    whole = trainer("whole.pt")
    whole.run(lambda updates, loss: None, 1000)
    trainer("killed.pt").run(lambda updates, loss: None, 1000, until=3)
    again = trainer("killed.pt")
    assert again.updates == 3
    again.run(lambda updates, loss: None, 1000)
    for ours, theirs in zip(state_of(again), state_of(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_a_longer_run_may_choose_other_tokens_and_has_the_rows_of_these(
    learned: tuple[Any, Features], tmp_path: Path
) -> None:
    """Output rows are the target's and are not written with a head, so a checkpoint must not bring others along."""
    model, features = learned
    recipe = Recipe(draft_vocab=60, epochs=1, batch_tokens=400, held_out=0.1)
    targets = torch.arange(60) * 3
    EagleTrainer(untrained(model, targets), features, recipe, tmp_path / "c.pt").run(lambda *_: None, 1, until=2)
    again = EagleTrainer(untrained(model, targets + 1), features, recipe, tmp_path / "c.pt")
    assert again.updates == 2
    assert torch.equal(again.head.lm_head.weight, model.lm_head.weight[targets + 1])
