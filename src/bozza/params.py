"""What a user may ask of one generation. Checked here once, so that everything behind may rely on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from bozza.errors import ConfigError

LEAST_TEMPERATURE = 1e-3  # below, logits divided by it overflow; greedy decoding is what is meant
MOST_LOGPROBS = 1024
LARGEST = 1e30  # far above any logit, and far from overflowing beside one


NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _check(name: str, value: Any, right: Callable[[Any], bool], kind: str) -> None:
    if not right(value):
        raise ConfigError(f"{name} is {str(value)[:80]!r}: use {kind}")


def _all(values: Any, kind: type) -> bool:
    """Whether these are several values, and all of a kind."""
    return isinstance(values, Iterable) and not isinstance(values, str) and all(isinstance(v, kind) for v in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """A language that the output must belong to: exactly one of the three.

    `json_schema` is a JSON schema (a mapping, or JSON text), `regex` a regular expression that the whole output must
    match, `grammar` a context-free grammar in Lark notation. With `after`, the output is free until that text, which
    must be a single token (such as "</think>"), and bound from the token that follows it. The generation ends, with
    "stop", where nothing more may follow. Needs the package `llguidance` (extra `grammar`).

    Raises:
        ConfigError: none or several are given.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        for name in ("regex", "grammar", "after"):
            _check(name, getattr(self, name), lambda value: value is None or isinstance(value, str), "text")
        schema: Any = self.json_schema
        _check("json_schema", schema, lambda value: value is None or isinstance(value, (str, Mapping)), "a mapping")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError("structured output needs exactly one of json_schema, regex and grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Everything here acts at every position, whatever was drafted.

    Attributes:
        max_tokens: most output tokens.
        min_tokens: no end token and no stop string counts before this many.
        temperature: 0 is greedy; the filters and the seed then have nothing to act on.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens of this mass.
        min_p: keep tokens with at least this share of the likeliest one's probability.
        typical_p: keep the most typical tokens of this mass (Meister et al., 2022).
        repetition_penalty: divides positive and multiplies negative logits of all tokens in prompt and output (Keskar
            et al., 2019; as transformers does). 1 changes nothing.
        presence_penalty: taken from the logit of each token that the output holds (as the OpenAI API does).
        frequency_penalty: taken from a token's logit for each time that the output holds it (as the OpenAI API does).
        logit_bias: token id (or its digits, as JSON has it) -> number added to its logit.
        bad_words: texts, or token id sequences, that the output must not hold. A text stands for its tokens with and
            without a space before it.
        allowed_token_ids: if given, no other token is ever produced; where bad_words or min_tokens would leave none of
            them, these give way.
        logits_processors: transformers `LogitsProcessor` objects, or functions of (input_ids [1, length], scores
            [1, vocab]), applied in this order after all of the above. Under speculation each is called once per
            output token and in the order of the output, as in plain decoding, so even one with a state is right (it may
            be asked for one token more where a stop string ends the output). A state belongs to one output: n = 1,
            and parameters of its own for each prompt.
        prediction: what the output is expected to be, a text or token ids; changes nothing but the speed (drafter
            `prediction`). For edits: the text before the edit.
        structured: a grammar for the output. It has the last word: what it alone leaves over is never banned.
        stop: texts that end the output; the text stops before, the token ids with the token that completes it. Special
            tokens have no text: use stop_token_ids for them.
        stop_token_ids: tokens that end the output, beside the model's own.
        ignore_eos: the model's own end tokens do not end the output.
        seed: one seed, one text. Without one each request gets a fresh one.
        n: independent outputs; output i > 0 has a seed made from (seed, i).
        logprobs: give the log-probability of each output token and of this many likeliest ones, under the model's own
            law, before temperature, penalties and filters.
        prompt_logprobs: the same for the prompt.

    The order is that of transformers: logit bias, repetition penalty, presence and frequency penalty, bans,
    processors, grammar; then temperature, top-k, top-p, min-p, typical-p.

    Raises:
        ConfigError: a value is out of range, or would have no effect.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[Any, ...] = ()
    prediction: str | tuple[int, ...] = ()
    structured: Structured | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._normalise()
        self._check_counts()
        self._check_law()
        self._check_bans()

    def _check_kinds(self) -> None:
        """Values of a wrong kind are named here, instead of by Python somewhere behind."""
        for name in ("stop", "stop_token_ids", "bad_words", "prediction", "allowed_token_ids", "logits_processors"):
            if isinstance(getattr(self, name), Iterator):  # looking at it must not use it up
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in NUMBERS:
            _check(name, getattr(self, name), lambda value: isinstance(value, Real), "a number")
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check(name, getattr(self, name), lambda value: value is None or _all(value, Integral), "token ids")
        _check(
            "prediction",
            self.prediction,
            lambda value: isinstance(value, str) or _all(value, Integral),
            "a text, or token ids",
        )
        _check("ignore_eos", self.ignore_eos, lambda value: isinstance(value, bool), "True or False")
        _check("stop", self.stop, lambda value: isinstance(value, str) or _all(value, str), "texts")
        _check(
            "bad_words",
            self.bad_words,
            lambda value: (
                isinstance(value, str)
                or (_all(value, object) and all(isinstance(word, str) or _all(word, Integral) for word in value))
            ),
            "texts, or sequences of token ids",
        )
        _check(
            "logit_bias",
            self.logit_bias,
            lambda value: (
                isinstance(value, Mapping)
                and all(
                    isinstance(token, Integral) or (isinstance(token, str) and token.isdecimal()) for token in value
                )
                and _all(value.values(), Real)
            ),
            "a mapping from token ids to numbers",
        )
        _check("logits_processors", self.logits_processors, lambda value: _all(value, object), "a list")
        structured: Any = self.structured
        _check("structured", structured, lambda value: value is None or isinstance(value, Structured), "Structured")

    def _normalise(self) -> None:
        """Lists become tuples, a lone text a tuple of one, so that parameters stay what they were."""

        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def several(value: Any) -> tuple[Any, ...]:
            return (value,) if isinstance(value, str) else tuple(value)

        put("stop", several(self.stop))
        put("bad_words", tuple(word if isinstance(word, str) else tuple(word) for word in several(self.bad_words)))
        put("stop_token_ids", tuple(self.stop_token_ids))
        put("prediction", self.prediction if isinstance(self.prediction, str) else tuple(self.prediction))
        put("logits_processors", tuple(self.logits_processors))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(sorted(set(self.allowed_token_ids))))
        put("logit_bias", {int(token): float(bias) for token, bias in dict(self.logit_bias).items()})

    def _check_counts(self) -> None:
        least = {"max_tokens": 1, "min_tokens": 0, "top_k": 0, "n": 1, "logprobs": 0, "prompt_logprobs": 0}
        for name, bound in least.items():
            value: Any = getattr(self, name)
            if value is None and name.endswith("logprobs"):
                continue
            if not isinstance(value, Integral):
                raise ConfigError(f"{name} is {value!r}: use a whole number")
            if value < bound:
                raise ConfigError(f"{name} is {value}: use {bound} or more")
        seed: Any = self.seed
        if seed is not None and not isinstance(seed, Integral):
            raise ConfigError(f"seed is {self.seed!r}: use a whole number")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: lower one of them")
        if self.n > 1 and self.temperature == 0.0:
            raise ConfigError(f"n is {self.n} at temperature 0: all outputs would be equal, raise the temperature")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > MOST_LOGPROBS:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at most {MOST_LOGPROBS}")

    def _check_law(self) -> None:
        if self.temperature != 0.0 and not LEAST_TEMPERATURE <= self.temperature < LARGEST:
            raise ConfigError(f"temperature is {self.temperature}: use 0 (greedy) or at least {LEAST_TEMPERATURE}")
        for name in ("top_p", "typical_p"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}: use a number above 0, up to 1 (keeps every token)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p is {self.min_p}: use a number from 0 (keeps every token) to 1")
        if not 0.0 < self.repetition_penalty < LARGEST:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}: use a number above 0 (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < LARGEST:
                raise ConfigError(f"{name} is {getattr(self, name)}: use a finite number (0 is none)")

    def _check_bans(self) -> None:
        if wrong := [token for token, bias in self.logit_bias.items() if not abs(bias) < LARGEST]:
            raise ConfigError(f"logit_bias of token {wrong[0]} is not a finite number: to ban a token use bad_words")
        if "" in self.stop:
            raise ConfigError("an empty stop string would end every output at once: drop it")
        if any(not word for word in self.bad_words):
            raise ConfigError("an empty bad word would ban everything: drop it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("allowed_token_ids is empty: nothing could be generated")
        if self.allowed_token_ids is not None and self.structured is not None:
            raise ConfigError("allowed_token_ids and structured both say what is allowed: give one of them")
        if wrong_kind := [item for item in self.logits_processors if not callable(item)]:
            raise ConfigError(f"logits_processors: {type(wrong_kind[0]).__name__} cannot be called with (ids, scores)")

    @property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before temperature and filters."""
        return bool(
            self.penalises
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.in_turn
        )

    @property
    def penalises(self) -> bool:
        """Whether a penalty looks at earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def in_turn(self) -> bool:
        """Whether positions must be looked at one after the other: processors may have a state, and a grammar has."""
        return bool(self.logits_processors) or self.structured is not None
