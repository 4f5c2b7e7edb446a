"""EAGLE-3 heads (Li et al., 2025): one or a few decoder layers over token embeddings and features of the target.

At slot t the head reads the target's features of token t and the embedding of token t + 1, and guesses token t + 2. For
tokens that the target has not read yet, the head's own output stands in for the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

# layer, query [heads, tokens, size], key and value [kv heads, tokens, size] -> [tokens, heads, size]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a head is made of."""

    layer: LlamaConfig  # of its decoder layers
    features: tuple[int, ...]  # the target's layers whose inputs it reads
    target_size: int  # width of one feature
    draft_vocab: int
    norm_before_residual: bool = False


def default_features(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads: low, middle and high."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))


class EagleHead(nn.Module):
    """The head proper. The target's embedding and the map from draft to target vocabulary come with it.

    Args:
        shape: its sizes.
        embed: token ids -> embeddings [tokens, size].
        targets: int64 [draft vocab], the target's id of each draft token.
    """

    layers: Any

    def __init__(self, shape: HeadShape, embed: nn.Module, targets: Tensor) -> None:
        super().__init__()
        config = shape.layer
        self.shape = shape
        self.fc = nn.Linear(len(shape.features) * shape.target_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(HeadLayer(shape, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.vocab_size = config.vocab_size
        self.embed = [embed]  # in a list: not a part of this module's state
        self.register_buffer("targets", targets, persistent=False)
        self.targets: Tensor

    def fuse(self, features: Tensor) -> Tensor:
        """Features [tokens, layers * target size] of the target, as the head's layers take them [tokens, size]."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What stands in for features one token later, [tokens, size].

        Args:
            ids: [tokens], the token after each slot.
            hidden: [tokens, size], fused features, or the head's output for the slot before.
            positions: [tokens], of the slots.
            attend: attention over all slots that each of these sees.
        """
        rotary = self.rotary(hidden, positions[None])
        embeds = self.embed[0](ids).to(hidden)
        for layer in self.layers:
            hidden = layer(embeds, hidden, rotary, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, draft vocab] of the outputs of `forward`."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class HeadLayer(nn.Module):
    """A decoder layer. The first one attends with embedding and hidden state side by side, further ones as usual."""

    def __init__(self, shape: HeadShape, index: int) -> None:
        super().__init__()
        config = shape.layer
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        if index == 0:
            self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = HeadAttention(config, 2 * size if index == 0 else size, index)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeds: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """See `EagleHead.forward`."""
        if self.index == 0:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            mixed = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            residual, mixed = hidden, self.input_layernorm(hidden)
        hidden = residual + self.self_attn(mixed, rotary, attend)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class HeadAttention(nn.Module):
    """Projections and rotation; what is attended to is the caller's."""

    def __init__(self, config: LlamaConfig, width: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=bias)

    def forward(self, mixed: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Input [tokens, width], result [tokens, size]."""
        query, key, value = (
            projection(mixed).unflatten(-1, (-1, self.size)).transpose(0, 1)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (part[0] for part in apply_rotary_pos_emb(query[None], key[None], *rotary))
        result: Tensor = self.o_proj(attend(self.index, query, key, value).flatten(1))
        return result


def start_from_target(head: EagleHead, target: Any) -> None:
    """Let an untrained head repeat the target's last layer: it then learns within minutes (docs/log.md).

    The last feature goes through `fc` as it is; attention ignores the embedding at first; norm and head rows are the
    target's. Where the target's decoder layers have other parts than a head's, the first layer keeps its random start.
    """
    base = target.base_model
    with torch.no_grad():
        head.lm_head.weight.copy_(head_rows(target, head.targets))
        for layer in head.layers[1:]:  # further layers begin by passing everything through
            for weight in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters()):
                weight.zero_()
        if _same_parts(head.norm, getattr(base, "norm", None)):
            head.norm.load_state_dict(base.norm.state_dict())
        if _same_parts(head.layers[0], getattr(base, "layers", [None])[0], added=("hidden_norm",)):
            _repeat(head, base.layers, head.shape.features[-1])


def _same_parts(ours: nn.Module, theirs: Any, added: Sequence[str] = ()) -> bool:
    """Whether theirs has all weights of ours but what was added, and no more outside of attention."""
    if theirs is None:
        return False
    mine = {name for name in ours.state_dict() if not name.startswith(tuple(added))}
    more = theirs.state_dict().keys() - mine
    return mine <= theirs.state_dict().keys() and all(name.startswith("self_attn.") for name in more)


def _repeat(head: EagleHead, layers: Any, last: int) -> None:
    """Make the first layer of the head do what a layer of the target does."""
    first, theirs, size = head.layers[0], layers[last], head.shape.target_size
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] = torch.eye(size)
    first.input_layernorm.weight.fill_(1.0)
    for name in ("q_proj", "k_proj", "v_proj"):
        our, their = getattr(first.self_attn, name), getattr(theirs.self_attn, name)
        our.weight.zero_()
        our.weight[:, size:] = their.weight
        if our.bias is not None:
            our.bias.copy_(their.bias)
    first.hidden_norm.load_state_dict(theirs.input_layernorm.state_dict())
    first.self_attn.o_proj.load_state_dict(theirs.self_attn.o_proj.state_dict())
    first.post_attention_layernorm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    _start_mlp(first.mlp, theirs.mlp, layers[max(last - 1, 0)].mlp)


def _start_mlp(ours: Any, last: Any, before: Any) -> None:
    """The last layer's, and if ours is wider, that of the layer before as well, without a say at first."""
    width = last.down_proj.weight.shape[1]
    end = min(ours.down_proj.weight.shape[1], 2 * width)  # what is wider still begins at random
    for name in ("gate_proj", "up_proj"):
        for our, their, more in zip(
            getattr(ours, name).parameters(), getattr(last, name).parameters(), getattr(before, name).parameters(),
            strict=True,
        ):  # fmt: skip
            our[:width] = their
            our[width:end] = more[: end - width]
    ours.down_proj.weight[:, :width] = last.down_proj.weight
    ours.down_proj.weight[:, width:] = 0.0
    if ours.down_proj.bias is not None:
        ours.down_proj.bias.copy_(last.down_proj.bias)


def head_rows(target: Any, ids: Tensor) -> Tensor:
    """The target's own output rows [ids, size] of some tokens."""
    rows: Tensor = target.get_output_embeddings().weight[ids.to(target.device)]
    return rows
