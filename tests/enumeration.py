"""Exact laws of what the rules commit: every outcome of every decision, with its probability.

The models are tables: the law of the next token, in float64, after every prefix of the output.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bozza.core import Draft, Request, Verdict
from bozza.drafters.merge import merge
from bozza.params import SamplingParams
from bozza.rules import Block, Rejection
from bozza.sampling.chance import Chance
from bozza.sampling.sampler import Filters, warp

Table = Mapping[tuple[int, ...], Tensor]
Draw = Callable[[Chance], Draft]  # makes a draft, by decisions of its own
Result = TypeVar("Result")
SAMPLED = SamplingParams(temperature=1.0)


class Enumerator:
    """`Chance` that takes the decisions of a script, and beyond it the first possible ones.

    `weight` is the probability of all that was decided, `taken` the decisions, `possible` what each could have been.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.weight = 1.0
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self._script = script

    def accept(self, probability: float) -> bool:
        """See `Chance.accept`."""
        assert 0.0 <= probability <= 1.0, f"{probability} is no probability"
        return self._decide([max(0.0, 1.0 - probability), probability]) == 1

    def pick(self, weights: Tensor) -> int:
        """See `Chance.pick`."""
        return self._decide(weights.tolist())

    def _decide(self, weights: Sequence[float]) -> int:
        assert all(0.0 <= weight < math.inf for weight in weights), f"{weights} are no weights"
        possible = [index for index, weight in enumerate(weights) if weight > 0.0]
        assert possible, "nothing can be picked"
        place = len(self.taken)
        index = self._script[place] if place < len(self._script) else possible[0]
        self.taken.append(index)
        self.possible.append(possible)
        self.weight *= weights[index] / sum(weights)
        return index


def outcomes(
    run: Callable[[Any], Result], make: Callable[[Sequence[int]], Any] = Enumerator
) -> Iterator[tuple[float, Result]]:
    """Everything that a run can come to, with its probability: depth first, each time from the start."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        chance = make(script)
        result = run(chance)
        yield chance.weight, result
        for place in range(len(script), len(chance.taken)):
            done = tuple(chance.taken[:place])
            scripts += [(*done, other) for other in chance.possible[place] if other != chance.taken[place]]


# Models


@functools.cache
def table(seed: int, vocab: int, length: int, kind: str = "even") -> dict[tuple[int, ...], Tensor]:
    """A random law after each prefix of fewer than `length` tokens. Shared: nothing may change it.

    Args:
        kind: "even", "peaked" (mostly one token), or "zeros" (many tokens are impossible).
    """
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for size in range(length):
        for prefix in itertools.product(range(vocab), repeat=size):
            logits = torch.randn(vocab, generator=generator, dtype=torch.float64)
            law = (logits * (5.0 if kind == "peaked" else 1.0)).softmax(dim=0)
            if kind == "zeros":
                law[torch.rand(vocab, generator=generator) < 0.4] = 0.0
                law[int(torch.randint(vocab, (), generator=generator))] += 0.1
            laws[prefix] = law / law.sum()
    return laws


def filtered(laws: Table, params: SamplingParams) -> dict[tuple[int, ...], Tensor]:
    """The laws that tokens are drawn from under a request's temperature and filters."""
    filters = Filters.of(params)
    if filters.temperature == 0.0:
        return {prefix: torch.eye(len(law), dtype=law.dtype)[law.argmax()] for prefix, law in laws.items()}
    return {prefix: warp(law.log()[None], filters).softmax(dim=1)[0] for prefix, law in laws.items()}


def continuation(laws: Table, length: int, prefix: tuple[int, ...] = ()) -> Tensor:
    """The law of the sequences of `length` tokens that begin with `prefix`, given that: [vocab ** tokens left]."""
    if len(prefix) == length:
        return torch.ones(1, dtype=torch.float64)
    law = laws[prefix]
    return torch.cat([law[token] * continuation(laws, length, (*prefix, token)) for token in range(len(law))])


# Drafts


def chain(laws: Table, length: int, name: str = "model") -> Draw:
    """Drawn token by token."""

    def draw(chance: Chance) -> Draft:
        tokens: tuple[int, ...] = ()
        while len(tokens) < length:
            tokens = (*tokens, chance.pick(laws[tokens]))
        return Draft.chain(tokens, name, [laws[tokens[:place]] for place in range(length)])

    return draw


def spread(laws: Table, widths: Sequence[int], name: str = "model") -> Draw:
    """A tree, level by level; the children of a node are drawn without replacement."""

    def draw(chance: Chance) -> Draft:
        paths: list[tuple[int, ...]] = []
        parents: list[int] = []
        level = [-1]
        for width in widths:
            below = []
            for node in level:
                path = paths[node] if node >= 0 else ()
                left = laws[path].clone()
                for _ in range(min(width, int((left > 0.0).sum()))):
                    token = chance.pick(left)
                    left[token] = 0.0
                    below.append(len(paths))
                    paths.append((*path, token))
                    parents.append(node)
            level = below
        tokens = tuple(path[-1] for path in paths)
        return Draft(tokens, tuple(parents), (name,) * len(paths), tuple(laws[path[:-1]] for path in paths))

    return draw


