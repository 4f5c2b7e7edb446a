"""The nouns of Bozza: what is asked, guessed, judged, planned and measured.

Nothing here knows about text, tensors or models, so the leader and the free drafters run without torch.
All are frozen except `Request`, the one mutable record of a running generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bozza.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
Stage = Literal["draft", "verify", "sample", "other"]
LEAST_TEMPERATURE = 1e-3  # below, logits divided by it overflow; greedy decoding is what is meant
STAGES: tuple[Stage, ...] = ("draft", "verify", "sample", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    `temperature` 0 is greedy: `top_p`, `top_k` and `seed` then have nothing to act on. A request without a `seed` gets
    a fresh one, so that two unseeded requests never share their noise. `stop_token_ids` end a request like the model's
    own end tokens; `ignore_eos` switches only the model's own off.

    Raises:
        ConfigError: a value is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: use a whole number")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}: ask for at least 1")
        if self.temperature != 0.0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}: use 0 (greedy) or at least {LEAST_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}: use a number above 0, up to 1 (1 keeps every token)")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: use 0 (every token) or a positive number")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens for one request. Node i continues node `parents[i]`; -1 is the last committed token.

    A parent always comes before its children, so a chain is `parents == (-1, 0, 1, ...)`. `drafters[i]` names who
    proposed node i first. A node is a point mass: nothing is claimed about the distribution it came from.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], drafter: str) -> Draft:
        """The draft in which each token continues the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (drafter,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Depth of each node; a child of the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def head(self, nodes: int) -> Draft:
        """The first `nodes` nodes; still a tree, since parents come first."""
        return self if nodes >= len(self) else Draft(self.tokens[:nodes], self.parents[:nodes], self.drafters[:nodes])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path through a draft, and the tokens to commit: the path's own, then one that the target adds."""

    path: tuple[int, ...]  # accepted node indices, from the root down
    tokens: tuple[int, ...]  # len(path) + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The leader's decision for one step: request id -> drafter name -> how many tokens to draft."""

    budgets: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what was run, what came of it and what it cost (seconds)."""

    rows: int  # requests in the pass
    new_tokens: int  # tokens that the pass computed
    cached_tokens: int  # tokens that it attended to in the store
    committed: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    seconds: Mapping[Stage, float]
    draft_seconds: Mapping[str, float]  # the part of seconds["draft"] spent inside each drafter

    @property
    def total_seconds(self) -> float:
        """Wall time of the whole step."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class RequestStats:
    """What one request took.

    `passes` are the target passes that committed tokens of this request, `prompt_passes` those that only read a chunk
    of its prompt. Seconds are wall time of the steps that the request took part in, whoever shared them.
    """

    passes: int = 0
    prompt_passes: int = 0
    committed: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    draft_seconds: dict[str, float] = field(default_factory=dict)

    def charge(self, seconds: Mapping[Stage, float], draft_seconds: Mapping[str, float]) -> None:
        """Add the time of a step."""
        for stage, spent in seconds.items():
            self.seconds[stage] += spent
        for name, spent in draft_seconds.items():
            self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + spent

    @property
    def committed_per_pass(self) -> float:
        """Mean tokens committed by a target pass; 1.0 is plain decoding."""
        return self.committed / self.passes if self.passes else 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One generation in flight. `tokens` is the prompt followed by what has been committed."""

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int  # always resolved: the params' own, or a fresh one
    end_ids: frozenset[int]  # a committed token in here finishes the request
    limit: int  # most tokens that prompt and output may have together
    slot: int | None = None  # the scheduler's: set while running
    cached: int = 0  # leading tokens whose keys and values are in the slot
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    credits: list[str | None] = field(default_factory=list)  # per output token: the drafter that guessed it

    def commit(self, tokens: Sequence[int], credits: Sequence[str]) -> None:
        """Append tokens, the first of them guessed by the drafters in `credits`."""
        self.tokens += tokens
        self.credits += [*credits, *[None] * (len(tokens) - len(credits))]
        self.stats.passes += 1
        self.stats.committed += len(tokens)
        self.stats.accepted.update(credits)

    @property
    def output(self) -> list[int]:
        """The committed output tokens (a copy)."""
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """How many tokens may still be committed."""
        return self.limit - len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that the next passes must still read; 1 when the request is decoding."""
        return len(self.tokens) - self.cached

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.slot is not None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
