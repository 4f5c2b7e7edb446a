"""Attention of one ragged pass: rows of different requests, lengths and shapes, against one key/value store.

A model runs over all tokens of a pass as one sequence; only attention knows that they belong to different requests.

With `equal_bits`, each token attends over a length that its own place decides (`padded_length`), never over one that
its neighbours need, and no tile has fewer than `LEAST` query rows. The fused CPU kernels then give a token the same
bits whether it is decoded alone, verified in a block or batched with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from bozza.errors import UnsupportedModel
from bozza.models.kvstore import KVStore, padded_length
from bozza.models.spans import Span

IMPLEMENTATION = "bozza_ragged"
SHORT = 32  # segments of at most this many tokens share one padded call
TILE = 32  # query rows that the fused CPU kernel takes at a time
LEAST = 4  # query rows of its last tile; below, matrix products take another path with other rounding
WASTE = 4.0  # a padded call may compute at most this many times the rows that it is for
REFUSED = ("position_bias", "indices", "block_indices")  # arguments that change attention in ways not written here


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens [low, high) of a span, all of which attend over the same padded length."""

    span: Span
    low: int
    high: int

    @property
    def count(self) -> int:
        return self.high - self.low

    @property
    def tokens(self) -> range:
        """Places in the pass."""
        return range(self.span.first + self.low, self.span.first + self.high)


class Group:
    """Segments that share one attention call over `length` keys, padded to `width` slots x `count` new tokens."""

    def __init__(self, segments: Sequence[Segment], length: int, device: torch.device, equal_bits: bool) -> None:
        slots = [segment.span.slot for segment in segments]
        self.segments = segments
        self.length = length
        self.slots = slice(min(slots), max(slots) + 1)
        self.width = self.slots.stop - self.slots.start
        self.count = max(segment.count for segment in segments)
        self._device = device
        self._equal_bits = equal_bits
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self.alone = self.width == 1
        if not self.alone:
            gather = torch.zeros(self.width, self.count, dtype=torch.int64)
            places: list[int] = []
            for segment in segments:
                line = segment.span.slot - self.slots.start
                gather[line, : segment.count] = torch.tensor(segment.tokens)
                places += range(line * self.count, line * self.count + segment.count)
            self.gather = gather.flatten().to(device)  # padded place -> token of the pass (any token where padding)
            self.places = torch.tensor(places, device=device)  # of each real token
            self.tokens = torch.tensor([token for segment in segments for token in segment.tokens], device=device)

    def padding(self, rows: int) -> int:
        """How many query rows a call of `rows` has to be filled up with."""
        last = rows % TILE
        return LEAST - last if self._equal_bits and 0 < last < LEAST else 0

    def mask(self, window: int | None, dtype: torch.dtype, repeat: int, padding: int) -> Tensor | None:
        """Additive mask [width, 1, rows, length] of `repeat` times the queries and `padding` rows that see everything.

        None when every query sees everything.
        """
        if window is not None and window >= self.length:
            window = None
        key = (window, dtype, repeat, padding)
        if key not in self._masks:
            self._masks[key] = self._build(*key)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype, repeat: int, padding: int) -> Tensor | None:
        # A single node that follows those of its tree that were fed before does not see its siblings among them.
        all_seen = self.count == 1 and all(
            s.span.start + s.high == self.length and not s.span.is_tree for s in self.segments
        )
        if window is None and all_seen and not self._equal_bits:  # a call without a mask may round otherwise
            return None
        place = torch.zeros(self.width, self.count, 1, dtype=torch.int64)
        for segment in self.segments:
            first = segment.span.start + segment.low
            place[segment.span.slot - self.slots.start, :, 0] = torch.arange(first, first + self.count)
        seen = torch.arange(self.length) <= place
        for segment in self.segments:
            span = segment.span
            if span.is_tree:
                own = span.ancestors()[segment.low : segment.high, : self.length - span.base]
                line = span.slot - self.slots.start
                seen[line, : segment.count, span.base : span.base + own.shape[1]] = own
        if window is not None:
            seen &= self._within(window, place[:, :, 0])
        mask = torch.zeros(self.width, 1, repeat * self.count + padding, self.length, dtype=dtype)
        mask[:, 0, : repeat * self.count].masked_fill_(~seen.repeat(1, repeat, 1), -torch.inf)
        return mask.to(self._device)

    def _within(self, window: int, query: Tensor) -> Tensor:
        """bool [width, count, length]: keys less than `window` positions behind the query."""
        key = torch.arange(self.length).repeat(self.width, 1)
        for segment in self.segments:
            span, line = segment.span, segment.span.slot - self.slots.start
            positions = torch.tensor(span.positions)
            key[line, span.base : span.end] = positions[: self.length - span.base]
            query[line, : segment.count] = positions[span.fed + segment.low : span.fed + segment.high]
        return key[:, None] > query[:, :, None] - window


