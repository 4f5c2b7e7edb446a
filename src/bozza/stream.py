"""One output as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bozza.core import FinishReason, Request, RequestStats
from bozza.engine import Engine
from bozza.text import Detokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: the tokens of one pass. `drafters[i]` guessed token i; None: the target made it."""

    text: str
    token_ids: list[int]
    drafters: list[str | None]
    finish_reason: FinishReason | None


class Stream(Iterator[Chunk]):
    """Chunks of one request, each made when it is asked for. Streams of one LLM may be read in turns.

    `close` ends the request, whether the stream was read or not; so does letting go of the stream.
    """

    def __init__(self, engine: Engine, request: Request, tokenizer: Any) -> None:
        self._engine = engine
        self._request = request
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._seen = 0

    @property
    def stats(self) -> RequestStats:
        """What the request has taken so far."""
        return self._request.stats

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
        self._seen += len(ids)
        text = ""
        if self._detokenizer:
            text = self._detokenizer.push(ids) + (self._detokenizer.flush() if request.finished else "")
        return Chunk(text, ids, credits, request.finish_reason)

    def close(self) -> None:
        """End the request now."""
        self._engine.abort(self._request)

    def __del__(self) -> None:
        self.close()
