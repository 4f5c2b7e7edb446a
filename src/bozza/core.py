"""The nouns of Bozza: what is asked, guessed, judged, planned and measured.

Nothing here knows about text, tensors or models, so the leader and the free drafters run without torch.
All are frozen except `Request`, the one mutable record of a running generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from bozza.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
Stage = Literal["plan", "draft", "verify", "sample", "other"]
STAGES: tuple[Stage, ...] = ("plan", "draft", "verify", "sample", "other")


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens for one request. Node i continues node `parents[i]`; -1 is the last committed token.

    A parent always comes before its children, so a chain is `parents == (-1, 0, 1, ...)`. `drafters[i]` names who
    proposed node i first.

    `laws[i]` is the distribution that node i was drawn from, an array of probabilities over the vocabulary, or None for
    a point mass: a token that was looked up or chosen. Siblings are tried in their order, and each is taken to be
    drawn from its law without the tokens of the siblings before it. An empty `laws` means point masses throughout.

    `confidences[i]` is the drafter's estimate of the probability that node i is accepted, its whole path included;
    empty when it has none.

    `merged` says that several drafts went in. Then even what looks like a chain is a tree: it has one branch only
    because the drafts happened to agree, and given that, its tokens are no longer drawn from their laws alone.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    laws: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    merged: bool = field(default=False, compare=False)
    confidences: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def chain(cls, tokens: Sequence[int], drafter: str, laws: Sequence[Any] = ()) -> Draft:
        """The draft in which each token continues the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (drafter,) * len(tokens), tuple(laws))

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
        if nodes >= len(self):
            return self
        return Draft(
            self.tokens[:nodes],
            self.parents[:nodes],
            self.drafters[:nodes],
            self.laws[:nodes],
            self.merged,
            self.confidences[:nodes],
        )

    def trunk(self) -> Draft:
        """The chain of first children; a draft in its own right, since that it is a chain depends on no draw."""
        children = self.children()
        nodes: list[int] = []
        while below := children.get(nodes[-1] if nodes else -1):
            nodes.append(below[0])
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(range(-1, len(nodes) - 1)),
            tuple(self.drafters[node] for node in nodes),
            tuple(self.laws[node] for node in nodes) if self.laws else (),
            confidences=tuple(self.confidences[node] for node in nodes) if self.confidences else (),
        )

    def confidence(self, node: int) -> float | None:
        """How likely the drafter takes node to stand; None when it does not say."""
        return self.confidences[node] if self.confidences else None

    def law(self, node: int) -> Any:
        """What node was drawn from; None for a point mass."""
        return self.laws[node] if self.laws else None

    def paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root down to each node, its own included."""
        paths: list[tuple[int, ...]] = []
        for parent, token in zip(self.parents, self.tokens, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths

    def children(self) -> dict[int, list[int]]:
        """The nodes below each node, in order; -1 is the last committed token."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return below


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path through a draft, and the tokens to commit: the path's own, then one that the target adds.

    After an accepted end token nothing need be added.
    """

    path: tuple[int, ...]  # accepted node indices, from the root down
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, before temperature, penalties and filters. Rank 1 is the likeliest."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


class Watch(Protocol):
    """Hears each committed token of a request, and may end it there. The engine does not know why."""

    def push(self, token: int) -> bool:
        """True when the request ends with this token."""
        ...


class Constraint(Watch, Protocol):
    """A language that the output must belong to; its state is the committed output."""

    failure: str | None  # why the language could not be followed further; the request is then aborted

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """Which tokens may follow `path` after the committed output: a bit each, lowest first; None: all of them."""
        ...

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must, or almost certainly will, come next."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """What the next pass carries before anything is drafted, and how much it may carry beside that."""

    rows: int  # requests in the pass
    tokens: int  # tokens that it computes for them: one each, and what is read of prompts
    cached: int  # tokens that it attends to in the store
    room: Mapping[int, int]  # id of each request that is past its prompt -> most nodes that its draft may have
    chains: bool = False  # of a tree only the trunk will be verified


@dataclass(frozen=True, slots=True)
class Plan:
    """The leader's decision for one step: what to verify. A request without a draft is decoded plainly."""

    drafts: Mapping[int, Draft] = field(default_factory=dict)  # by request id
    expected: Mapping[int, float] = field(default_factory=dict)  # request id -> tokens that it should commit


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what was run, what came of it and what it cost (seconds)."""

    rows: int  # requests in the pass
    new_tokens: int  # tokens that the pass computed
    cached_tokens: int  # tokens that it attended to in the store
    committed: int
    drafted: Mapping[str, int]
    tested: Mapping[str, int]
    accepted: Mapping[str, int]
    seconds: Mapping[Stage, float]
    draft_seconds: Mapping[str, float]  # the part of seconds["draft"] spent inside each drafter
    read_seconds: Mapping[str, float] = field(default_factory=dict)  # the part of that spent reading the pass

    @property
    def total_seconds(self) -> float:
        """Wall time of the whole step."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class RequestStats:
    """What one request took.

    `passes` are the target passes that committed tokens of this request, `prompt_passes` those that only read a chunk
    of its prompt. Of the `drafted` nodes, `tested` are those whose parent stood, so that they were compared at all, and
    `accepted` those that were committed. `choices` counts the passes by what was verified ("ngram+eagle", or "off" for
    nothing), and `expected` is how many tokens the leader expected of those for which it said so, `expecting` of them.
    Seconds are wall time of the steps that the request took part in, whoever shared them.
    """

    passes: int = 0
    prompt_passes: int = 0
    committed: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    tested: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    expected: float = 0.0
    expecting: int = 0
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    draft_seconds: dict[str, float] = field(default_factory=dict)

    def charge(self, seconds: Mapping[Stage, float], draft_seconds: Mapping[str, float]) -> None:
        """Add the time of a step."""
        for stage, spent in seconds.items():
            self.seconds[stage] += spent
        for name, spent in draft_seconds.items():
            self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + spent

    def expect(self, tokens: float | None) -> None:
        """Note what the leader expected of a pass, if it said so."""
        if tokens is not None:
            self.expected += tokens
            self.expecting += 1

    @property
    def committed_per_pass(self) -> float:
        """Mean tokens committed by a target pass; 1.0 is plain decoding."""
        return self.committed / self.passes if self.passes else 0.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One generation in flight. `tokens` is the prompt followed by what has been committed."""

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int  # always resolved: the params' own, or a fresh one
    end_ids: frozenset[int]  # a committed token in here finishes the request
    limit: int  # most tokens that prompt and output may have together
    bad_words: tuple[tuple[int, ...], ...] = ()  # the params' own, as token ids
    prediction: tuple[int, ...] = ()  # the params' own, as token ids
    constraint: Constraint | None = None
    watches: tuple[Watch, ...] = ()
    slot: int | None = None  # the scheduler's: set while running
    cached: int = 0  # leading tokens whose keys and values are in the slot
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    credits: list[str | None] = field(default_factory=list)  # per output token: the drafter that guessed it
    logprobs: list[TokenLogprob] = field(default_factory=list)  # per output token, if asked for
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # per prompt token, if asked for

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
