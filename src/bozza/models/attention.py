"""Attention of one ragged pass: rows of different requests, lengths and shapes, against one key/value store.

A model runs over all tokens of a pass as one sequence; only attention knows that they belong to different requests.
Rows that bring few tokens (decoding, verification) are padded into one call; prompt chunks get a call each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from bozza.errors import UnsupportedModel
from bozza.models.kvstore import KVStore

IMPLEMENTATION = "bozza_ragged"
SHORT = 32  # rows of at most this many tokens share one padded call
WASTE = 2.0  # a padded call may do at most this many times the work of separate ones
REFUSED = ("position_bias", "indices", "block_indices")  # arguments that change attention in ways not written here


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a pass: `count` tokens at [first, first + count) of the pass, after `start` cached ones in `slot`."""

    slot: int
    start: int
    first: int
    count: int
    chain: int  # leading tokens in a line; the rest are draft nodes
    parents: tuple[int, ...]  # of the draft nodes; -1 is the last token of the line
    depths: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_tree(self) -> bool:
        return any(parent != node - 1 for node, parent in enumerate(self.parents))

    @property
    def positions(self) -> list[int]:
        """Position of each token: siblings share one."""
        last = self.start + self.chain - 1
        return [*range(self.start, last + 1), *(last + depth for depth in self.depths)]

    def ancestors(self) -> Tensor:
        """bool [count, count]: which of the row's own tokens each of them sees."""
        seen = torch.ones(self.count, self.count, dtype=torch.bool).tril_()
        for node, parent in enumerate(self.parents):
            row = self.chain + node
            seen[row, self.chain :] = False
            if parent >= 0:
                seen[row] |= seen[self.chain + parent]
            seen[row, row] = True
        return seen


