"""Which request each row of a call belongs to.

vLLM shows rows of tokens without names, and moves them: requests end, pause, come back and change places. A row goes on
a request when what stood before this step's tokens is, token for token, all that is known of the request. Rows are
tried at their old place first. A row that goes on nothing is a new request; a request that is not seen for `PATIENCE`
calls is gone (one that comes back later is a new one). Taking one request for another of the same text would do no
harm: it only guides guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bozza.core import Request
from bozza.params import SamplingParams

PATIENCE = 4  # calls; a request that finds no room in a pass is left out of it, and comes back soon
AHEAD = 4096  # tokens of output that an index is made for; vLLM does not say how many there will be
SPARE = 512  # tokens of output that fit before the copy of a text is made larger
PARAMS = SamplingParams()


class Seen(NamedTuple):
    """A row with new tokens."""

    request: Request
    tokens: list[int]  # of this step; they end `request.tokens`
    new: bool  # nothing was known of it before


class _Track:
    """A request and where it was."""

    __slots__ = ("idle", "known", "request", "row")

    def __init__(self, request: Request, row: int, tokens: Any) -> None:
        self.request = request
        self.row = row
        self.idle = 0
        self.known = np.empty(len(tokens) + SPARE, tokens.dtype)  # the same tokens, to compare them at once
        self.known[: len(tokens)] = tokens

    def goes_on(self, tokens: Any, before: int) -> bool:
        """Whether the first `before` of these tokens are all that is known."""
        if len(self.request.tokens) != before or self.known[before - 1] != tokens[before - 1]:
            return False
        return bool((self.known[:before] == tokens[:before]).all())

    def extend(self, row: int, tokens: list[int]) -> None:
        """Note what came next, and where the request is now."""
        length = len(self.request.tokens)
        if length + len(tokens) > len(self.known):
            self.known = np.concatenate((self.known, np.empty_like(self.known)))
        self.known[length : length + len(tokens)] = tokens
        self.request.tokens += tokens
        self.request.cached = len(self.request.tokens) - 1
        self.row, self.idle = row, 0


class Rows:
    """The requests in flight.

    Args:
        context: most tokens of a request.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._tracks: list[_Track] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._tracks)

    def follow(self, sampled: Sequence[Sequence[int]], lengths: Any, table: Any) -> list[Seen | None]:
        """Take in a step.

        Args:
            sampled: per row, what this step committed; empty where it only read a part of a prompt.
            lengths: per row, all its tokens, those of this step included.
            table: [rows, context] token ids, a numpy array.

        Returns:
            Per row the request, or None where nothing was committed.
        """
        seen: list[Seen | None] = [None] * len(sampled)
        places = {track.row: track for track in self._tracks}
        claimed: set[int] = set()
        moved: list[int] = []
        for row, tokens in enumerate(sampled):
            if not tokens:
                continue
            track = places.get(row)
            before = int(lengths[row]) - len(tokens)
            if track is not None and track.goes_on(table[row], before):
                seen[row] = self._advance(track, row, tokens, claimed)
            else:
                moved.append(row)
        if moved:
            self._find(moved, sampled, lengths, table, claimed, seen)
        for track in self._tracks:
            track.idle += track.request.id not in claimed
        return seen

    def drop(self) -> list[Request]:
        """Forget requests that are gone; returns them."""
        gone = [track.request for track in self._tracks if track.idle > PATIENCE]
        if gone:
            self._tracks = [track for track in self._tracks if track.idle <= PATIENCE]
        return gone

    def _find(
        self,
        moved: Sequence[int],
        sampled: Sequence[Sequence[int]],
        lengths: Any,
        table: Any,
        claimed: set[int],
        seen: list[Seen | None],
    ) -> None:
        """Rows that do not go on what was at their place before: moved requests, or new ones."""
        spare: dict[tuple[int, int], list[_Track]] = {}
        for track in self._tracks:
            if track.request.id not in claimed:
                tokens = track.request.tokens
                spare.setdefault((len(tokens), tokens[-1]), []).append(track)
        for row in moved:
            before = int(lengths[row]) - len(sampled[row])
            rivals = spare.get((before, int(table[row, before - 1])), []) if before else []
            found = next((rival for rival in rivals if rival.goes_on(table[row], before)), None)
            if found is None:
                seen[row] = self._start(row, sampled[row], table[row, : before + len(sampled[row])], claimed)
            else:
                seen[row] = self._advance(found, row, sampled[row], claimed)

    def _advance(self, track: _Track, row: int, tokens: Sequence[int], claimed: set[int]) -> Seen:
        mine = list(tokens)
        track.extend(row, mine)
        claimed.add(track.request.id)
        return Seen(track.request, mine, False)

    def _start(self, row: int, tokens: Sequence[int], text: Any, claimed: set[int]) -> Seen:
        """A new request: what stood before this step's tokens counts as its prompt."""
        known = text.tolist()
        request = Request(
            self._next_id,
            known,
            len(known) - len(tokens),
            PARAMS,
            0,
            frozenset(),
            min(self._context, len(known) + AHEAD),
            cached=len(known) - 1,
        )
        self._next_id += 1
        self._tracks.append(_Track(request, row, text))
        claimed.add(request.id)
        return Seen(request, list(tokens), True)
