"""Follow what the user expects the output to be, and find back into it after a difference.

For edits: the text before the edit is the expectation, and most of it comes out again. While the output agrees, the
next expected tokens are drafted. After a difference the last tokens of the output are looked up in the expectation;
of several places with the longest agreement the one nearest to where the output left it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bozza.core import NO_DRAFT, Draft, Request
from bozza.drafters.chains import LONGEST
from bozza.drafters.suffix import SuffixIndex

LEAST_MATCH = 2  # tokens that must agree before the expectation is trusted again


@dataclass(slots=True)
class _State:
    expected: list[int]
    index: SuffixIndex
    place: int = 0  # of the token that is expected next
    agrees: bool = True


class PredictionDrafter:
    """Drafts a chain from the request's prediction. Knows nothing about requests without one."""

    def __init__(self, name: str = "prediction") -> None:
        self.name = name
        self._states: dict[int, _State] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`."""
        if request.prediction:
            expected = list(request.prediction)
            self._states[request.id] = _State(expected, SuffixIndex(expected))
            self.observe(request, request.output)

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`."""
        state = self._states.get(request.id)
        if state is None:
            return
        for token in tokens:
            state.agrees = state.agrees and state.expected[state.place : state.place + 1] == [token]
            state.place += state.agrees
        if not state.agrees:
            self._find_back(state, request.tokens[max(request.prompt_len, len(request.tokens) - LONGEST) :])

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`."""
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            state = self._states.get(request.id)
            tokens = state.expected[state.place : state.place + budget] if state is not None and state.agrees else []
            drafts.append(Draft.chain(tokens, self.name) if tokens else NO_DRAFT)
        return drafts

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        self._states.pop(request.id, None)

    def _find_back(self, state: _State, output: list[int]) -> None:
        places = [found for found in state.index.find(output) if found.match >= LEAST_MATCH]
        if places:
            best = max(places, key=lambda found: (found.match, -abs(found.end - state.place)))
            state.place, state.agrees = best.end, True
