"""From what users write (text, messages, parameters) to what the engine serves (token ids)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from bozza.core import Constraint, Watch
from bozza.errors import ConfigError, PromptError, first_line
from bozza.params import SamplingParams
from bozza.structured import GrammarCompiler
from bozza.text import OutputText

Message = Mapping[str, str]


class Extras(TypedDict):
    """The parts of a request that come from text; keyword arguments of `Engine.add`."""

    bad_words: list[tuple[int, ...]]
    prediction: list[int]
    constraint: Constraint | None
    watches: list[Watch]


class Intake:
    """Knows the tokenizer, if there is one."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._known_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._compiler: GrammarCompiler | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            PromptError: there is none.
        """
        if self._known_tokenizer is None:
            raise PromptError("this LLM has no tokenizer: give token ids, or LLM(model, tokenizer=...)")
        return self._known_tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands; the tokenizer adds what it always adds (often a BOS token, or nothing)."""
        if not text:
            raise PromptError("the prompt is empty: give some text")
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        tokenizer = self.tokenizer
        if not messages:
            raise PromptError("the conversation is empty: give at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise PromptError(f"a message needs 'role' and 'content', this is not one: {str(message)[:80]}")
        if not tokenizer.chat_template:
            raise PromptError("this model has no chat template: give plain text to generate instead")
        try:
            ids: list[int] = tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except Exception as problem:  # a template may raise whatever it likes, about roles it does not know for one
            raise PromptError(
                f"the model's chat template refuses this conversation ({first_line(problem)})"
            ) from problem
        return ids

    def extras(self, params: SamplingParams) -> Extras:
        """What the engine needs beside the parameters.

        Raises:
            ConfigError: a grammar is wrong, or a bad word has no tokens.
            PromptError: text is given and there is no tokenizer.
        """
        watches: list[Watch] = [OutputText(self.tokenizer, params.stop, params.min_tokens)] if params.stop else []
        return {
            "bad_words": [ids for word in params.bad_words for ids in self._bad_word(word)],
            "prediction": self._prediction(params.prediction),
            "constraint": None if params.structured is None else self._grammars().compile(params.structured),
            "watches": watches,
        }

    def _bad_word(self, word: str | tuple[int, ...]) -> list[tuple[int, ...]]:
        """A text is written in two ways: at the start of a word and inside one."""
        if not isinstance(word, str):
            return [word]
        ways = {tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, f" {word}")}
        if () in ways:
            raise ConfigError(f"bad word {word!r} has no tokens")
        return sorted(ways)

    def _prediction(self, prediction: str | tuple[int, ...]) -> list[int]:
        if not isinstance(prediction, str):
            return list(prediction)
        ids: list[int] = self.tokenizer(prediction, add_special_tokens=False)["input_ids"] if prediction else []
        return ids

    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self._vocab_size, self._end_ids)
        return self._compiler


def sample_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a request with several; the first keeps the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1
