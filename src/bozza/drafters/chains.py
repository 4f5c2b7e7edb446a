"""Where short token sequences occurred: an index made of plain arrays.

The places in a text that come after the same 1, 2, 4 or 8 tokens are linked, the latest first, and found by a hash of
these tokens. Places whose hashes collide share a chain, so what is found is compared. No chain is walked further than
`STEPS`: what hides behind a much more frequent sequence in the same chain is missed, which costs a guess and no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

ORDERS = (1, 2, 4, 8)  # how many last tokens are looked up
TOPS = (1, 3, 7, 64)  # most tokens that can agree when no longer order is known
LONGEST = TOPS[-1]  # tokens compared backwards
RECENT = 8  # occurrences taken of a sequence
STEPS = 64  # links followed for them

Tokens: TypeAlias = "list[int] | array[int]"  # a slice of one kind never equals one of the other


class Occurrence(NamedTuple):
    """A place in a text: the tokens before `end` agree with what is looked for, `match` of them."""

    text: Tokens
    end: int
    match: int
    own: bool = False  # the text is the one that is continued: a copy that reaches its end repeats
    entry: bytes | None = None  # the text is this one of a history

    def ahead(self, length: int) -> list[int]:
        """The next `length` tokens; fewer where the text ends."""
        copied = list(self.text[self.end : self.end + length])
        if self.own and 0 < len(copied) < length:
            copied *= -(-length // len(copied))
            del copied[length:]
        return copied


class Chains:
    """Links places (small numbers that the owner gives out) by the tokens before them.

    Memory: 4 bytes for each order and place, 4 more if places can be taken out again, and 4 for each order and head.
    There are as many heads as places are expected, rounded up to a power of two: 32 to 48 bytes per place together,
    48 to 64 for removable ones.

    Args:
        expected: about how many places there will be; more only make the chains longer.
        removable: whether `unlink` will be called.
    """

    def __init__(self, expected: int, removable: bool = False) -> None:
        size = 1 << max(0, expected - 1).bit_length()
        self._mask = size - 1
        self._heads = [array("i", [-1]) * size for _ in ORDERS]
        self._older = [array("i") for _ in ORDERS]
        self._newer = [array("i") for _ in ORDERS] if removable else []

    def grow(self, places: int) -> None:
        """Make room for places up to, not including, this one."""
        for links in (*self._older, *self._newer):
            links.extend(array("i", [-1]) * (places - len(links)))

    def link(self, place: int, before: tuple[int, ...]) -> None:
        """Enter a place that comes after these tokens; of more than 8 the last ones count."""
        count, mask, newer = len(before), self._mask, self._newer
        for level, (order, heads, older) in enumerate(zip(ORDERS, self._heads, self._older, strict=True)):
            if order > count:
                break
            head = hash(before[-order:]) & mask
            last = older[place] = heads[head]
            heads[head] = place
            if newer:
                newer[level][place] = -1
                if last >= 0:
                    newer[level][last] = place

    def unlink(self, place: int, before: tuple[int, ...]) -> None:
        """Take out a place that was entered with these tokens."""
        for level, order in enumerate(ORDERS):
            if order > len(before):
                break
            older, newer = self._older[level], self._newer[level]
            before_it, after_it = older[place], newer[place]
            if after_it >= 0:
                older[after_it] = before_it
            else:
                self._heads[level][hash(before[-order:]) & self._mask] = before_it
            if before_it >= 0:
                newer[before_it] = after_it

    def find(
        self,
        tail: Tokens,
        where: Callable[[int], tuple[Tokens, int, bytes | None]],
        least: int = 1,
        own: bool = False,
    ) -> list[Occurrence]:
        """Up to `RECENT` places after the longest known end of a text, the latest first.

        Args:
            tail: the last `LONGEST` tokens of the text, of the kind that the indexed texts are.
            where: a place's text, its position there, and the entry of a history that it belongs to.
            least: shorter matches than this are not wanted.
            own: the text is the one that is indexed.
        """
        for level in reversed(range(len(ORDERS))):
            order, top = ORDERS[level], min(TOPS[level], len(tail))
            if top < least:
                break
            if order > top:
                continue
            wanted = tail[-order:]
            found: list[Occurrence] = []
            for place in self._chain(level, tuple(wanted)):
                text, end, entry = where(place)
                if text[end - order : end] == wanted:
                    found.append(Occurrence(text, end, _match(tail, text, end, order, top), own, entry))
                    if len(found) == RECENT:
                        break
            if found:
                return found
        return []

    def _chain(self, level: int, key: tuple[int, ...]) -> Iterator[int]:
        older = self._older[level]
        place = self._heads[level][hash(key) & self._mask]
        for _ in range(STEPS):
            if place < 0:
                return
            yield place
            place = older[place]


def before(text: Sequence[int], end: int) -> tuple[int, ...]:
    """The tokens before a position that an index looks at."""
    return tuple(text[max(0, end - ORDERS[-1]) : end])


def _match(tail: Tokens, text: Tokens, end: int, known: int, top: int) -> int:
    """How many tokens before `end` in `text` agree with the end of `tail`: at least `known` do; `top` are enough."""
    last = len(tail)
    most = min(top, end)
    if text[end - most : end - known] == tail[last - most : last - known]:
        return most
    while most - known > 1:  # `known` agree, `most` do not
        middle = (known + most) // 2
        if text[end - middle : end - known] == tail[last - middle : last - known]:
            known = middle
        else:
            most = middle
    return known
