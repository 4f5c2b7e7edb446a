"""Multi-token-prediction modules from disk: beside a target's own weights, or as heads that were trained for it.

transformers loads those of some targets itself (`MtpModel`), and ignores those of others
(`_keys_to_ignore_on_load_unexpected`); these come from the shards, in the layouts of `bozza.models.mtp_layouts`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_layers import MtpModel

from bozza.errors import BozzaError, ModelError, first_line
from bozza.models.heads import layer_config
from bozza.models.mtp import Lent, MtpHead, MtpModule, MtpShape, Parts, hidden_layer, sequential_heads
from bozza.models.mtp_layouts import OWN, read_modules

NONE = "this checkpoint has no MTP modules: train some with bozza train mtp, or use another drafter"
OURS = "sequential_heads"  # in config.json: their number
EXPERT = re.compile(r"block\.(?P<before>.+\.experts\.)(?P<expert>\d+)(?P<rest>\..+)")
SLIDING = ("mimo_v2_flash",)  # whose modules attend within the window, which their configuration does not say


def load_mtp(folder: Path, target: Any) -> MtpHead:
    """The modules in a folder, for a loaded target, in its dtype and on its device.

    Raises:
        ModelError: there are none, they cannot be read, or they were made for another target.
    """
    try:
        if not (folder / "config.json").exists():
            raise ModelError(f"no config.json in {folder}: name a checkpoint with MTP modules, or trained heads")
        config = json.loads((folder / "config.json").read_text())
        head = _load_ours(folder, config, target) if OURS in config else _load_published(folder, target)
    except BozzaError:
        raise
    except Exception as problem:  # damaged files fail in as many ways as there are formats
        raise ModelError(
            f"the MTP modules in {folder} cannot be loaded ({first_line(problem)}): check its files"
        ) from problem
    return head.to(target.device).requires_grad_(False).eval()


def save_mtp(head: MtpHead, folder: Path, target_name: str) -> None:
    """Write sequential heads, bfloat16. Embedding and output rows stay the target's.

    Args:
        head: the heads.
        folder: where; made if it does not exist.
        target_name: of the target that they were trained for.
    """
    assert head.layer is not None, "published modules are saved with their target"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["BozzaSequentialHeads"],
        OURS: len(head.steps),
        "target": target_name,
        "transformer_layer_config": {"model_type": "llama", **layer_config(head.layer)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _load_ours(folder: Path, config: Mapping[str, Any], target: Any) -> MtpHead:
    layer = LlamaConfig.from_dict(dict(config["transformer_layer_config"]))
    size = target.config.get_text_config(decoder=True).hidden_size
    if layer.hidden_size != size:
        raise ModelError(f"{folder}: the heads have width {layer.hidden_size}, the target {size}: it is not their own")
    layer.num_hidden_layers = config[OURS]
    head = sequential_heads(target, layer).to(target.dtype)
    tensors = load_file(folder / "model.safetensors")
    wanted = {key: tensor.shape for key, tensor in head.state_dict().items()}
    _check(folder, wanted, {key: tensor.shape for key, tensor in tensors.items()})
    head.load_state_dict(tensors)
    return head


def _check(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse by name what is missing, unknown or of another size."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise ModelError(f"{folder}: there is no {missing[0]}: the modules are incomplete or of another layout")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ModelError(f"{folder}: {unknown[0]} is no part of an MTP module: it is of another layout")
    for key, shape in wanted.items():
        if tuple(found[key]) != tuple(shape):
            raise ModelError(f"{folder}: {key} has shape {list(found[key])}, this target needs {list(shape)}")


def _load_published(folder: Path, target: Any) -> MtpHead:
    steps = read_modules(folder, hidden_layer(target))
    if not steps:
        raise ModelError(NONE)
    return _by_transformers(folder, target, steps) or _from_shards(folder, target, steps)


def _by_transformers(folder: Path, target: Any, steps: list[dict[str, Tensor]]) -> MtpHead | None:
    """Through `MtpModel`; None when it does not load these modules, or not all of what is there."""
    config = target.config
    if Path(config.name_or_path) != folder or config.dtype != target.dtype or not hasattr(target, "lm_head"):
        return None
    try:
        model = MtpModel.from_pretrained(target, device_map={"": target.device})
    except Exception:  # it raises what it happens to raise; the shards then tell what is wrong, by name
        return None
    if any(layer.post_norm is None for layer in model.layers) or getattr(
        model.config, "mtp_hidden_states_first", False
    ):
        return None
    # It passes over tensors that it does not know: then it has fewer numbers than the checkpoint.
    if sum(t.numel() for t in model.layers.state_dict().values()) != sum(t.numel() for s in steps for t in s.values()):
        return None
    return MtpHead(
        [
            MtpModule(
                _shape(target),
                Parts(layer.enorm, layer.hnorm, layer.eh_proj, layer.mtp_block, layer.post_norm),
                _lent(target, model.config, index),
            )
            for index, layer in enumerate(model.layers)
        ]
    )


def _from_shards(folder: Path, target: Any, steps: list[dict[str, Tensor]]) -> MtpHead:
    """Decoder layers through a small model of the target's class, so that transformers' conversions apply."""
    small = _small(folder, target, steps)
    size = _shape(target).size
    made = []
    for index, tensors in enumerate(steps):
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("block.")}
        wanted = {name: [size, 2 * size] if name == "eh_proj.weight" else [size] for name in OWN}
        _check(folder, _numbered(index, wanted), _numbered(index, {name: t.shape for name, t in own.items()}))
        norms = {name: copy.deepcopy(small.base_model.norm) for name in ("enorm", "hnorm", "norm")}
        for name, norm in norms.items():
            norm.load_state_dict({"weight": own[f"{name}.weight"]})
        projection = nn.Linear(2 * size, size, bias=False, dtype=target.dtype)
        projection.load_state_dict({"weight": own["eh_proj.weight"]})
        block = small.base_model.layers[index]
        parts = Parts(norms["enorm"], norms["hnorm"], projection, block, norms["norm"])
        made.append(MtpModule(_shape(target), parts, _lent(target, small.config, index)))
    return MtpHead(made)


def _small(folder: Path, target: Any, steps: list[dict[str, Tensor]]) -> Any:
    """A model of the target's class whose layers are the decoder layers of the modules, and whose vocabulary is 1."""
    _check_experts(folder, steps)
    config = _small_config(target, steps)
    prefix = target.base_model_prefix
    state = {
        f"{prefix}.layers.{index}.{name.removeprefix('block.')}": tensor
        for index, tensors in enumerate(steps)
        for name, tensor in tensors.items()
        if name.startswith("block.")
    }
    size = config.hidden_size
    given = {f"{prefix}.embed_tokens.weight": torch.zeros(1, size), f"{prefix}.norm.weight": torch.ones(size)}
    if not config.tie_word_embeddings:
        given["lm_head.weight"] = torch.zeros(1, size)
    model, info = type(target).from_pretrained(
        None,
        config=config,
        state_dict=state | given,
        dtype=target.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    for problem, name, more in [
        *(("there is no", key, "") for key in sorted(info["missing_keys"])),
        *(("no part of this target's decoder layer is", key, "") for key in sorted(info["unexpected_keys"])),
        *(("another shape has", key, f" ({list(a)}, needed {list(b)})") for key, a, b in info["mismatched_keys"]),
    ]:
        step, _, rest = name.removeprefix(f"{prefix}.layers.").partition(".")
        raise ModelError(f"{folder}: {problem} {rest} of MTP module {step}{more}: check the files")
    return model


def _check_experts(folder: Path, steps: list[dict[str, Tensor]]) -> None:
    """What one expert has, all must have: transformers joins their tensors, and does not say which one is missing."""
    for index, tensors in enumerate(steps):
        found = [match for name in tensors if (match := EXPERT.fullmatch(name))]
        count = 1 + max((int(match["expert"]) for match in found), default=-1)
        for before, rest in sorted({(match["before"], match["rest"]) for match in found}):
            for name in (f"{before}{expert}{rest}" for expert in range(count)):
                if f"block.{name}" not in tensors:
                    raise ModelError(f"{folder}: there is no {name} of MTP module {index}: check the files")


def _small_config(target: Any, steps: list[dict[str, Tensor]]) -> PretrainedConfig:
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    count = len(steps)
    sparse = [any(name.startswith("block.mlp.experts.") for name in tensors) for tensors in steps]
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = count, 1, None
    if getattr(config, "layer_types", None):
        kind = "sliding_attention" if config.model_type in SLIDING else "full_attention"
        config.layer_types = getattr(config, "mtp_layer_types", None) or [kind] * count
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse" if each else "dense" for each in sparse]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if all(sparse) else count
    return config


def _numbered(index: int, names: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name} of MTP module {index}": value for name, value in names.items()}


def _shape(target: Any) -> MtpShape:
    return MtpShape((hidden_layer(target),), target.config.get_text_config(decoder=True).hidden_size)


def _lent(target: Any, config: Any, index: int) -> Lent:
    """What module `index` borrows; some targets rotate by the kind of a layer."""
    rotary = target.base_model.rotary_emb
    if "layer_type" in signature(rotary.forward).parameters:
        rotary = partial(rotary, layer_type=config.layer_types[index])
    return Lent(target.get_input_embeddings(), target.get_output_embeddings(), rotary)
