"""Small runs of `bozza train`: a target that has something to learn, its conversations and their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bozza import LLM, SamplingParams
from bozza.models.eagle import EagleHead, HeadShape, start_from_target
from bozza.models.heads import layer_like
from bozza.models.probe import load_runner
from bozza.models.runner import ForwardResult, Row
from bozza.train.data import Conversation
from bozza.train.features import Features
from tiny import VOCAB, tiny

LAYERS = (1, 2)  # of the target that features are kept of


def conversations(model: Any, count: int, seed: int = 0, answer: int = 20) -> list[Conversation]:
    """Greedy answers of a target to random prompts of a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    params = [SamplingParams(max_tokens=answer + index % 7, ignore_eos=True) for index in range(count)]
    outs = LLM(model, policy="off").generate(prompts, params)
    return [
        Conversation(index, len(prompt), (*prompt, *out.token_ids))
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True))
    ]


def filled(folder: Path, model: Any, data: Sequence[Conversation], layers: Sequence[int] = LAYERS) -> Features:
    """Features of conversations."""
    features = Features(folder, data, layers, model.config.hidden_size)
    features.fill(load_runner(model))
    return features


def untrained(model: Any, targets: torch.Tensor, *, layers: int = 1, from_target: bool = True) -> EagleHead:
    """A head that can be trained."""
    torch.manual_seed(0)
    config = layer_like(model, layers)
    head = EagleHead(HeadShape(config, LAYERS, 64, len(targets)), model.get_input_embeddings(), targets)
    if from_target:
        start_from_target(head, model)
    else:
        with torch.no_grad():
            head.lm_head.weight.copy_(model.lm_head.weight[targets])
    return head


def talker() -> Any:
    """A target that ends its texts now and then, with the same bits in passes of any shape."""
    model = tiny("llama", dtype=torch.bfloat16, initializer_range=0.02)
    model.generation_config.eos_token_id = [2, *range(10, 200, 13)]
    return model


class RuleRunner:
    """Stands in for a target that follows a rule: after each token comes one certain other token.

    Args:
        embeddings: [vocab, size], what is given as a hidden state of any layer.
        following: by token.
    """

    def __init__(self, embeddings: torch.Tensor, following: Mapping[int, int]) -> None:
        self._embeddings = embeddings
        self._logits = torch.zeros(len(embeddings), len(embeddings))
        for token, after in following.items():
            self._logits[token, after] = 12.0

    def alloc(self) -> int:
        return 0

    def free(self, slot: int) -> None:
        pass

    def forward(self, rows: Sequence[Row], hidden_layers: Sequence[int] = ()) -> ForwardResult:
        ids = [token for row in rows for token in row.tokens]
        return ForwardResult(self._logits[ids], dict.fromkeys(hidden_layers, self._embeddings[ids]))


def rule_bound(folder: Path, model: Any, layers: Sequence[int] = LAYERS, count: int = 60) -> Features:
    """Features of conversations that follow a rule, which a drafter can learn within seconds."""
    ring = torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(8))[:24].add(3).tolist()
    following = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    data = []
    for index in range(count):
        tokens = [ring[(5 * index) % 24], ring[(7 * index) % 24]]  # a prompt, where the rule does not hold
        while len(tokens) < 14 + index % 5:
            tokens.append(following[tokens[-1]])
        data.append(Conversation(index, 2, tuple(tokens)))
    features = Features(folder, data, layers, model.config.hidden_size)
    runner: Any = RuleRunner(model.get_input_embeddings().weight.detach(), following)
    features.fill(runner)
    return features
