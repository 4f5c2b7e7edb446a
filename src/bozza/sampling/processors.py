"""What changes logits before they become a law, at any place of a draft: bias, penalties, bans, processors, grammars.

Meanings and order are transformers' own (bias, repetition penalty, bans, custom processors), with the OpenAI API's
presence and frequency penalties after the repetition penalty. Penalties touch only tokens that occurred, so they are
gathered for all rows at once instead of row by row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from bozza.core import Request


class Place(NamedTuple):
    """Where a token is due: after what the request has committed, then `path`."""

    request: Request
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Index of the due token in the output."""
        return self.request.output_len + len(self.path)

    def context(self) -> list[int]:
        """All tokens before the due one."""
        return [*self.request.tokens, *self.path]


class History:
    """The distinct tokens of a request and how often each is in its output. Grows with the request."""

    def __init__(self) -> None:
        self._read = 0
        self.index: dict[int, int] = {}
        self.tokens = array("q")
        self.counts = array("d")

    def follow(self, request: Request) -> None:
        """Take in what was committed since the last time."""
        for position in range(self._read, len(request.tokens)):
            token = request.tokens[position]
            self._read = position + 1
            place = self.index.setdefault(token, len(self.index))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0.0)
            self.counts[place] += position >= request.prompt_len

    def after(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens and output counts, `path` counted as output."""
        counts = np.array(self.counts)
        more: dict[int, float] = {}
        for token in path:
            place = self.index.get(token)
            if place is None:
                more[token] = more.get(token, 0.0) + 1.0
            else:
                counts[place] += 1.0
        tokens = np.array(self.tokens)
        if more:
            tokens, counts = np.append(tokens, list(more)), np.append(counts, list(more.values()))
        return tokens, counts


class Processors:
    """Applies them. Remembers the token counts of the requests that it has seen, as long as these live.

    Args:
        in_turn: False leaves out custom processors and grammars.
    """

    def __init__(self, in_turn: bool = True) -> None:
        self._in_turn = in_turn
        self._histories: WeakKeyDictionary[Request, History] = WeakKeyDictionary()

    def apply(self, logits: Tensor, places: Sequence[Place]) -> Tensor:
        """Logits [rows, vocab] as the parameters of each row's request leave them; the input is not changed.

        A request with processors or a grammar of its own must ask for its places one by one, in the order of its
        output; those that no token is drawn at must not be asked for.
        """
        rows = [row for row, place in enumerate(places) if place.request.params.adjusts]
        if not rows:
            return logits
        adjusted = logits.clone()
        self._bias(adjusted, places, rows)
        self._penalise(adjusted, places, [row for row in rows if places[row].request.params.penalises])
        self._ban(adjusted, places, rows)
        for row in rows:
            if self._in_turn and places[row].request.params.in_turn:
                adjusted[row] = _in_turn(adjusted[row : row + 1], logits[row], places[row])
        return adjusted

    def _bias(self, logits: Tensor, places: Sequence[Place], rows: Sequence[int]) -> None:
        found = [
            (row, token, bias)
            for row in rows
            for token, bias in places[row].request.params.logit_bias.items()
            if token < logits.shape[1]  # a draft model may have fewer
        ]
        if found:
            at, tokens, biases = zip(*found, strict=True)
            logits[list(at), list(tokens)] += logits.new_tensor(biases)

    def _penalise(self, logits: Tensor, places: Sequence[Place], rows: Sequence[int]) -> None:
        if not rows:
            return
        found = []
        for row in rows:
            request, path = places[row]
            history = self._histories.setdefault(request, History())
            history.follow(request)
            tokens, counts = history.after(path)
            found.append((tokens, counts, len(tokens), request.params))

        def spread(values: Sequence[float]) -> Tensor:
            return logits.new_tensor(np.repeat(values, [length for _, _, length, _ in found]))

        at = torch.from_numpy(np.repeat(rows, [length for _, _, length, _ in found])).to(logits.device)
        token = torch.from_numpy(np.concatenate([tokens for tokens, *_ in found])).to(logits.device)
        count = logits.new_tensor(np.concatenate([counts for _, counts, *_ in found]))
        params = [entry[-1] for entry in found]
        repetition = spread([p.repetition_penalty for p in params])
        values = logits[at, token]
        values = torch.where(values < 0, values * repetition, values / repetition)
        values -= spread([p.frequency_penalty for p in params]) * count
        values -= spread([p.presence_penalty for p in params]) * (count > 0)
        logits[at, token] = values

    def _ban(self, logits: Tensor, places: Sequence[Place], rows: Sequence[int]) -> None:
        banned_rows: list[int] = []
        banned_tokens: list[int] = []
        for row in rows:
            place = places[row]
            params = place.request.params
            if params.allowed_token_ids is not None:
                some = [token for token in params.allowed_token_ids if token < logits.shape[1]]
                allowed = torch.tensor(some, dtype=torch.int64, device=logits.device)
                kept = logits[row, allowed]
                logits[row] = -math.inf
                logits[row, allowed] = kept
            banned = _bad_endings(place)
            if place.position < params.min_tokens:
                banned += place.request.end_ids
            if params.allowed_token_ids is not None and set(params.allowed_token_ids) <= set(banned):
                banned = []  # something must give: what is not allowed stays so
            banned = [token for token in banned if token < logits.shape[1]]  # a draft model may have fewer
            banned_rows += [row] * len(banned)
            banned_tokens += banned
        if banned_rows:
            logits[banned_rows, banned_tokens] = -math.inf


def _bad_endings(place: Place) -> list[int]:
    """The tokens that would complete a bad word here."""
    words = place.request.bad_words
    if not words:
        return []
    longest = max(map(len, words)) - 1
    request = place.request
    recent = request.tokens[max(request.prompt_len, len(request.tokens) - longest) :]
    tail = [*recent, *place.path][-longest:] if longest else []
    return [word[-1] for word in words if len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1]]


def _in_turn(scores: Tensor, logits: Tensor, place: Place) -> Tensor:
    """Custom processors, then the grammar, on one row [1, vocab]; returns [vocab]."""
    if place.request.params.logits_processors:
        ids = torch.tensor([place.context()], device=scores.device)
        for processor in place.request.params.logits_processors:
            scores = processor(ids, scores)
    row = scores[0]
    constraint = place.request.constraint
    bits = constraint.allowed(place.path) if constraint is not None else None
    if bits is None:
        return row
    allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[: len(row)].astype(bool)
    forbidden = torch.ones_like(row, dtype=torch.bool)
    forbidden[: len(allowed)] = torch.from_numpy(~allowed).to(row.device)
    masked = row.masked_fill(forbidden, -math.inf)
    # A ban must not leave nothing where the grammar leaves something.
    return masked if bool(masked.max() > -math.inf) else logits.masked_fill(forbidden, -math.inf)
