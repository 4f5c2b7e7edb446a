"""One output as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bozza.core import FinishReason, Request, RequestStats, TokenLogprob
from bozza.engine import Engine
from bozza.text import Detokenizer, OutputText, decode


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the tokens of one pass. `drafters[i]` guessed token i; None: the target made it.

    `text` is what has become certain; it waits while a character, or what may be a stop string, is unfinished.
    """

    text: str
    token_ids: list[int]
    drafters: list[str | None]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None = None  # one per token, if asked for


class Stream(Iterator[Chunk]):
    """Chunks of one request, each made when it is asked for. Streams of one LLM may be read in turns.

    `close` ends the request, whether the stream was read or not; so does letting go of the stream.
    """

    def __init__(self, engine: Engine, request: Request, tokenizer: Any) -> None:
        self._engine = engine
        self._request = request
        self._watched = next((watch for watch in request.watches if isinstance(watch, OutputText)), None)
        self._text = OutputText(tokenizer) if self._watched is None and tokenizer is not None else self._watched
        self._seen = 0

    @property
    def stats(self) -> RequestStats:
        """What the request has taken so far."""
        return self._request.stats

    @property
    def error(self) -> str | None:
        """Why the output had to be aborted, if it had."""
        return None if self._request.constraint is None else self._request.constraint.failure

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Those of the prompt as far as it has been read, if asked for."""
        return None if self._request.params.prompt_logprobs is None else self._request.prompt_logprobs

    @property
    def token_ids(self) -> list[int]:
        """All tokens committed so far."""
        return self._request.output

    def __next__(self) -> Chunk:
        request = self._request
        while self._seen == request.output_len:
            if request.finished:
                raise StopIteration
            self._engine.step()
        ids, credits = request.output[self._seen :], request.credits[self._seen :]
        logprobs = None if request.params.logprobs is None else request.logprobs[self._seen :]
        if self._text is not None and self._watched is None:
            for token in ids:
                self._text.push(token)
        text = self._text.take(request.finished) if self._text is not None else ""
        self._seen += len(ids)
        return Chunk(text, ids, credits, request.finish_reason, logprobs)

    def close(self) -> None:
        """End the request now."""
        self._engine.abort(self._request)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text by one author: the drafter that guessed it, or None for the target."""

    text: str
    drafter: str | None


class Authors:
    """Finds out who guessed which characters of a stream. Shown every chunk of it, in order.

    A character counts for the token that completes it. One that several tokens share counts for a drafter if that
    guessed them all, otherwise for the target.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._authors: list[str | None] = []  # of the characters that are certain and not in a chunk yet
        self._told = 0  # characters that the detokenizer has handed out
        self._certain = 0  # those, and the ones that it holds back but no token can change
        self._open: list[str | None] = []  # who guessed the tokens of the character that is unfinished

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """The chunk's text, cut where the author changes."""
        for token, drafter in zip(chunk.token_ids, chunk.drafters, strict=True):
            self._push(token, drafter)
        length = len(chunk.text)
        authors, self._authors = self._authors[:length], self._authors[length:]
        authors += [_joint(self._open)] * (length - len(authors))  # at the end, a character that stays unfinished
        pieces, start = [], 0
        for drafter, run in groupby(authors):
            end = start + len(list(run))
            pieces.append(Piece(chunk.text[start:end], drafter))
            start = end
        return pieces

    def _push(self, token: int, drafter: str | None) -> None:
        delta = self._detokenizer.push([token])
        self._told += len(delta)
        new = self._told + len(self._detokenizer.held()) - self._certain
        if new > 0:
            self._authors += [_joint([*self._open, drafter]), *[drafter] * (new - 1)]
            self._certain += new
            self._open = []
        if delta:
            self._open = []
        elif decode(self._tokenizer, [token]):  # else a special token, which is no part of any character
            self._open.append(drafter)


def _joint(drafters: Sequence[str | None]) -> str | None:
    """The one drafter that guessed all; None if there is none."""
    return drafters[0] if drafters and len(set(drafters)) == 1 else None
