"""EAGLE-3 heads on disk, in the two layouts in which they are published.

`speculators` (vLLM): config.json with "speculators_model_type", decoder layers under `layers.N`. SafeAILab (by the
authors): the configuration of a Llama with "draft_vocab_size", the one decoder layer as `midlayer`. In both, `d2t`
holds for each draft token how far its id in the target lies from its own. Rows that are the target's own may be left
out: embedding and, in heads written here, the output rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from bozza.errors import BozzaError, ModelError, first_line
from bozza.models.catalog import DEFAULT_MODEL, cached_path
from bozza.models.eagle import EagleHead, HeadShape, default_features, head_rows

LAYER_KEYS = {  # of the target's configuration, what a decoder layer of a head is made of
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias", "vocab_size",
}  # fmt: skip


def load_head(folder: Path, target: Any) -> EagleHead:
    """A head for a loaded target, in its dtype and on its device.

    Raises:
        ModelError: there is none in the folder, it cannot be read, or it was made for another target.
    """
    try:
        head = _load(folder, target)
        for weight in head.parameters():  # not what positions are turned by: in 16 bits it would be far off soon
            weight.data = weight.data.to(target.dtype)
        return head.to(target.device).eval()
    except BozzaError:
        raise
    except Exception as problem:  # damaged files fail in as many ways as there are formats
        raise ModelError(f"the head in {folder} cannot be loaded ({first_line(problem)}): check its files") from problem


def _load(folder: Path, target: Any) -> EagleHead:
    if not (folder / "config.json").exists():
        raise ModelError(f"no head in {folder}: name a folder with config.json and weights, or train one (bozza train)")
    config = json.loads((folder / "config.json").read_text())
    tensors = {_name(key): tensor for key, tensor in _tensors(folder).items()}
    shape = _shape(config, target)
    targets = _targets(folder, tensors, shape, target)
    embed = _embed(folder, tensors.pop("embed_tokens.weight", None), shape, target)
    head = EagleHead(shape, embed, targets)
    tensors.setdefault("lm_head.weight", head_rows(target, targets))
    _check(folder, tensors, head)
    head.load_state_dict(tensors)
    return head


def _tensors(folder: Path) -> dict[str, Tensor]:
    if files := sorted(folder.glob("*.safetensors")):
        return {key: tensor for file in files for key, tensor in load_file(file).items()}
    if (file := folder / "pytorch_model.bin").exists():
        tensors: dict[str, Tensor] = torch.load(file, weights_only=True, map_location="cpu")
        return tensors
    raise ModelError(f"no weights in {folder}: a head is model.safetensors or pytorch_model.bin")


def _name(key: str) -> str:
    """A tensor's name here."""
    return "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key


def _shape(config: Mapping[str, Any], target: Any) -> HeadShape:
    text = target.config.get_text_config(decoder=True)
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ModelError(f"a head of type '{kind}' cannot run here: EAGLE-3 heads ('eagle3') can")
    layer = config["transformer_layer_config"] if kind else config
    if layer.get("model_type", "llama") != "llama":
        raise ModelError(f"a head with decoder layers of {layer['model_type']} cannot run here: those of llama can")
    if "draft_vocab_size" not in config:
        raise ModelError("its config.json has no draft_vocab_size: EAGLE-3 heads can run here, earlier ones cannot")
    features = config.get("eagle_aux_hidden_state_layer_ids") or default_features(text.num_hidden_layers)
    if wrong := [i for i in features if not 0 <= i <= text.num_hidden_layers]:
        raise ModelError(f"the head reads layer {wrong[0]}, the target has layers 0 to {text.num_hidden_layers}")
    return HeadShape(
        LlamaConfig.from_dict(dict(layer)),
        tuple(features),
        config.get("target_hidden_size") or text.hidden_size,
        config["draft_vocab_size"],
        bool(config.get("norm_before_residual", False)),
    )


