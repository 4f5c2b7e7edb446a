"""Keys and values of every layer, in slots of equal capacity: slot s holds the tokens of one request at [s, :length].

Rolling back is a smaller length: nothing is erased, the next write goes over it. Keys are stored as the model made
them, already rotated to their positions, so they may be moved within a slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor


def padded_length(tokens: int) -> int:
    """How many keys attention works through for a token that sees `tokens`: multiples of 128 up to 512, then of 512.

    Blocks of 512 keys are what the fused CPU kernel works in; shorter ones save time where there is little to see.
    """
    block = 128 if tokens <= 512 else 512
    return -(-tokens // block) * block


class KVStore:
    """Grows by doubling, in slots and in tokens per slot. Layers appear as they are first written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = 0
        self._capacity = 0
        self._free: list[int] = []
        self._lengths: list[int] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # each [slots, capacity, heads, head size]
        self._flat: dict[int, tuple[Tensor, Tensor]] = {}  # the same memory, [slots * capacity, heads, head size]

    @property
    def layers(self) -> int:
        """How many layers have been written."""
        return len(self._layers)

    def alloc(self) -> int:
        """A free slot, the lowest one, so that slots in use stay close together."""
        if not self._free:
            self._grow(max(1, 2 * self._slots), self._capacity)
        slot = heapq.heappop(self._free)
        self._lengths[slot] = 0
        for pair in self._layers.values():
            for tensor in pair:
                tensor[slot].zero_()  # a number that is not one, left by an overflow, would outlive its request
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._lengths[slot] = 0
        heapq.heappush(self._free, slot)

    def length(self, slot: int) -> int:
        """How many tokens the slot holds."""
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._lengths[slot] = length

    def append(self, slot: int, tokens: int) -> int:
        """Make room for `tokens` more, count them as held, and return where in the slot they go."""
        start = self._lengths[slot]
        if start + tokens > self._capacity:
            self._grow(self._slots, padded_length(max(start + tokens, 2 * self._capacity)))
        self._lengths[slot] = start + tokens
        return start

    def flat_index(self, slot: int) -> int:
        """Where the slot begins when slots and tokens are counted as one dimension."""
        return slot * self._capacity

    def flat(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each [slots * capacity, heads, size]; made if need be, for [heads, _, size]."""
        if layer not in self._layers:
            self._hold(layer, self._empty(key), self._empty(value))
        return self._flat[layer]

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key and value [heads, tokens, head size] at flat positions `index`."""
        keys, values = self.flat(layer, key, value)
        keys.index_copy_(0, index, key.transpose(0, 1))
        values.index_copy_(0, index, value.transpose(0, 1))

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Views [slots, heads, length, head size] of a layer's keys and values."""
        keys, values = self._layers[layer]
        return keys[slots, :length].transpose(1, 2), values[slots, :length].transpose(1, 2)

    def keep(self, slot: int, base: int, kept: Sequence[int]) -> None:
        """Of the tokens after `base`, keep those at the rising offsets `kept`, moved together, and forget the rest."""
        moved = [(offset, place) for place, offset in enumerate(kept) if offset != place]
        if moved:
            source = torch.tensor([base + offset for offset, _ in moved], device=self._device)
            target = torch.tensor([base + place for _, place in moved], device=self._device)
            for pair in self._layers.values():
                for tensor in pair:
                    tensor[slot].index_copy_(0, target, tensor[slot].index_select(0, source))
        self._lengths[slot] = base + len(kept)

    def _hold(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._layers[layer] = (keys, values)
        self._flat[layer] = (keys.flatten(0, 1), values.flatten(0, 1))

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: a masked position still takes part in 0 * value, and garbage may be NaN.
        return like.new_zeros(self._slots, self._capacity, *like.shape[::2])

    def _grow(self, slots: int, capacity: int) -> None:
        # All of the new memory is there before anything changes: running out of it leaves the store as it was.
        grown = {
            layer: tuple(old.new_zeros(slots, capacity, *old.shape[2:]) for old in pair)
            for layer, pair in self._layers.items()
        }
        for layer, (keys, values) in grown.items():
            for new, old in zip((keys, values), self._layers[layer], strict=True):
                new[: self._slots, : self._capacity] = old
            self._hold(layer, keys, values)
        self._lengths.extend([0] * (slots - self._slots))
        for slot in range(self._slots, slots):
            heapq.heappush(self._free, slot)
        self._slots, self._capacity = slots, capacity