class Group:
    """Spans that share one attention call, padded to the slots [slots.start, slots.stop) x `count` new tokens."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = sorted(spans, key=lambda span: span.slot)
        self.slots = slice(self.spans[0].slot, self.spans[-1].slot + 1)
        self.width = self.slots.stop - self.slots.start
        self.count = max(span.count for span in spans)
        self.length = max(span.end for span in spans)
        self._device = device
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self.alone = self.width == 1
        if not self.alone:
            gather = torch.zeros(self.width, self.count, dtype=torch.int64)
            places: list[int] = []
            tokens: list[int] = []
            for span in self.spans:
                line = span.slot - self.slots.start
                gather[line, : span.count] = torch.arange(span.first, span.first + span.count)
                places += range(line * self.count, line * self.count + span.count)
                tokens += range(span.first, span.first + span.count)
            self.gather = gather.flatten().to(device)  # padded place -> token of the pass (any token where padding)
            self.places = torch.tensor(places, device=device)  # of each real token
            self.tokens = torch.tensor(tokens, device=device)

    @property
    def causal_from_zero(self) -> bool:
        """One prompt chunk at the very beginning: plain causal attention, no mask needed."""
        return self.alone and self.spans[0].start == 0 and not self.spans[0].is_tree

    def mask(self, window: int | None, dtype: torch.dtype, repeat: int) -> Tensor | None:
        """Additive mask [width, 1, repeat * count, length], or None when every token sees everything."""
        if window is not None and window >= self.length:
            window = None
        key = (window, dtype, repeat)
        if key not in self._masks:
            self._masks[key] = self._build(window, dtype, repeat)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype, repeat: int) -> Tensor | None:
        if window is None and self.count == 1 and all(span.end == self.length for span in self.spans):
            return None
        starts = torch.zeros(self.width, 1, 1, dtype=torch.int64)
        for span in self.spans:
            starts[span.slot - self.slots.start] = span.start
        held = torch.arange(self.length)
        seen = held <= starts + torch.arange(self.count)[:, None]
        for span in self.spans:
            if span.is_tree:
                seen[span.slot - self.slots.start, : span.count, span.start : span.end] = span.ancestors()
        if window is not None:
            seen &= self._within(window, starts)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return mask.repeat(1, repeat, 1)[:, None].to(self._device)

    def _within(self, window: int, starts: Tensor) -> Tensor:
        """bool [width, count, length]: keys less than `window` positions behind the query."""
        key = torch.arange(self.length).repeat(self.width, 1)
        query = (starts + torch.arange(self.count)[:, None])[:, :, 0]
        for span in self.spans:
            line, positions = span.slot - self.slots.start, torch.tensor(span.positions)
            key[line, span.start : span.end] = positions
            query[line, : span.count] = positions
        return key[:, None] > query[:, :, None] - window


class Pass:
    """One forward pass as attention sees it."""

    def __init__(self, store: KVStore, spans: Sequence[Span], device: torch.device) -> None:
        self._store = store
        index = [store.flat_index(span.slot) + span.start + i for span in spans for i in range(span.count)]
        self._index = torch.tensor(index, device=device)
        self._groups = [Group(members, device) for members in _grouped(spans)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        """Store this pass's keys and values, and attend; query [heads, tokens, size], result [tokens, heads, size]."""
        self._store.write(layer, self._index, key.transpose(0, 1), value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for group in self._groups:
            keys, values = self._store.read(layer, group.slots, group.length)
            if group.alone:
                tokens = slice(group.spans[0].first, group.spans[0].first + group.count)
                out[tokens] = _attend(query[None, :, tokens], keys, values, group, how)[0].transpose(0, 1)
            else:
                lines = query.transpose(0, 1)[group.gather].view(group.width, group.count, *query.shape[::2])
                result = _attend(lines.transpose(1, 2), keys, values, group, how).transpose(1, 2).flatten(0, 1)
                out[group.tokens] = result[group.places]
        return out


@dataclass(frozen=True, slots=True)
class _How:
    """What a model asks of its attention."""

    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _grouped(spans: Sequence[Span]) -> Iterator[list[Span]]:
    short = [span for span in spans if span.count <= SHORT]
    yield from ([span] for span in spans if span.count > SHORT)
    if not short:
        return
    slots = [span.slot for span in short]
    padded = (max(slots) - min(slots) + 1) * max(s.count for s in short) * max(s.end for s in short)
    if padded <= WASTE * sum(span.count * span.end for span in short):
        yield short
    else:
        yield from ([span] for span in short)


def _attend(query: Tensor, key: Tensor, value: Tensor, group: Group, how: _How) -> Tensor:
    """Query [width, heads, count, size], key and value [width, kv heads, length, size]; the result is like query."""
    width, heads, count, size = query.shape
    share = heads // key.shape[1]  # query heads per key/value head
    if how.softcap is not None or how.sinks is not None:
        return _attend_plainly(query, key, value, group.mask(how.window, torch.float32, 1), how)
    if group.causal_from_zero and count > 1 and (how.window is None or how.window >= count):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=how.scale, enable_gqa=share > 1
        )
    if count > SHORT or share == 1:
        mask = group.mask(how.window, query.dtype, 1)
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=how.scale, enable_gqa=share > 1)
    # Heads that share keys become more query rows of one head: each key is read once.
    folded = query.reshape(width, key.shape[1], share * count, size)
    mask = group.mask(how.window, query.dtype, share)
    out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=how.scale)
    return out.view(width, heads, count, -1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How) -> Tensor:
    """Attention written out in float32, for what the fused kernel lacks: capped scores and attention sinks."""
    share = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(share, dim=1) for tensor in (key, value))
    scores = query.float() @ key.transpose(2, 3) * (how.scale if how.scale is not None else query.shape[3] ** -0.5)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    if how.sinks is None:
        weights = scores.softmax(dim=3)
    else:
        sinks = how.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], dim=3).softmax(dim=3)[..., :-1]
    return (weights @ value).to(query.dtype)


_current: ContextVar[Pass] = ContextVar("bozza_pass")


def _ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer; query [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    if refused := [name for name in REFUSED if kwargs.get(name) is not None]:
        raise UnsupportedModel(f"{type(module).__name__} passes {refused[0]} to attention, which cannot run ragged")
    how = _How(scaling, sliding_window, softcap, s_aux)
    return _current.get().attend(module.layer_idx, query[0], key[0], value[0], how)[None], None


AttentionInterface.register(IMPLEMENTATION, _ragged_attention)


@contextmanager
def attending(configs: Sequence[Any], ragged: Pass) -> Iterator[None]:
    """Within, models with these configurations attend as `ragged` says; afterwards they are as they were before."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = IMPLEMENTATION
    token = _current.set(ragged)
    try:
        yield
    finally:
        _current.reset(token)
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
