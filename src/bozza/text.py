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