class Pass:
    """One forward pass as attention sees it."""

    def __init__(self, store: KVStore, spans: Sequence[Span], device: torch.device, equal_bits: bool) -> None:
        self._store = store
        # Rows of the pass that belong to no span only fill it up: they are not stored, and attend to nothing.
        index = [store.flat_index(span.slot) + span.start + i for span in spans for i in range(span.count)]
        self._index = torch.tensor(index, device=device)
        calls = _calls_with_equal_bits(spans) if equal_bits else _calls(spans)
        self._groups = [Group(segments, length, device, equal_bits) for length, segments in calls]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Store this pass's keys and values, and attend; query [heads, tokens, size], result [tokens, heads, size]."""
        count = len(self._index)
        self._store.write(layer, self._index, key[:, :count], value[:, :count])
        if len(self._groups) == 1 and self._groups[0].alone and query.shape[1] == count:
            group = self._groups[0]
            keys, values = self._store.read(layer, group.slots, group.length)
            return _attend(query[None], keys, values, group, how)[0].transpose(0, 1)
        out = value.new_zeros(query.shape[1], query.shape[0], value.shape[2])
        for group in self._groups:
            keys, values = self._store.read(layer, group.slots, group.length)
            if group.alone:
                tokens = group.segments[0].tokens
                place = slice(tokens.start, tokens.stop)
                out[place] = _attend(query[None, :, place], keys, values, group, how)[0].transpose(0, 1)
            else:
                lines = query.transpose(0, 1)[group.gather].view(group.width, group.count, *query.shape[::2])
                result = _attend(lines.transpose(1, 2), keys, values, group, how).transpose(1, 2).flatten(0, 1)
                out[group.tokens] = result[group.places]
        return out


class How(NamedTuple):
    """What a model asks of its attention."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = How()


class Attends(Protocol):
    """What the layers of a model attend through."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """See `Pass.attend`."""
        ...


def _calls(spans: Sequence[Span]) -> Iterator[tuple[int, list[Segment]]]:
    """The segments of each attention call and how many keys it works through."""
    whole = [Segment(span, 0, span.count) for span in spans]
    short = [segment for segment in whole if segment.count <= SHORT]
    for segments in ([segment] for segment in whole if segment.count > SHORT):
        yield segments[0].span.end, segments
    if short:
        for segments in _together_or_not(short, [segment.span.end for segment in short]):
            yield max(segment.span.end for segment in segments), segments


def _calls_with_equal_bits(spans: Sequence[Span]) -> Iterator[tuple[int, list[Segment]]]:
    """`_calls`, with lengths that each token's own place decides."""
    short: dict[int, list[Segment]] = {}
    for span in spans:
        low = 0
        while low < span.count:
            length = padded_length(span.start + low + 1)
            segment = Segment(span, low, min(length - span.start, span.count))
            low = segment.high
            if segment.count > SHORT:
                yield length, [segment]
            else:
                short.setdefault(length, []).append(segment)
    for length, segments in short.items():
        yield from ((length, group) for group in _together_or_not(segments, [length] * len(segments)))


