"""The head unrolled over its own outputs, against the head written out for each slot and step alone."""

from __future__ import annotations

import pytest
import torch

import eagle3
from bozza.models.eagle import EagleHead
from bozza.train import unrolled
from bozza.train.unrolled import unroll
from tiny import tiny, tiny_head

LENGTH, STEPS = 11, 4


@pytest.fixture(scope="module", params=[1, 2])
def head(request: pytest.FixtureRequest) -> EagleHead:
    return tiny_head(tiny("llama"), layers=request.param)


def sequences(head: EagleHead, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [count, length + 1] and features of all but the last."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 200, (count, length + 1), generator=generator)
    return tokens, torch.randn(count, length, head.fc.in_features, generator=generator)


@pytest.mark.parametrize("block", [64, 3])
def test_each_slot_of_each_step_is_what_drafting_from_there_gives(
    head: EagleHead, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step j, slot s: the target has read token s - j, and the j tokens after that are guesses."""
    monkeypatch.setattr(unrolled, "BLOCK", block)
    tokens, features = sequences(head, 2, LENGTH)
    steps = unroll(head, tokens[:, 1:], features, STEPS)
    assert [step.shape for step in steps] == [(2, LENGTH, 64)] * STEPS
    for line in range(2):
        text = tokens[line].tolist()
        for step in range(STEPS):
            for slot in range(step, LENGTH):
                read = slot - step + 2  # tokens that the target has given or read; features of all but the last
                path = text[read : slot + 2]
                expected = eagle3.unrolled(head, text[:read], features[line, : read - 1], path)
                torch.testing.assert_close(steps[step][line, slot], expected[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block", [1, 2, 5, 7, 16, 100])
def test_blocks_only_save_work(head: EagleHead, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, features = sequences(head, 3, 33)
    whole = unroll(head, tokens[:, 1:], features, STEPS)
    monkeypatch.setattr(unrolled, "BLOCK", block)
    for step, (ours, theirs) in enumerate(zip(unroll(head, tokens[:, 1:], features, STEPS), whole, strict=True)):
        torch.testing.assert_close(ours[:, step:], theirs[:, step:], rtol=1e-4, atol=1e-3)
        assert bool(ours.isfinite().all())


def test_what_fills_up_a_sequence_does_not_reach_its_slots(head: EagleHead) -> None:
    tokens, features = sequences(head, 2, LENGTH)
    short = unroll(head, tokens[:1, 1:8], features[:1, :7], STEPS)
    for ours, theirs in zip(unroll(head, tokens[:, 1:], features, STEPS), short, strict=True):
        torch.testing.assert_close(ours[:1, :7], theirs, rtol=1e-4, atol=1e-3)


def test_every_weight_is_moved_by_every_step() -> None:
    head = tiny_head(tiny("llama"), layers=2).requires_grad_(True)
    tokens, features = sequences(head, 2, LENGTH)
    for step in range(STEPS):
        head.zero_grad()
        head.logits(unroll(head, tokens[:, 1:], features, STEPS)[step][:, step:]).square().sum().backward()
        for name, weight in head.named_parameters():
            assert weight.grad is not None, (step, name)
            assert bool(weight.grad.isfinite().all()), (step, name)
            assert float(weight.grad.abs().max()) > 0, (step, name)


def test_slots_that_mean_nothing_give_no_gradient_that_is_none() -> None:
    """Nobody reads them, but what is not a number would reach every weight through them."""
    head = tiny_head(tiny("llama")).requires_grad_(True)
    tokens, features = sequences(head, 1, 3)
    sum(step.sum() for step in unroll(head, tokens[:, 1:], features, 6)).backward()  # type: ignore[union-attr]
    assert all(bool(weight.grad.isfinite().all()) for weight in head.parameters() if weight.grad is not None)


def test_later_steps_teach_the_earlier_ones_that_they_began_from() -> None:
    """The slope of a later step's output, against what it becomes when the weights are moved a little."""
    head = tiny_head(tiny("llama")).double().requires_grad_(True)
    tokens, features = sequences(head, 2, LENGTH)
    features = features.double()
    generator = torch.Generator().manual_seed(5)
    ways = [torch.randn(weight.shape, generator=generator).double() for weight in head.parameters()]

    def value() -> torch.Tensor:
        return head.logits(unroll(head, tokens[:, 1:], features, 3)[2][:, 2:]).mean()

    value().backward()
    slope = sum(float((weight.grad * way).sum()) for weight, way in zip(head.parameters(), ways, strict=True))
    ends = []
    for length in (1e-4, -1e-4):
        with torch.no_grad():
            for weight, way in zip(head.parameters(), ways, strict=True):
                weight += length * way
            ends.append(float(value()))
            for weight, way in zip(head.parameters(), ways, strict=True):
                weight -= length * way
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=0.02)
