"""From what a user names (alias, folder, GGUF file, hub id) to a loaded model, its tokenizer and its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bozza.errors import BozzaError, ConfigError, ModelError, first_line
from bozza.models import catalog
from bozza.models.packing import check_quantize, pack_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A transformers model with what belongs to it. `tokenizer` is None when its folder has none.

    `weights` says what became of its linear layers, see `bozza.models.packing`. With `compiled`, whoever runs it is to
    compile its layers, see `bozza.models.compiling`.
    """

    model: Any
    tokenizer: Any
    path: Path | None
    weights: str = "plain"
    compiled: bool = False


def resolve(name: str | Path) -> Path:
    """The local transformers folder of a model; catalog and hub models are fetched when needed.

    Raises:
        ModelError: there is no such model, or it cannot be had.
    """
    if str(name) in catalog.CATALOG:
        return catalog.fetch(str(name))
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return catalog.from_gguf(path)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} holds no config.json: name a folder that transformers' save_pretrained wrote")
        return path
    known = ", ".join(catalog.CATALOG)
    if path.is_absolute() or path.suffix == ".gguf" or str(name).count("/") != 1 or str(name).startswith("."):
        raise ModelError(f"no model '{name}': use an alias ({known}), a folder, a .gguf file or a hub id (owner/model)")
    return _from_hub(str(name))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]))
    except Exception as problem:  # the hub client's errors have no common base
        known = ", ".join(catalog.CATALOG)
        raise ModelError(
            f"no folder '{name}', and the model hub does not give it ({type(problem).__name__}): "
            f"check the name and the network, or use an alias ({known})"
        ) from problem


def load(name: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> Loaded:
    """Load a causal language model and, when there is one, its tokenizer.

    Raises:
        ConfigError: the dtype or the device does not exist.
        ModelError: the model cannot be found or loaded.
    """
    chosen_dtype, chosen_device = parse_dtype(dtype), parse_device(device)
    path = resolve(name)
    try:
        config = AutoConfig.from_pretrained(path)
        if config.is_encoder_decoder:
            raise ModelError(f"{name} is an encoder-decoder; only decoder-only models run here")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=chosen_dtype).to(chosen_device).eval()
        tokenizer = _tokenizer(path)
    except BozzaError:
        raise
    except Exception as problem:  # damaged files, missing packages, unknown architectures: all mean the same here
        raise ModelError(f"{name} cannot be loaded ({first_line(problem)}): check the files in {path}") from problem
    return Loaded(model, tokenizer, path)


def load_packed(name: str | Path, dtype: str | torch.dtype, device: str | torch.device, quantize: str | None) -> Loaded:
    """`load`, with linear layers packed where that helps, or quantized. Such a model computes and cannot be trained.

    Raises:
        ConfigError, ModelError: as for `load`, and `bozza.models.packing.check_quantize`.
    """
    check_quantize(quantize, parse_device(device))
    loaded = load(name, dtype, device)
    return replace(loaded, weights=pack_model(loaded.model, quantize))


def load_target(
    model: Any,
    tokenizer: Any,
    dtype: str | torch.dtype,
    device: str | torch.device,
    quantize: str | None,
    compiled: bool = False,
) -> Loaded:
    """A model by name, packed, or one that is loaded already, as it is.

    Raises:
        ConfigError: an option would have no effect.
        ModelError: as for `load_packed`, or a named model has no tokenizer.
    """
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError("a tokenizer comes with a named model: drop tokenizer=, or give the loaded model")
        loaded = load_packed(model, dtype, device, quantize)
        if loaded.tokenizer is None:
            raise ModelError(f"{model} has no tokenizer beside it: save one there, or give a loaded model")
        return replace(loaded, compiled=compiled)
    if dtype != "auto" or device != "auto" or quantize is not None or compiled:
        raise ConfigError(
            "a loaded model stays as it is: drop dtype=, device=, quantize= and compile=, or name the model instead of "
            "loading it"
        )
    path = Path(getattr(model, "name_or_path", None) or "")
    return Loaded(model, tokenizer, path if (path / "config.json").exists() else None)


def _tokenizer(path: Path) -> Any:
    if not any((path / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(path)


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A torch dtype by name; "auto" is that of the checkpoint."""
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype '{dtype}': use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str | torch.device) -> torch.device:
    """A torch device; "auto" is a GPU when there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as problem:
        raise ConfigError(f"device '{device}': use auto, cpu, cuda or cuda:N") from problem
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{device}': torch sees no GPU here; use cpu")
    return chosen


def end_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, as transformers' generate takes them: from the generation config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
