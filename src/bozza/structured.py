"""Grammars as constraints over a model's tokens, through llguidance.

Chosen over xgrammar, which is as fast where it matters: a mask of a 152k vocabulary takes tens of microseconds in
either, while llguidance needs no other package (xgrammar brings triton with it), rolls back, and names forced tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bozza.errors import ConfigError, first_line
from bozza.params import Structured

# One way to write white space: models cannot ramble in it, and more tokens are forced.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Makes constraints for one tokenizer. Reads the whole vocabulary when made, which takes about a second.

    Raises:
        ConfigError: llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        try:
            import llguidance
            from llguidance import hf
        except ImportError as problem:
            raise ConfigError(
                "structured output needs llguidance: pip install 'bozza[grammar]', or pip install llguidance"
            ) from problem
        self._matcher = llguidance.LLMatcher
        self._tokenizer = tokenizer
        self._ends = end_ids
        try:
            ends = sorted(end_ids) or [tokenizer.eos_token_id]
            self._vocabulary = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        except Exception as problem:  # it raises whatever the tokenizer makes it
            raise ConfigError(f"llguidance cannot read this tokenizer ({first_line(problem)})") from problem

    def compile(self, structured: Structured) -> GrammarConstraint:
        """A fresh constraint, at the beginning of its language.

        Raises:
            ConfigError: the schema, expression or grammar is wrong; `after` is not one token.
        """
        grammar = self._grammar(structured)
        problem = self._matcher.validate_grammar(grammar, self._vocabulary)
        if problem and not problem.startswith("WARNING"):
            raise ConfigError(f"structured output: {_line(problem)}")
        matcher = self._matcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"structured output: {_line(matcher.get_error())}")
        return GrammarConstraint(matcher, self._start(structured))

    def _grammar(self, structured: Structured) -> str:
        if structured.regex is not None:
            return str(self._matcher.grammar_from_regex(structured.regex))
        if structured.grammar is not None:
            return str(self._matcher.grammar_from_lark(structured.grammar))
        schema = structured.json_schema
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return str(self._matcher.grammar_from_json_schema(text, overrides=JSON_STYLE))
        except (TypeError, ValueError) as problem:
            raise ConfigError(f"structured output: this is not a JSON schema ({first_line(problem)})") from problem

    def _start(self, structured: Structured) -> int | None:
        if structured.after is None:
            return None
        ids = self._tokenizer(structured.after, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(f"structured output: after={structured.after!r} is {len(ids)} tokens, use one")
        if ids[0] in self._ends:
            raise ConfigError(f"structured output: the output ends at {structured.after!r}, nothing comes after it")
        return int(ids[0])


def _line(text: str) -> str:
    """What llguidance says, in a line: its messages quote the grammar over many."""
    return " ".join(text.split())[:300]


class GrammarConstraint:
    """`Constraint` of a grammar. Only committed tokens move it; what is asked about a draft is rolled back.

    Args:
        matcher: an llguidance matcher at its beginning.
        start: the token after which the grammar holds; None: from the first token on.
    """

    def __init__(self, matcher: Any, start: int | None = None) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._start = start  # None once it holds

    def push(self, token: int) -> bool:
        """See `Watch.push`: True where nothing may follow."""
        if self._start is not None:
            if token == self._start:
                self._start = None
            return False
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            self.failure = f"structured output: llguidance gave up ({_line(self._matcher.get_error())})"
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """See `Constraint.allowed`."""
        if self._start is not None:
            if self._start not in path:
                return None
            path = path[path.index(self._start) + 1 :]
        taken = self._matcher.try_consume_tokens(list(path))
        try:
            # Past its end nothing is committed, so nothing need be forbidden there.
            if taken < len(path) or self._matcher.is_stopped():
                return None
            return bytes(self._matcher.compute_bitmask())
        finally:
            self._matcher.rollback(taken)

    def forced(self, most: int) -> list[int]:
        """See `Constraint.forced`: first what llguidance knows to follow, then single tokens that are left alone."""
        tokens: list[int] = []
        try:
            while self._start is None and len(tokens) < most and not self._matcher.is_stopped():
                more = list(self._matcher.compute_ff_tokens()) or self._only_token()
                taken = self._matcher.try_consume_tokens(more)
                tokens += more[:taken]
                if not more or taken < len(more):
                    break
        finally:
            self._matcher.rollback(len(tokens))
        return tokens[:most]

    def _only_token(self) -> list[int]:
        bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
        return [bits.bit_length() - 1] if bits.bit_count() == 1 else []
