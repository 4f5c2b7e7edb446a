"""The head proper: one step as published, and a fresh head that repeats the target's last layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import eagle3
from bozza.models.eagle import EagleHead, HeadShape, start_from_target
from bozza.models.head_runner import HeadRow, HeadRunner
from bozza.models.heads import layer_like
from bozza.models.runner import Row
from tiny import ARCHITECTURES, tiny, tiny_head, token_prompts

TARGETS = torch.arange(60) * 3
TOKENS = token_prompts(20)[-1]


def fresh(model: Any, features: tuple[int, ...], layers: int = 1, widen: int = 1) -> EagleHead:
    """A head that has learned nothing yet."""
    config = layer_like(model, layers, widen)
    shape = HeadShape(config, features, config.hidden_size, len(TARGETS))
    head = EagleHead(shape, model.get_input_embeddings(), TARGETS).requires_grad_(False)
    start_from_target(head, model)
    return head.eval()


def run(head: EagleHead, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
    runner = HeadRunner(head)
    return runner.forward([HeadRow(Row(runner.alloc(), tokens, wanted=len(tokens)), runner.fuse(features))])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def compare_with_target(head: EagleHead, model: Any) -> None:
    """Slot t, with the features of token t, says what the target says after token t."""
    output = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer][0, :-1] for layer in head.shape.features], dim=1)
    last: list[Tensor] = []
    hook = model.base_model.layers[-1].register_forward_hook(
        lambda *call: last.append(call[2][0] if isinstance(call[2], tuple) else call[2])
    )
    model(input_ids=torch.tensor([TOKENS]), use_cache=False)
    hook.remove()
    hidden, logits = run(head, TOKENS[1:], features)
    close(hidden, last[0].view(len(TOKENS), -1)[:-1])
    close(logits, output.logits[0, :-1, TARGETS])


@pytest.mark.parametrize("features", [(2,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("widen", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_fresh_head_is_the_targets_last_layer_with_its_norm_and_rows(
    features: tuple[int, ...], widen: int, layers: int
) -> None:
    """Further layers pass it through, and what is wider has no say yet."""
    model = tiny("llama")
    compare_with_target(fresh(model, features, layers, widen), model)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2", {}),
        ("smollm3", {}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_hidden_layers": 1}),
    ],
)
def test_targets_of_the_same_kind_are_repeated_too(architecture: str, options: dict[str, Any]) -> None:
    model = tiny(architecture, **options)
    for name, weight in model.named_parameters():
        if name.endswith("bias") and architecture == "llama":  # not zero, as they are made
            torch.nn.init.normal_(weight.data, std=0.3)
    compare_with_target(fresh(model, (model.config.num_hidden_layers - 1,), layers=2, widen=2), model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_can_start_for_every_target_with_the_targets_own_rows(architecture: str) -> None:
    """Rows are not trained and not written, so they must be the target's from the beginning."""
    model = tiny(architecture)
    head = fresh(model, (0, 1, 2), layers=2, widen=2)
    assert torch.equal(head.lm_head.weight, model.get_output_embeddings().weight[TARGETS])
    _, logits = run(head, TOKENS[1:], torch.randn(len(TOKENS) - 1, head.fc.in_features))
    assert bool(logits.isfinite().all())
    assert all(float(weight.abs().max()) > 0 for name, weight in head.named_parameters() if "layers.0" in name)


def test_layers_of_another_kind_leave_the_random_start() -> None:
    head = fresh(tiny("phi3"), (0, 2))
    assert float(head.fc.weight[:, :64].abs().min()) > 0  # no zeros and ones


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("normed", [False, True])
def test_a_step_is_the_published_one(layers: int, normed: bool) -> None:
    made = tiny_head(tiny("llama"), layers=layers)
    shape = HeadShape(made.shape.layer, made.shape.features, 64, 60, norm_before_residual=normed)
    head = EagleHead(shape, made.embed[0], made.targets).requires_grad_(False).eval()
    head.load_state_dict(made.state_dict())
    features = torch.randn(len(TOKENS) - 1, head.fc.in_features)
    hidden, logits = run(head, TOKENS[1:], features)
    weights, config = eagle3.named(head), head.shape.layer
    fused = features @ weights["fc.weight"].T
    expected = eagle3.outputs(weights, config, torch.tensor(TOKENS[1:]), fused, normed=normed)
    close(hidden, expected)
    close(logits, eagle3.logits(weights, config, expected))