def guess(tokens: Sequence[int], parents: Sequence[int] | None = None, name: str = "guess") -> Draw:
    """Always the same, and stated as point masses."""
    parents = range(-1, len(tokens) - 1) if parents is None else parents
    return lambda _: Draft(tuple(tokens), tuple(parents), (name,) * len(tokens))


def merged(parts: Sequence[Draw], room: int = 100) -> Draw:
    """What an engine with these drafters would have judged."""
    return lambda chance: merge([part(chance) for part in parts], room)


# Judging


def request(params: SamplingParams = SAMPLED, seed: int = 0) -> Request:
    """A request with a prompt of one token and no output."""
    return Request(0, [0], 1, params, seed, frozenset(), 100)


def logits_of(target: Table, draft: Draft) -> Tensor:
    """What the target's pass would give: [1 + nodes, vocab]."""
    return torch.stack([target[path] for path in [(), *draft.paths()]]).log()


def check(draft: Draft, verdict: Verdict) -> None:
    """A verdict names a path of the draft from the root, its tokens, and one token more."""
    assert len(verdict.tokens) == len(verdict.path) + 1
    assert [draft.tokens[node] for node in verdict.path] == list(verdict.tokens[:-1])
    assert all(draft.parents[node] == above for above, node in itertools.pairwise((-1, *verdict.path)))


def distinct(drawn: Iterable[tuple[float, Draft]]) -> list[tuple[float, Draft]]:
    """Equal drafts (laws included) together, so that each is judged only once."""
    found: dict[Any, tuple[float, Draft]] = {}
    for weight, draft in drawn:
        laws = tuple(None if law is None else tuple(law.tolist()) for law in draft.laws)
        key = (draft.tokens, draft.parents, draft.drafters, laws)
        found[key] = (found[key][0] + weight if key in found else weight, draft)
    return list(found.values())


class Judged(NamedTuple):
    """What a rule made of all drafts."""

    law: Tensor  # of the first tokens of the output [vocab ** tokens]; what a verdict leaves open is drawn plainly
    plain: Tensor  # the same of plain decoding
    accepted: float  # expected number of accepted tokens

    @property
    def error(self) -> float:
        """The largest difference of a probability."""
        return float((self.law - self.plain).abs().max())


def judge(
    rule: type[Rejection | Block],
    target: Table,
    draw: Draw,
    params: SamplingParams = SAMPLED,
    *,
    make: Callable[[Sequence[int]], Any] = Enumerator,
    logits: Callable[[Table, Draft], Tensor] = logits_of,
    laws: Table | None = None,
) -> Judged:
    """Enumerate all drafts and all verdicts on each.

    Args:
        target: laws before temperature and filters.
        make: the chance that the rule is given in the place of its coins.
        logits: the target's pass.
        laws: what plain decoding draws from, where that is more than temperature and filters.
    """

    def verdict(draft: Draft, rows: Tensor, chance: Chance) -> Verdict:
        found = rule(chance=lambda _: chance).verify(rows, [request(params)], [draft])[0]
        check(draft, found)
        return found

    drafts = distinct(outcomes(draw))
    judged = [
        (weight * share, found)
        for weight, draft in drafts
        for rows in [logits(target, draft)]
        for share, found in outcomes(lambda chance: verdict(draft, rows, chance), make)  # noqa: B023
    ]
    length = 1 + max(max(draft.depths(), default=0) for _, draft in drafts)
    return settle(judged, filtered(target, params) if laws is None else laws, length)


def settle(judged: Iterable[tuple[float, Verdict]], laws: Table, length: int) -> Judged:
    """Complete the tokens of each verdict to `length` tokens by plain decoding.

    Args:
        judged: verdicts and their probabilities.
        laws: what plain decoding draws from.
    """
    vocab = len(laws[()])
    ended: Counter[tuple[int, ...]] = Counter()
    accepted = 0.0
    for weight, verdict in judged:
        ended[verdict.tokens] += weight  # type: ignore[assignment]
        accepted += weight * len(verdict.path)
    law = torch.zeros((vocab,) * length, dtype=torch.float64)
    for tokens, weight in ended.items():
        law[tokens] += weight * continuation(laws, length, tokens).view_as(law[tokens])
    return Judged(law.flatten(), continuation(laws, length), accepted)


def unlikely(counts: Tensor, law: Tensor) -> bool:
    """Whether counts [n] differ from a law [n] more than chance would let them, but in one case of a million.

    Pearson's statistic, and the bound on the tail of a chi-square law by Laurent and Massart (2000, lemma 1).
    """
    if bool(counts[law == 0.0].any()):
        return True
    counts, law = counts[law > 0.0].double(), law[law > 0.0]
    expected = counts.sum() * law
    free, x = len(law) - 1, math.log(1e6)
    return float(((counts - expected) ** 2 / expected).sum()) > free + 2.0 * math.sqrt(free * x) + 2.0 * x
