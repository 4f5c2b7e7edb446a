"""Copy what followed the last time the text ended like this (prompt lookup).

The longest suffix of at most `max_n` tokens that occurred before decides; of its occurrences the most recent one. The
index is a table from n-gram hashes to the position that followed, updated with a constant number of entries per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from bozza.core import NO_DRAFT, Draft, Request
from bozza.errors import ConfigError

MIN_N, MAX_N = 1, 8  # default sizes
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 61) - 1


def check_sizes(min_n: int, max_n: int) -> None:
    """Refuse sizes of n-grams that make no sense.

    Raises:
        ConfigError: they are out of range.
    """
    if not 1 <= min_n <= max_n <= 64:
        raise ConfigError(f"ngram: min={min_n}, max={max_n}: use 1 <= min <= max <= 64")


class NgramIndex:
    """Where each n-gram of a growing text was seen last, for n from `min_n` to `max_n`.

    Holds `max_n - min_n + 1` table entries (about 100 bytes each) per token of text.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._tokens: list[int] = []
        self._next: dict[int, int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram enters the index once the token after it is known."""
        text, following = self._tokens, self._next
        for token in tokens:
            end = len(text)
            for key in self._keys():
                following[key] = end
            text.append(token)

    def continuation(self, length: int) -> list[int]:
        """`length` tokens that followed the longest known suffix, or nothing; a copy that meets its own end repeats."""
        text = self._tokens
        for n, key in reversed(list(enumerate(self._keys(), self.min_n))):
            start = self._next.get(key)
            # Compared, since two n-grams may share a hash.
            if start is not None and text[start - n : start] == text[-n:]:
                period = len(text) - start
                copied = text[start : start + length]
                return [copied[i % period] for i in range(length)]
        return []

    def _keys(self) -> list[int]:
        """Hashes of the text's last n tokens, n from min_n up to max_n or the text's length."""
        text = self._tokens
        keys: list[int] = []
        key = 0
        for n in range(1, min(self.max_n, len(text)) + 1):
            key = ((key + text[-n] + 1) * _BASE) & _MASK
            key ^= key >> 29
            if n >= self.min_n:
                keys.append(key)
        return keys


class NgramDrafter:
    """Drafts a chain from the request's own prompt and output. Costs microseconds and knows no other request.

    Args:
        min_n: shortest suffix that is trusted, in tokens.
        max_n: longest suffix that is looked up.

    Raises:
        ConfigError: the sizes are out of range.
    """

    def __init__(self, min_n: int = MIN_N, max_n: int = MAX_N, name: str = "ngram") -> None:
        check_sizes(min_n, max_n)
        self.name = name
        self._sizes = (min_n, max_n)
        self._indices: dict[int, NgramIndex] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        index = NgramIndex(*self._sizes)
        index.extend(request.tokens)
        self._indices[request.id] = index

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`."""
        self._indices[request.id].extend(tokens)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            tokens = self._indices[request.id].continuation(budget)
            drafts.append(Draft.chain(tokens, self.name) if tokens else NO_DRAFT)
        return drafts

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        self._indices.pop(request.id, None)
