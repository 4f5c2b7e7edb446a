"""Lets drafters draft for the leader, within what each request has room for, and charges them for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bozza.core import STAGES, Draft, Request, Stage
from bozza.drafters import Drafter


class Stopwatch:
    """Charges the time since the last lap to a stage."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._last = clock()
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self.draft_seconds: dict[str, float] = {}
        self.read_seconds: dict[str, float] = {}

    def lap(self, stage: Stage) -> float:
        """The time since the last lap, which is charged to `stage`."""
        now = self.clock()
        spent = now - self._last
        self.seconds[stage] += spent
        self._last = now
        return spent

    def charge(self, name: str, spent: float) -> None:
        """Count time of a drafter; that of its stage is counted by `lap`."""
        self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + spent


class Asking:
    """The drafters, as the leader of one step may ask them.

    Args:
        drafters: by name.
        decoding: the requests that may draft.
        room: most nodes for each of them, by id.
        watch: of the step; the leader is thinking when it asks.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        decoding: Sequence[Request],
        room: Mapping[int, int],
        watch: Stopwatch,
    ) -> None:
        self._drafters = drafters
        self._decoding = decoding
        self._room = room
        self._watch = watch

    def ask(self, name: str, budgets: Mapping[int, int]) -> dict[int, Draft]:
        """See `bozza.leader.base.Ask`."""
        asked = [
            (request, budget)
            for request in self._decoding
            if (budget := min(budgets.get(request.id, 0), self._room[request.id])) > 0
        ]
        if not asked:
            return {}
        self._watch.lap("plan")
        drafts = self._drafters[name].draft([request for request, _ in asked], [budget for _, budget in asked])
        self._watch.charge(name, self._watch.lap("draft"))
        return {request.id: draft for (request, _), draft in zip(asked, drafts, strict=True)}
