"""The linear layers of a model that Bozza loaded itself, replaced by packed or quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bozza.errors import ConfigError, ModelError
from bozza.models.products import Int8Product, PackedProduct, int8_works, packing_works
from bozza.models.sharing import PackedLinear, Shared, seen_together

QUANTIZED = ("int8",)
COPY = 0.25  # of a model's bytes: most that a second, packed copy of weights may take that something else uses too


def check_quantize(quantize: str | None, device: torch.device | None = None) -> None:
    """Refuse what does not exist, or not here.

    Raises:
        ConfigError: no such precision.
        ModelError: it does not run on this device or processor.
    """
    if quantize is None:
        return
    if quantize not in QUANTIZED:
        raise ConfigError(f"quantize '{quantize}': use {', '.join(QUANTIZED)}, or leave it out")
    if device is None:
        return
    if device.type != "cpu":
        raise ModelError(f"quantize {quantize} is for CPUs, the model is on {device}: drop it, or use device cpu")
    if not int8_works():
        raise ModelError(
            "quantize int8 needs a processor with VNNI or AMX instructions, this one would be slower than in "
            "bfloat16: drop it"
        )


def pack_model(model: Any, quantize: str | None = None) -> str:
    """Pack the linear layers of a transformers model where that helps: on a CPU, in bfloat16. Others stay as they are.

    Returns "int8", "packed", or "plain" where nothing was done.

    Args:
        model: in evaluation mode; its layers are replaced, one by one, so that two copies are never held.
        quantize: "int8", or None for the same bits as before.

    Raises:
        ModelError: as for `check_quantize`, or the model is in another dtype than bfloat16.
    """
    check_quantize(quantize, model.device)
    if quantize is not None and model.dtype != torch.bfloat16:
        raise ModelError(f"quantize {quantize} computes around the products in bfloat16: use dtype bfloat16")
    names = linears(model, 0.5 if quantize else 1.0)
    if not names or (quantize is None and not packing_works()):
        return "plain"
    try:
        groups = seen_together(model, names)
    except Exception:  # of unknown modelling code; the probe will say what is wrong with it
        groups = [[name] for name in names]
    pack(model, groups, Int8Product if quantize else PackedProduct)
    return quantize or "packed"


def pack_alone(module: nn.Module) -> None:
    """Quantize or else pack the linear layers of a drafter's own module where that helps, each by itself.

    What it guesses is checked, so it need not be exact, and 8 bits are read in half the time.
    """
    kind = Int8Product if int8_works() else PackedProduct
    names = linears(module, 0.5 if kind is Int8Product else 1.0)
    if names and (kind is Int8Product or packing_works()):
        pack(module, [[name] for name in names], kind)


def linears(module: nn.Module, size: float = 1.0) -> list[str]:
    """Names of the layers that can be packed; `size` is that of packed weights, as a part of the present one."""
    whole = sum(parameter.nbytes for parameter in module.parameters())
    users: dict[int, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return [
        name
        for name, each in module.named_modules()
        if type(each) is nn.Linear
        and each.weight.device.type == "cpu"
        and each.weight.dtype == torch.bfloat16
        and (users[id(each.weight)] == 1 or size * each.weight.nbytes <= COPY * whole)
    ]


def pack(module: nn.Module, groups: Sequence[Sequence[str]], kind: type[PackedProduct] | type[Int8Product]) -> None:
    """Replace each group of layers, which share an input, by parts of one product."""
    aliases: dict[Any, list[str]] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        aliases.setdefault(each, []).append(name)
    also = {names[0]: names for names in aliases.values()}
    del aliases
    for group in groups:
        layers: list[Any] = [module.get_submodule(name) for name in group]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        product = kind([layer.weight for layer in layers], torch.cat(biases) if biases else None)
        shared = Shared(product, [layer.out_features for layer in layers])
        for index, (name, layer) in enumerate(zip(group, layers, strict=True)):
            packed = PackedLinear(shared, index, layer)
            for each_name in also[name]:
                module.set_submodule(each_name, packed)
        del layers, layer
