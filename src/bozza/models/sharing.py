"""Linear layers that are given the same input are computed as one product, for any architecture.

Which ones these are (query, key and value; gate and up) is seen in a short pass, not known by name. A layer that is
given another input than its neighbours computes alone, so a wrong guess costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bozza.errors import ModelError
from bozza.models.products import Product


class Shared:
    """The product of some layers with their common input, kept until the last of them has taken its part."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self.product = product
        self._sizes = list(sizes)
        self._held: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor:
        """The result of layer `index`."""
        if len(self._sizes) == 1:
            return self.product(x)
        held = self._held
        if index == 0 or held is None or held[0] is not x:  # by reference, so no other tensor can be taken for it
            held = self._held = (x, torch.split(self.product(x), self._sizes, dim=-1))
        if index == len(self._sizes) - 1:
            self._held = None
        return held[1][index]

    def weight(self, index: int) -> Tensor:
        """The weight [out, in] of layer `index`."""
        return torch.split(self.product.weight(), self._sizes)[index]


class PackedLinear(nn.Module):
    """Stands where a `Linear` stood; `weight` is unpacked each time it is asked for."""

    def __init__(self, shared: Shared, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._shared, self._index = shared, index

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self._shared.part(self._index, input)

    @property
    def product(self) -> Product:
        """That of all layers which share its input."""
        return self._shared.product

    @property
    def weight(self) -> Tensor:
        """[out, in], as it is computed with."""
        return self._shared.weight(self._index)

    def extra_repr(self) -> str:
        """As of `Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError("packed weights cannot be saved: load the model with transformers to write it anew")


@torch.inference_mode()
def seen_together(model: Any, names: Sequence[str]) -> list[list[str]]:
    """The named linear layers in groups: one after the other given the same, unchanged tensor by a forward pass."""
    calls: list[tuple[str, Any, Tensor, Tensor]] = []  # name, layer, its input, and what was in it then

    def noting(name: str, layer: Any) -> Any:
        return lambda _, given: calls.append((name, layer, given[0], given[0].clone()))

    layers = {name: model.get_submodule(name) for name in names}
    hooks = [layer.register_forward_pre_hook(noting(name, layer)) for name, layer in layers.items()]
    try:
        model(input_ids=torch.arange(1, 9)[None], use_cache=False)  # not all of them can be padding, which may be zeros
    finally:
        for hook in hooks:
            hook.remove()
    once = {name for name in names if sum(call[0] == name for call in calls) == 1}
    groups: list[list[str]] = [[calls[0][0]]] if calls else []
    for (_, before, given, content), (name, layer, x, now) in pairwise(calls):
        alike = (layer.bias is None) == (before.bias is None)
        if alike and x is given and torch.equal(content, now) and {name, groups[-1][-1]} <= once:
            groups[-1].append(name)
        else:
            groups.append([name])
    called = {name for group in groups for name in group}
    return [group for group in groups if set(group) <= once] + [[name] for name in names if name not in called & once]
