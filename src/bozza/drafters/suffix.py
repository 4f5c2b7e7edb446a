"""Draft what followed the longest contexts like this one, as a tree where they were followed by different things.

The end of the text is looked up by its last 8, 4, 2 or 1 tokens, the most that are known, and what was found is
compared further back. Each occurrence votes for its continuation with a weight that grows with how much agrees; a node
is worth the share of the votes on its path (after SuffixDecoding, Oliaro et al., 2024, who count over a suffix tree).
The likeliest nodes are drafted, no deeper than twice the match is long: a chance match of two tokens says little about
the twentieth.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.chains import LONGEST, RECENT, Chains, Occurrence, Tokens, before
from bozza.drafters.history import SharedHistory

REACH = 2  # drafted depth per matched token
LEAST = 0.1  # a node that gets less of the votes is not worth checking
HALF = RECENT // 2  # voters from each side where own text and history agree equally long
MOST_HEADS = 1 << 16  # of an index, so that a limit nobody will reach costs little


class SuffixIndex:
    """Where the ends of a growing text occurred in it before. Looks at the caller's list, and keeps no copy.

    Memory: at most 48 bytes per token (see `Chains`), counted by `room` up to 65,536 and by the text beyond.

    Args:
        text: may be appended to, and must not change otherwise.
        room: how many tokens it may come to.
    """

    def __init__(self, text: list[int], room: int = 0) -> None:
        self._text = text
        self._chains = Chains(max(1, min(max(room, len(text)), MOST_HEADS)))
        self._known = 0
        self.update()

    def update(self) -> None:
        """Take in what was appended to the text. A sequence is known once the token after it is."""
        text, link = self._text, self._chains.link
        self._chains.grow(len(text))
        for end in range(self._known, len(text)):
            link(end, before(text, end))
        self._known = len(text)

    def find(self, text: list[int]) -> list[Occurrence]:
        """Occurrences of the longest known end of a text (this index's own or another), the latest first."""
        return self._chains.find(text[-LONGEST:], self._where, own=text is self._text)

    def _where(self, place: int) -> tuple[Tokens, int, bytes | None]:
        return self._text, place, None


def trust(match: int, depth: int) -> float:
    """How likely a copy holds for `depth` tokens after `match` tokens agreed: match / (match + depth).

    A copy that held for n tokens is taken to hold for one more with probability n / (n + 1); this is the product.
    """
    return match / (match + depth)


def vote(occurrences: Sequence[Occurrence], nodes: int, drafter: str) -> Draft:
    """The tree of the `nodes` likeliest continuations.

    The confidence of a node is its share of the votes (each weighs its match squared), times `trust` in the longest
    match among its voters.

    Args:
        occurrences: of equal ones those that come first are preferred.
        nodes: the most in the tree, at least 1.
        drafter: who drafts.
    """
    longest = max((occurrence.match for occurrence in occurrences), default=0)
    ahead = [occurrence.ahead(min(nodes, REACH * longest)) for occurrence in occurrences]
    if not any(ahead):
        return NO_DRAFT
    if all(tokens == ahead[0] for tokens in ahead):  # the usual case, at a fraction of the time
        draft = Draft.chain(ahead[0], drafter)
        sure = tuple(trust(longest, depth) for depth in range(1, len(draft) + 1))
        return Draft(draft.tokens, draft.parents, draft.drafters, confidences=sure)
    return _tree([occurrence.match for occurrence in occurrences], ahead, nodes, drafter)


def _tree(matches: Sequence[int], ahead: Sequence[Sequence[int]], nodes: int, drafter: str) -> Draft:
    """`vote`, where voters do not agree: `ahead` is what each says."""
    weights = [match * match for match in matches]
    total = sum(weights)
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    # -confidence, order, parent, depth, token, and who voted for it, with what share and longest match
    waiting: list[tuple[float, int, int, int, int, Sequence[int], float, int]] = []
    voters: Sequence[int] = range(len(ahead))
    depth, order, share, longest = 0, 0, 1.0, max(matches)
    while len(tokens) < nodes:
        for token, agreeing in _says(ahead, depth, voters):
            value, match = share, longest
            if len(agreeing) < len(voters):
                value = sum([weights[voter] for voter in agreeing]) / total
                match = max([matches[voter] for voter in agreeing])
            if value >= LEAST:
                order += 1
                sure = value * trust(match, depth + 1)
                heapq.heappush(waiting, (-sure, order, len(tokens) - 1, depth + 1, token, agreeing, value, match))
        if not waiting:
            break
        sure, _, parent, depth, token, voters, share, longest = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        confidences.append(-sure)
    return Draft(tuple(tokens), tuple(parents), (drafter,) * len(tokens), confidences=tuple(confidences))


def _says(ahead: Sequence[Sequence[int]], depth: int, voters: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
    """What voters say `depth` tokens on, and which of them."""
    if len(voters) == 1:
        path = ahead[voters[0]]
        return [(path[depth], voters)] if depth < len(path) else []
    says: dict[int, list[int]] = {}
    for voter in voters:
        path = ahead[voter]
        if depth < len(path):
            says.setdefault(path[depth], []).append(voter)
    return says.items()


class SuffixDrafter:
    """Drafts a tree from the request's own prompt and output, and from a history if it is given one.

    Args:
        name: unique within an engine.
        history: outputs of other requests. Without it no request learns anything of another.
    """

    def __init__(self, name: str = "suffix", history: SharedHistory | None = None) -> None:
        self.name = name
        self._history = history
        self._indices: dict[int, SuffixIndex] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        self._indices[request.id] = SuffixIndex(request.tokens, request.limit)

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`."""
        self._indices[request.id].update()

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        return [vote(self._find(request), budget, self.name) for request, budget in zip(requests, budgets, strict=True)]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`. The output enters the history, the prompt does not."""
        if self._indices.pop(request.id, None) is not None and self._history is not None:
            self._history.add(request.output)

    def _find(self, request: Request) -> list[Occurrence]:
        """The longest matches in the request's own text and in the history; the latest of both if equally long."""
        own = self._indices[request.id].find(request.tokens)
        if self._history is None:
            return own
        longest = max([occurrence.match for occurrence in own], default=1)
        shared = self._history.find(request.tokens, longest)
        best = max([occurrence.match for occurrence in shared], default=0)
        if best < longest:
            return own
        if own and best == longest:
            own, shared = own[:HALF], shared[:HALF]
        else:
            own = []
        self._history.use(shared)
        return own + shared
