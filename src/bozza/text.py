"""Token ids to text, as they come: deltas that add up to the whole, however the tokens were grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoding gives for a character whose last bytes are not there yet


class Detokenizer:
    """Decodes one growing output. Text that could still change with the next token is held back.

    Deltas add up to the decoding of the whole output, unless single-byte tokens turn out to be no text: what was
    handed out is not taken back. A token's text depends on what precedes it (spaces, split characters), so each delta
    is the difference between two decodings of a short window that starts at a token where the last delta began.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # first token of the window
        self._told = 0  # tokens whose text has been handed out

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        self._ids += ids
        text = self._decode(self._window, len(self._ids))
        told = self._decode(self._window, self._told)
        # A window that began at a token without text (a special one) would lose the space before the next word.
        if text.endswith(REPLACEMENT) or len(text) <= len(told):
            return ""
        self._window, self._told = self._told, len(self._ids)
        return text[len(told) :]

    def held(self) -> str:
        """What `push` holds back, as far as no further token can change it."""
        rest = self._decode(self._window, len(self._ids))[len(self._decode(self._window, self._told)) :]
        return rest.rstrip(REPLACEMENT)

    def flush(self) -> str:
        """What is left at the end of the output, unfinished characters included."""
        rest = self._decode(self._window, len(self._ids))[len(self._decode(self._window, self._told)) :]
        self._window = self._told = len(self._ids)
        return rest

    def _decode(self, start: int, end: int) -> str:
        return decode(self._tokenizer, self._ids[start:end])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text without special tokens and without cosmetic changes to spaces."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class OutputText:
    """The text of one output as it grows, up to the first stop string. A `Watch` of its request.

    Args:
        tokenizer: decodes.
        stops: texts that end the output; of those that one token completes, the one that begins first counts.
        min_tokens: no stop string that is complete before this many tokens counts.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._pushed = 0
        self._text = ""
        self._searched = 0  # characters of the text, held ones included, that were looked at
        self._end: int | None = None  # where the text ends, once that is known
        self._taken = 0

    def push(self, token: int) -> bool:
        """See `Watch.push`: True when the token completes a stop string."""
        self._text += self._detokenizer.push([token])
        self._pushed += 1
        if not self._stops:
            return False
        text = self._text + self._detokenizer.held()
        if self._pushed >= self._min_tokens:
            # What was complete before this token must not be found again.
            found = [text.find(stop, max(0, self._searched - len(stop) + 1)) for stop in self._stops]
            self._end = min((start for start in found if start >= 0), default=None)
        if self._end is not None:
            self._text = text
        self._searched = len(text)
        return self._end is not None

    def finish(self) -> str:
        """The whole text of the finished output."""
        if self._end is None:
            self._text += self._detokenizer.flush()
            self._end = len(self._text)
        return self._text[: self._end]

    def take(self, finished: bool) -> str:
        """What has become certain since the last time: a beginning of a stop string waits until it is none."""
        if finished:
            self.finish()
        end = len(self._text) - self._held() if self._end is None else self._end
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _held(self) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        longest = max(map(len, self._stops), default=0) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0