def _together_or_not(segments: list[Segment], lengths: Sequence[int]) -> list[list[Segment]]:
    """One padded call for all segments, or one for each if padding would waste too much."""
    slots = [segment.span.slot for segment in segments]
    counts = [segment.count for segment in segments]
    padded = (max(slots) - min(slots) + 1) * max(counts) * max(lengths)
    if padded <= WASTE * sum(count * length for count, length in zip(counts, lengths, strict=True)):
        return [segments]
    return [[segment] for segment in segments]


def _attend(query: Tensor, key: Tensor, value: Tensor, group: Group, how: How) -> Tensor:
    """Query [width, heads, count, size], key and value [width, kv heads, length, size]; the result is like query."""
    width, heads, count, size = query.shape
    # Heads that share keys become more query rows of one head, so that each key is read once.
    share = heads // key.shape[1]
    folded = query.reshape(width, key.shape[1], share * count, size)
    padding = group.padding(share * count)
    if padding:
        folded = functional.pad(folded, (0, 0, 0, padding))
    if how.softcap is None and how.sinks is None:
        mask = group.mask(how.window, query.dtype, share, padding)
        out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=how.scale)
    else:
        mask = group.mask(how.window, torch.float32, share, padding)
        out = _attend_plainly(folded, key, value, mask, how, count)
    if padding:
        out = out[:, :, : share * count]
    return out.reshape(width, heads, count, -1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How, count: int) -> Tensor:
    """Attention written out in float32, for what the fused kernel lacks: capped scores and attention sinks."""
    scale = how.scale if how.scale is not None else query.shape[3] ** -0.5
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    if how.sinks is None:
        weights = scores.softmax(dim=3)
    else:
        width, kv_heads, rows, _ = scores.shape
        sinks = how.sinks.float().repeat_interleave(count).view(1, kv_heads, -1, 1)
        sinks = functional.pad(sinks, (0, 0, 0, rows - sinks.shape[2])).expand(width, -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=3).softmax(dim=3)[..., :-1]
    return (weights @ value.float()).to(query.dtype)


_current: ContextVar[Attends] = ContextVar("bozza_pass")
torch.library.define(
    "bozza::attend",
    "(Tensor query, Tensor key, Tensor value, SymInt layer, float? scale, int? window, float? softcap, Tensor? sinks)"
    " -> Tensor",
)


def _attend_now(query: Tensor, key: Tensor, value: Tensor, layer: int, *how: Any) -> Tensor:
    """`Pass.attend` for compiled code."""
    return _current.get().attend(layer, query, key, value, How(*how)).contiguous()


def _attended_shape(query: Tensor, key: Tensor, value: Tensor, layer: int, *how: Any) -> Tensor:
    return value.new_empty(query.shape[1], query.shape[0], value.shape[2])


torch.library.impl("bozza::attend", "CPU", _attend_now)
torch.library.register_fake("bozza::attend", _attended_shape)


def is_ragged() -> bool:
    """Whether a ragged pass is going on."""
    return _current.get(None) is not None


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
    if torch.compiler.is_compiling():  # what follows has been looked at before (`bozza.models.compiling`)
        given = query[0], key[0], value[0], module.layer_idx
        return torch.ops.bozza.attend(*given, scaling, sliding_window, softcap, s_aux)[None], None
    if refused := [name for name in REFUSED if kwargs.get(name) is not None]:
        raise UnsupportedModel(f"it passes {refused[0]} to attention")
    if sliding_window is None and _declares_window(module):
        raise UnsupportedModel("it has a sliding window that it does not pass to attention")
    how = How(scaling, sliding_window, softcap, s_aux)
    return _current.get().attend(module.layer_idx, query[0], key[0], value[0], how)[None], None


def _declares_window(module: Any) -> bool:
    """Whether the configuration gives this layer a sliding window; some models express it in the mask alone."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return bool(layer_types[module.layer_idx] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


AttentionInterface.register(IMPLEMENTATION, _ragged_attention)


@contextmanager
def attending(configs: Sequence[Any], ragged: Attends) -> Iterator[None]:
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
