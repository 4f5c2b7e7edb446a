"""EAGLE-3 (Li et al., 2025) written out in plain torch, one sequence at a time, from named tensors alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bozza.models.eagle import EagleHead


def named(head: EagleHead) -> dict[str, Tensor]:
    """The tensors of a head, with the embedding that it uses."""
    return {**head.state_dict(), "embed_tokens.weight": head.embed[0].weight.detach()}


def outputs(weights: Mapping[str, Tensor], config: Any, ids: Tensor, hidden: Tensor, *, normed: bool = False) -> Tensor:
    """What stands in for features one token later, for slots 0, 1, ... that see all slots before them.

    Args:
        weights: by name.
        config: sizes of the layers, those of a Llama.
        ids: [slots], the token after each slot.
        hidden: [slots, size], fused features or outputs.
        normed: the residual stream begins with the normed hidden state (`norm_before_residual`).
    """
    eps = config.rms_norm_eps
    embeds = weights["embed_tokens.weight"][ids]
    for index in range(config.num_hidden_layers):
        layer = {
            key.removeprefix(f"layers.{index}."): tensor
            for key, tensor in weights.items()
            if key.startswith(f"layers.{index}.")
        }
        if index == 0:
            right = rms_norm(hidden, layer["hidden_norm.weight"], eps)
            mixed = torch.cat([rms_norm(embeds, layer["input_layernorm.weight"], eps), right], dim=1)
            residual = right if normed else hidden
        else:
            residual, mixed = hidden, rms_norm(hidden, layer["input_layernorm.weight"], eps)
        hidden = residual + attention(layer, config, mixed)
        inner = rms_norm(hidden, layer["post_attention_layernorm.weight"], eps)
        gate = functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (inner @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return hidden


def logits(weights: Mapping[str, Tensor], config: Any, hidden: Tensor) -> Tensor:
    """Over the draft vocabulary."""
    return rms_norm(hidden, weights["norm.weight"], config.rms_norm_eps) @ weights["lm_head.weight"].T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


def attention(layer: Mapping[str, Tensor], config: Any, mixed: Tensor) -> Tensor:
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    query, key, value = (
        (mixed @ layer[f"self_attn.{name}_proj.weight"].T).view(len(mixed), -1, size).transpose(0, 1) for name in "qkv"
    )
    query, key = rotated(query), rotated(key)
    share = heads // len(key)
    result = []
    for head in range(heads):
        scores = query[head] @ key[head // share].T / size**0.5
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
        result.append(scores.masked_fill(unseen, -torch.inf).softmax(dim=1) @ value[head // share])
    return torch.cat(result, dim=1) @ layer["self_attn.o_proj.weight"].T


def rotated(x: Tensor) -> Tensor:
    """[heads, slots, size], each slot turned to its position."""
    half = x.shape[2] // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed).to(x)
    low, high = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=2)


def unrolled(head: EagleHead, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
    """The head's output [1, size] for the last token of `path`, which continues `tokens`.

    Args:
        head: the head.
        tokens: of the text.
        features: of all of them but the last.
        path: tokens that the target has not read.
    """
    weights, config, normed = named(head), head.shape.layer, head.shape.norm_before_residual
    hidden = features @ weights["fc.weight"].T
    ids = list(tokens[1:])
    for token in path:
        hidden = torch.cat([hidden, outputs(weights, config, torch.tensor(ids), hidden, normed=normed)[-1:]])
        ids.append(token)
    return outputs(weights, config, torch.tensor(ids), hidden, normed=normed)[-1:]


def best_tree(head: EagleHead, tokens: Sequence[int], features: Tensor, nodes: int) -> dict[tuple[int, ...], float]:
    """The likeliest paths of the head's own greedy tree and their values, found by looking at every one that may be."""
    found: dict[tuple[int, ...], float] = {}
    waiting: dict[tuple[int, ...], float] = {(): 1.0}
    weights, config = named(head), head.shape.layer
    while waiting and len(found) <= nodes:
        path = max(waiting, key=lambda each: waiting[each])
        value = found[path] = waiting.pop(path)
        law = logits(weights, config, unrolled(head, tokens, features, path)).softmax(dim=1)[0]
        for place in law.topk(nodes).indices.tolist():
            waiting[*path, int(head.targets[place])] = value * float(law[place])
    del found[()]
    return found
