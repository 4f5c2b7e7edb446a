"""A head run as it will be used: first on the target's features, then on its own output, several steps in a row.

In step j, slot s holds what the head would compute there if the target had last read token s - j: it sees the slots up
to s - j of step 0, and of each step i since then the slot s - j + i (training-time test, Li et al., 2025, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bozza.models.eagle import EagleHead


def unroll(head: EagleHead, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The head's outputs [sequences, length, size] in each step; in step j, slots below j mean nothing.

    Args:
        head: the head.
        ids: [sequences, length], the token after each slot.
        features: [sequences, length, layers * target size].
        steps: how many.
    """
    count, length = ids.shape
    positions = torch.arange(length).repeat(count)
    memory = _Memory(count, length, len(head.layers))
    hidden = head.fuse(features)
    outputs = []
    for step in range(steps):
        memory.begin(step)
        hidden = head(ids.flatten(), hidden.flatten(0, 1), positions, memory.attend).view(count, length, -1)
        outputs.append(hidden)
        hidden = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
    return outputs


class _Memory:
    """Keys and values of all steps so far."""

    def __init__(self, count: int, length: int, layers: int) -> None:
        self._count, self._length = count, length
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(layers)]
        self._mask: Tensor | None = None

    def begin(self, step: int) -> None:
        """The mask [length, (step + 1) * length] of a step."""
        slot = torch.arange(self._length)
        parts = [slot[None] <= slot[:, None] - step]
        parts += [slot[None] == slot[:, None] - step + earlier for earlier in range(1, step + 1)]
        self._mask = torch.cat(parts, dim=1)
        self._mask[:step, 0] = True  # slots that mean nothing must see something, or they become NaN

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `bozza.models.eagle.Attend`."""
        share = query.shape[0] // key.shape[0]
        lines, keys, values = (self._lines(part) for part in (query, key, value))
        self._keys[layer].append(keys.repeat_interleave(share, dim=1))
        self._values[layer].append(values.repeat_interleave(share, dim=1))
        out = functional.scaled_dot_product_attention(
            lines, torch.cat(self._keys[layer], dim=2), torch.cat(self._values[layer], dim=2), self._mask
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _lines(self, part: Tensor) -> Tensor:
        """[heads, sequences * length, size] -> [sequences, heads, length, size]."""
        heads, _, size = part.shape
        return part.reshape(heads, self._count, self._length, size).transpose(0, 1)
