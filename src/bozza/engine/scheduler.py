"""Which requests run, and what each brings to the next pass.

First come, first served: up to `max_running` requests own a slot at a time. Every decoding request has a row in every
pass; the rest of the token budget reads prompts, in chunks, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bozza.core import NO_DRAFT, Draft, Load, Request
from bozza.errors import ConfigError
from bozza.models.runner import Model, Row


class Due(NamedTuple):
    """A request whose next token a pass decides. `root` is the row of logits after its last token."""

    request: Request
    draft: Draft
    root: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one pass. A request whose row does not reach the end of its tokens gets no verdict."""

    requests: list[Request]
    rows: list[Row]

    def due(self) -> list[Due]:
        """What the pass decides, in the order of the rows."""
        due = []
        end = 0
        for request, row in zip(self.requests, self.rows, strict=True):
            end += row.outputs
            if len(row.tokens) == request.pending:
                due.append(Due(request, row.draft, end - len(row.draft) - 1))
        return due


def check_limits(max_running: int, token_budget: int) -> None:
    """Refuse sizes with which requests could not run.

    Raises:
        ConfigError: a size is out of range.
    """
    if max_running < 1:
        raise ConfigError(f"batch is {max_running}: use at least 1")
    if token_budget < 2 * max_running:
        raise ConfigError(
            f"a token budget of {token_budget} is too small for a batch of {max_running}: "
            f"use at least {2 * max_running}"
        )


class Scheduler:
    """Owns the queue and the running set.

    Args:
        model: where slots come from.
        max_running: most requests in one pass.
        token_budget: most tokens in one pass, drafts included.
    """

    def __init__(self, model: Model, max_running: int, token_budget: int) -> None:
        check_limits(max_running, token_budget)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._model = model
        self._max_running = max_running
        self._budget = token_budget

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Give slots to waiting requests while there is room; returns those that start now."""
        started = []
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting.popleft()
            request.slot = self._model.alloc()
            self.running.append(request)
            started.append(request)
        return started

    def remove(self, request: Request) -> None:
        """Forget a request and free its slot."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        slot, request.slot = request.slot, None
        if slot is not None:
            self._model.free(slot)

    def load(self, chains: bool = False) -> Load:
        """What the next pass carries before anything is drafted.

        Args:
            chains: see `Load`.
        """
        prompts = [request.pending for request in self.running if not request.decoding]
        decoding = [request for request in self.running if request.decoding]
        # While prompts wait, drafts get half of the budget. The pass adds a token of its own, so a request with n
        # tokens left has use for n - 1 guesses.
        most = (self._budget // 2 if prompts else self._budget) // max(len(decoding), 1) - 1
        return Load(
            len(self.running),
            min(len(decoding) + sum(prompts), self._budget),
            sum(request.cached for request in self.running),
            {request.id: min(request.remaining - 1, most) for request in decoding},
            chains,
        )

    def batch(self, drafts: Mapping[int, Draft]) -> Batch:
        """The rows of the next pass: one per decoding request, then prompt chunks.

        Args:
            drafts: by request id, each within the room that `load` gave it.
        """
        requests = [request for request in self.running if request.decoding]
        rows = [Row(_slot(request), request.tokens[-1:], drafts.get(request.id, NO_DRAFT)) for request in requests]
        room = self._budget - sum(1 + len(row.draft) for row in rows)
        for request in self.running:
            if request.decoding or room == 0:
                continue
            chunk = request.tokens[request.cached : request.cached + room]
            requests.append(request)
            last = len(chunk) == request.pending
            wanted = int(last) if request.params.prompt_logprobs is None else len(chunk)
            rows.append(Row(_slot(request), chunk, wanted=wanted))
            room -= len(chunk)
        for request, row in zip(requests, rows, strict=True):
            self._model.truncate(row.slot, request.cached)  # what a step that was interrupted left there
        return Batch(requests, rows)


def _slot(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.id} is running without a slot")
    return request.slot
