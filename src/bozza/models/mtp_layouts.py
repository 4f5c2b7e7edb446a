"""Where a published checkpoint keeps its multi-token-prediction modules.

With N the target's number of layers and j the number of a module, from 0:

| layout | as in | names |
|---|---|---|
| beyond | DeepSeek-V3, GLM-4.5 | `model.layers.{N + j}.` `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` |
| listed | MiMo-V2-Flash | `model.mtp.layers.{j}.` `enorm`, `hnorm`, `eh_proj`, `final_layernorm` |
| once | Qwen3-Next, K-EXAONE, Mellum | `mtp.` `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `norm` |

What else stands below `{j}`, with layout "once" below `mtp.layers.{j}`, belongs to the decoder layer; embedding and
output rows there repeat the target's. With layout "once", all modules share what is there once.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from bozza.errors import ModelError

LISTED = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<index>\d+)\.)?(?P<rest>.+)")
BEYOND = re.compile(r"model\.layers\.(?P<index>\d+)\.(?P<rest>.+)")
LIKE = re.compile(r"(?:model\.)?mtp[._]")
RENAMED = {
    "enorm": "enorm", "pre_fc_norm_embedding": "enorm",
    "hnorm": "hnorm", "pre_fc_norm_hidden": "hnorm",
    "eh_proj": "eh_proj", "fc": "eh_proj",
    "norm": "norm", "shared_head.norm": "norm", "final_layernorm": "norm",
    "pre_mlp_layernorm": "block.post_attention_layernorm",
}  # fmt: skip
REPEATED = ("embed_tokens", "shared_head.head")
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")


def read_modules(folder: Path, layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each module, by their names here: `enorm`, `hnorm`, `eh_proj`, `norm`, and what is below `block`.

    Args:
        folder: of the checkpoint.
        layers: how many the target has.

    Raises:
        ModelError: a tensor looks like a part of a module, but is in none of the layouts.
    """
    steps: dict[int, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 - it is no dictionary
                place = _place(key, layers)
                if place is None or place[1].startswith(REPEATED):
                    continue
                step, name = place
                if step is None and name not in OWN:
                    raise ModelError(f"{folder}: {key} is no part of an MTP module: it is of another layout")
                (shared if step is None else steps.setdefault(step, {}))[name] = shard.get_tensor(key)
    if shared and not steps:
        raise ModelError(f"{folder}: there are tensors of MTP modules, but no mtp.layers.0: they are incomplete")
    return [shared | steps.get(step, {}) for step in range(max(steps, default=-1) + 1)]


def _place(key: str, layers: int) -> tuple[int | None, str] | None:
    """Module (None: each) and name there of a tensor of a checkpoint; None when it is the target's own."""
    step: int | None
    if (beyond := BEYOND.fullmatch(key)) and int(beyond["index"]) >= layers:
        step, rest = int(beyond["index"]) - layers, beyond["rest"]
    elif listed := LISTED.fullmatch(key):
        step, rest = int(listed["index"]) if listed["index"] else None, listed["rest"]
    else:
        return (None, key) if LIKE.match(key) else None
    part, _, kind = rest.rpartition(".")
    if part in RENAMED:
        return step, f"{RENAMED[part]}.{kind}"
    return step, rest if step is None or rest.startswith(REPEATED) else f"block.{rest}"
