"""Tiny checkpoints with multi-token-prediction modules, written in the layouts in which real ones are published."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bozza.models.heads import layer_like
from bozza.models.mtp import MtpHead, sequential_heads
from tiny import ARCHITECTURES, SLIDING_FIRST, VOCAB, tiny

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GROUPED = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 6, "layer_types": SLIDING_FIRST}
LAYERS = 3  # of the targets


@dataclass(frozen=True)
class Family:
    """A kind of target, and how its modules are published."""

    target: dict[str, Any]  # options of its configuration
    layout: str
    steps: int
    block: dict[str, Any] = field(default_factory=dict)  # options of a model whose layers are those of the modules


FAMILIES = {
    "deepseek_v3": Family(ARCHITECTURES["deepseek_v3"], "beyond", 2, {"first_k_dense_replace": 0}),
    "glm4_moe": Family(GROUPED | {"head_dim": 16}, "beyond", 1, {"first_k_dense_replace": 0}),
    "exaone_moe": Family(
        EXPERTS | WINDOW | {"num_experts": 4},
        "once",
        1,
        {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
    ),
    "mellum": Family(
        EXPERTS | WINDOW | {"num_experts": 4, "head_dim": 16, "num_mtp_layers": 1},
        "once",
        1,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]},
    ),
    "mimo_v2_flash": Family(
        GROUPED | WINDOW | {"head_dim": 16, "v_head_dim": 8},
        "listed",
        3,
        {"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["dense"] * 3},
    ),
}
NAMES = {
    "beyond": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "listed": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "once": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


@dataclass(frozen=True)
class Written:
    """A checkpoint, and what was written into it."""

    folder: Path
    added: dict[str, torch.Tensor]  # tensors of modules, by their published names
    own: list[dict[str, torch.Tensor]]  # of each module: enorm, hnorm, eh_proj, norm
    blocks: list[Any]  # decoder layers


def publish(name: str, folder: Path) -> Written:
    """Write a target of a family with random modules."""
    family = FAMILIES[name]
    model = tiny(name, **family.target)
    model.save_pretrained(folder / "target")
    donor = tiny(name, seed=1, **(family.target | {"num_hidden_layers": family.steps} | family.block))
    donor.save_pretrained(folder / "donor")  # in the names of published checkpoints, one tensor for each expert
    generator = torch.Generator().manual_seed(2)
    size = model.config.hidden_size
    own = []
    for _ in range(family.steps):
        norms = [1 + 0.2 * torch.randn(size, generator=generator) for _ in range(3)]
        projection = 0.15 * torch.randn(size, 2 * size, generator=generator)
        own.append({"enorm": norms[0], "hnorm": norms[1], "eh_proj": projection, "norm": norms[2]})
    added = {}
    for key, tensor in load_file(folder / "donor" / "model.safetensors").items():
        if key.startswith("model.layers."):
            step, _, rest = key.removeprefix("model.layers.").partition(".")
            added[_name(family.layout, int(step), rest)] = tensor
    for step, tensors in enumerate(own):
        for here, there in zip(("enorm", "hnorm", "eh_proj", "norm"), NAMES[family.layout], strict=True):
            added[_name(family.layout, step, f"{there}.weight")] = tensors[here]
    if family.layout == "beyond":
        added[_name("beyond", 0, "embed_tokens.weight")] = model.get_input_embeddings().weight.detach().clone()
        added[_name("beyond", 0, "shared_head.head.weight")] = torch.zeros(
            VOCAB, size
        )  # not read: the target's is used
    rewrite(folder / "target", added)
    return Written(folder / "target", added, own, list(donor.model.layers))


def _name(layout: str, step: int, rest: str) -> str:
    if layout == "beyond":
        return f"model.layers.{LAYERS + step}.{rest}"
    if layout == "listed":
        return f"model.mtp.layers.{step}.{rest.replace('post_attention_layernorm', 'pre_mlp_layernorm')}"
    return f"mtp.{rest}" if rest.startswith(NAMES["once"]) else f"mtp.layers.{step}.{rest}"


def rewrite(folder: Path, added: dict[str, Any]) -> None:
    """Add tensors to a checkpoint; None takes one away."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | added
    kept = {key: tensor.clone().contiguous() for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def tiny_modules(model: Any, steps: int = 2, seed: int = 0) -> MtpHead:
    """Random sequential heads for a tiny model."""
    torch.manual_seed(seed)
    head = sequential_heads(model, layer_like(model, steps))
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return head.requires_grad_(False).to(model.dtype).eval()
