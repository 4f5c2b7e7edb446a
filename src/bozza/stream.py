"""One output as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bozza.core import FinishReason, Request, RequestStats, TokenLogprob
from bozza.engine import Engine
from bozza.text import OutputText


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
