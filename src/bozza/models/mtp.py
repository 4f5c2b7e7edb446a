"""Multi-token-prediction modules (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 2.2, equations 21 to 23).

Module k (from 1) puts two norms side by side, of the embedding of token i + k and of what module k - 1 made of slot i,
projects them to the model's width, and runs one decoder layer over its own slots 0 to i. The target's output rows then
guess token i + k + 1. Module 1 starts from the target's last hidden state, after the final norm; a module hands on its
result after its own final norm. The paper leaves both open; this is what transformers does in its `MtpModel`.

The decoder layer is a transformers module of the target's own kind, or of llama in heads that were trained for a target
without modules ("sequential heads"). It is left unmodified, and attends through the attention interface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from bozza.models.attention import How, attending
from bozza.models.head_runner import AttendHow
from bozza.models.runner import configs_of

Rotary = Callable[[Tensor, Tensor], Any]  # hidden states [1, tokens, size], positions [1, tokens] -> for the layers


@dataclass(frozen=True, slots=True)
class MtpShape:
    """What a module is made of."""

    features: tuple[int, ...]  # the one hidden state of the target that the first module reads
    size: int


@dataclass(frozen=True, slots=True)
class Lent:
    """What modules use and do not own: it is not a part of their state."""

    embed: Any  # token ids -> embeddings [tokens, size]
    output: Any  # [tokens, size] -> logits [tokens, vocab]
    rotary: Rotary


@dataclass(frozen=True, slots=True)
class Parts:
    """The modules that a module owns."""

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Linear
    block: nn.Module
    norm: nn.Module


class MtpModule(nn.Module):
    """One module; runs as a head of its own (`bozza.models.head_runner.Head`).

    Args:
        shape: its sizes.
        parts: what it owns.
        lent: what it shares with the target.
    """

    targets: Tensor | None = None  # its tokens are the target's

    def __init__(self, shape: MtpShape, parts: Parts, lent: Lent) -> None:
        super().__init__()
        self.shape = shape
        self.eh_proj, self.enorm, self.hnorm = parts.eh_proj, parts.enorm, parts.hnorm  # first: see `Head.parameters`
        self.block, self.norm = parts.block, parts.norm
        self._lent = lent
        self._configs = configs_of(parts.block)

    def fuse(self, features: Tensor) -> Tensor:
        """See `Head.fuse`: as they are."""
        return features

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: AttendHow) -> Tensor:
        """See `Head`. Positions are those of the slots: a shift that all slots share changes no rotary attention."""
        embeds = self._lent.embed(ids).to(hidden)
        mixed = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))[None]
        places = positions[None]
        with attending(self._configs, _Through(attend)):
            result = self.block(
                mixed,
                attention_mask=None,
                position_ids=places,
                position_embeddings=self._lent.rotary(mixed, places),
            )
        outputs = result[0] if isinstance(result, tuple) else result
        normed: Tensor = self.norm(outputs[0])
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Head.logits`."""
        logits: Tensor = self._lent.output(hidden)
        return logits


@dataclass(frozen=True, slots=True)
class _Through:
    """Attention as a head is given it, in the form that layers of transformers attend through."""

    call: AttendHow

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """See `bozza.models.attention.Pass.attend`."""
        return self.call(layer, query, key, value, how)


class MtpHead(nn.Module):
    """The modules of a target, in their order. Which of them guesses which depth: see `bozza.drafters.heads`.

    Args:
        steps: at least one module.
        layer: of the decoder layers, in sequential heads; None in modules that are published with a target.
    """

    def __init__(self, steps: list[MtpModule], layer: LlamaConfig | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(steps)
        self.layer = layer

    @property
    def steps(self) -> list[MtpModule]:
        """The modules."""
        return [cast(MtpModule, module) for module in self.layers]


def hidden_layer(target: Any) -> int:
    """The target's last hidden state, after the final norm."""
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def sequential_heads(target: Any, layer: LlamaConfig) -> MtpHead:
    """Untrained heads for a target without modules: as many as `layer` says that it has hidden layers.

    Args:
        target: the model that they are for.
        layer: of their decoder layers (see `bozza.models.heads.layer_like`).
    """
    size, eps = layer.hidden_size, layer.rms_norm_eps
    rotary = LlamaRotaryEmbedding(layer).to(target.device)
    lent = Lent(target.get_input_embeddings(), target.get_output_embeddings(), rotary)
    shape = MtpShape((hidden_layer(target),), size)
    steps = [
        MtpModule(
            shape,
            Parts(
                LlamaRMSNorm(size, eps=eps),
                LlamaRMSNorm(size, eps=eps),
                nn.Linear(2 * size, size, bias=False),
                LlamaDecoderLayer(layer, index),
                LlamaRMSNorm(size, eps=eps),
            ),
            lent,
        )
        for index in range(layer.num_hidden_layers)
    ]
    return MtpHead(steps, layer)