def _targets(folder: Path, tensors: dict[str, Tensor], shape: HeadShape, target: Any) -> Tensor:
    """The target's id of each draft token, checked: a wrong one would read beyond a table."""
    vocab = target.config.get_text_config(decoder=True).vocab_size
    tensors.pop("t2d", None)
    offsets = tensors.pop("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
    if offsets.shape != (shape.draft_vocab,):
        raise ModelError(f"{folder}: d2t has shape {list(offsets.shape)}, draft_vocab_size is {shape.draft_vocab}")
    targets = torch.arange(shape.draft_vocab) + offsets.long()
    if int(targets.min()) < 0 or int(targets.max()) >= vocab:
        wrong = int(targets[(targets < 0) | (targets >= vocab)][0])
        raise ModelError(f"{folder}: d2t leads to token {wrong}, the target has 0 to {vocab - 1}: it is not its head")
    return targets


def _embed(folder: Path, own: Tensor | None, shape: HeadShape, target: Any) -> nn.Module:
    size = shape.layer.hidden_size
    theirs: Any = target.get_input_embeddings()
    rows, width = (theirs.weight if own is None else own).shape
    vocab = theirs.weight.shape[0]
    if width != size or rows < vocab:
        raise ModelError(
            f"{folder}: an embedding of {rows} x {width} does not fit: "
            f"the head has width {size}, the target {vocab} tokens"
        )
    if own is None:
        return cast(nn.Module, theirs)
    return nn.Embedding(rows, width, _weight=own.to(target.dtype).to(target.device))


def _check(folder: Path, tensors: Mapping[str, Tensor], head: EagleHead) -> None:
    """Refuse by name what is missing, unknown or of another size."""
    wanted = {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()}
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if missing := sorted(wanted.keys() - found.keys()):
        raise ModelError(f"{folder}: the head has no {missing[0]}; it is incomplete or of another layout")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ModelError(f"{folder}: {unknown[0]} is no part of an EAGLE-3 head; it is of another layout")
    for key, shape in wanted.items():
        if found[key] != shape:
            raise ModelError(f"{folder}: {key} has shape {list(found[key])}, this target needs {list(shape)}")


def save_head(head: EagleHead, folder: Path, target_name: str, *, own_rows: bool) -> None:
    """Write a head in the layout of speculators, bfloat16.

    Args:
        head: the head.
        folder: where; made if it does not exist.
        target_name: of the target it was trained for.
        own_rows: store the output rows; otherwise they are taken from the target.
    """
    shape = head.shape
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in head.state_dict().items()}
    if not own_rows:
        del tensors["lm_head.weight"]
    tensors["d2t"] = head.targets.cpu() - torch.arange(shape.draft_vocab)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.norm_before_residual,
        "target_hidden_size": shape.target_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.features),
        "transformer_layer_config": {"model_type": "llama", **layer_config(shape.layer)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target_name},
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def layer_config(config: LlamaConfig) -> dict[str, Any]:
    """What of a layer's configuration is written beside a head."""
    keys = sorted({*LAYER_KEYS, "num_hidden_layers"})
    return {key: value for key, value in config.to_dict().items() if key in keys and value is not None}


def layer_like(target: Any, layers: int, widen: int = 1) -> LlamaConfig:
    """The configuration of head layers of the target's own sizes; their feed-forward part `widen` times as wide."""
    text = target.config.get_text_config(decoder=True)
    found = {key: value for key in LAYER_KEYS if (value := getattr(text, key, None)) is not None}
    config = LlamaConfig(**{"intermediate_size": 4 * text.hidden_size, **found}, num_hidden_layers=layers)
    config.intermediate_size *= widen
    return config


def shipped_head(target: Path | None) -> Path:
    """The folder of the head that comes with this package, for the default model.

    Raises:
        ModelError: the target is another model.
    """
    if target is None or target != cached_path(DEFAULT_MODEL):
        raise ModelError(
            f"the head that comes with bozza is for {DEFAULT_MODEL}: "
            "name another with eagle:FOLDER (bozza train makes one)"
        )
    return Path(__file__).parent.parent / "heads" / DEFAULT_MODEL
