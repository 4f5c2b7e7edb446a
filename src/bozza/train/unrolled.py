"""A head run as it will be used: first on the target's features, then on its own output, several steps in a row.

In step j, slot s holds what the head would compute there if the target had last read token s - j: it sees the slots up
to s - j of step 0, and of each step i since then the slot s - j + i (training-time test, Li et al., 2025, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bozza.models.eagle import EagleHead

BLOCK = 64


def unroll(head: EagleHead, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The head's outputs [sequences, length, size] in each step; in step j, slots below j mean nothing.

    Args:
        head: the head.
        ids: [sequences, length], the token after each slot.
        features: [sequences, length, layers * target size].
        steps: how many.
    """
    count, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(count)
    memory = _Memory(count, length, len(head.layers), ids.device)
    hidden = head.fuse(features)
    outputs = []
    for step in range(steps):
        memory.begin(step)
        hidden = head(ids.flatten(), hidden.flatten(0, 1), positions, memory.attend).view(count, length, -1)
        outputs.append(hidden)
        hidden = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
    return outputs


class _Memory:
    """Keys and values of all steps so far. Slots attend in blocks, so that little is computed only to be masked."""

    def __init__(self, count: int, length: int, layers: int, device: torch.device) -> None:
        self._count, self._length, self._device = count, length, device
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(layers)]
        self._masks: list[Tensor] = []

    def begin(self, step: int) -> None:
        """The masks of a step, one for each block: slots of the block x what `_seen` leaves of all steps."""
        self._masks = []
        for low in range(0, self._length, BLOCK):
            high = min(low + BLOCK, self._length)
            slot = torch.arange(low, high)[:, None]
            parts = [torch.arange(high)[None] <= slot - step]
            near = torch.arange(max(low - step, 0), high)[None]
            parts += [near == slot - step + earlier for earlier in range(1, step + 1)]
            mask = torch.cat(parts, dim=1)
            mask[slot[:, 0] < step, 0] = True  # slots that mean nothing must see something, or they become NaN
            self._masks.append(mask.to(self._device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `bozza.models.eagle.Attend`."""
        share = query.shape[0] // key.shape[0]
        lines, keys, values = (self._lines(part) for part in (query, key, value))
        self._keys[layer].append(keys.repeat_interleave(share, dim=1))
        self._values[layer].append(values.repeat_interleave(share, dim=1))
        blocks = []
        for low, mask in zip(range(0, self._length, BLOCK), self._masks, strict=True):
            blocks.append(
                functional.scaled_dot_product_attention(
                    lines[:, :, low : low + BLOCK], _seen(self._keys[layer], low), _seen(self._values[layer], low), mask
                )
            )
        return torch.cat(blocks, dim=2).transpose(1, 2).flatten(0, 1)

    def _lines(self, part: Tensor) -> Tensor:
        """[heads, sequences * length, size] -> [sequences, heads, length, size]."""
        heads, _, size = part.shape
        return part.reshape(heads, self._count, self._length, size).transpose(0, 1)


def _seen(steps: list[Tensor], low: int) -> Tensor:
    """Of step 0 all up to the block that begins at `low`; of later steps what lies in it or at most a step before."""
    step = len(steps) - 1
    near = [later[:, :, max(low - step, 0) : low + BLOCK] for later in steps[1:]]
    return torch.cat([steps[0][:, :, : low + BLOCK], *near], dim=2)
