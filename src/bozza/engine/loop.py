"""The engine: plan, draft, verify, commit, once per step, for all running requests together.

Requests join and leave between steps. A request without a draft is an ordinary row of the same pass; there is no second
code path for plain decoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from bozza.core import (
    Constraint,
    Draft,
    FinishReason,
    Load,
    Plan,
    Request,
    StepStats,
    Verdict,
    Watch,
)
from bozza.drafters import Drafter
from bozza.engine.asking import Asking, Stopwatch
from bozza.engine.readings import Kept, Readings
from bozza.engine.scheduler import Batch, Due, Scheduler
from bozza.engine.stops import cut
from bozza.errors import ConfigError, PromptError
from bozza.leader import Leader
from bozza.models.runner import ForwardResult, Model, Row
from bozza.params import SamplingParams
from bozza.rules import Rule
from bozza.sampling.logprobs import token_logprobs


class Engine:
    """Serves requests made of token ids.

    Args:
        model: the target.
        drafters: in order of trust; where their drafts meet, the first one gets the credit.
        rule: decides which drafted tokens stand.
        leader: decides what is drafted.
        end_ids: the model's own end tokens.
        chains_only: of a tree, keep the branch that the first drafter began.
        max_running: most requests in one pass.
        token_budget: most tokens in one pass.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: Model,
        drafters: Sequence[Drafter],
        rule: Rule,
        leader: Leader,
        *,
        end_ids: frozenset[int] = frozenset(),
        chains_only: bool = False,
        max_running: int = 32,
        token_budget: int = 512,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.scheduler = Scheduler(model, max_running, token_budget)
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._readings = Readings(drafters)
        self._rule = rule
        self._leader = leader
        self._end_ids = end_ids
        self._chains_only = chains_only
        self._clock = clock
        self._next_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams, seed: int, **texts: Any) -> Request:
        """Make a request and queue it; see `request` for the arguments and what is refused."""
        request = self.request(prompt, params, seed, **texts)
        self.submit(request)
        return request

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        bad_words: Sequence[Sequence[int]] = (),
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        watches: Sequence[Watch] = (),
    ) -> Request:
        """A request that this engine can serve.

        Args:
            prompt: token ids.
            params: its text (stop strings, bad words, grammar) is not looked at: that is what the rest is for.
            seed: the request's own.
            bad_words: token sequences that must not occur.
            prediction: what the output is expected to be.
            constraint: what the output must belong to; it also ends the request.
            watches: whatever else may end it.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids that the model does not have.
            ConfigError: a parameter names a token that does not exist.
        """
        self.check_prompt(prompt)
        self._check_tokens(params, bad_words, prediction)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        request = Request(
            self._next_id,
            list(prompt),
            len(prompt),
            params,
            seed,
            ends,
            min(len(prompt) + params.max_tokens, self.model.context_length),
            tuple(map(tuple, bad_words)),
            tuple(prediction),
            constraint,
            (*watches, constraint) if constraint is not None else tuple(watches),
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs.append(None)  # nothing comes before the first token
        self._next_id += 1
        return request

    def submit(self, request: Request) -> None:
        """Queue a request made by `request`."""
        self.scheduler.add(request)

    def _check_tokens(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]], prediction: Sequence[int]
    ) -> None:
        vocab = self.model.vocab_size
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in bad_words for token in word],
            "prediction": prediction,
        }
        for name, tokens in named.items():
            if wrong := [token for token in tokens if not 0 <= token < vocab]:
                raise ConfigError(f"{name}: there is no token {wrong[0]}, the model has ids 0 to {vocab - 1}")

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that cannot be continued.

        Raises:
            PromptError: it is empty, too long, or holds ids that the model does not have.
        """
        vocab, context = self.model.vocab_size, self.model.context_length
        if not prompt:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt) >= context:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the model's context holds {context}: "
                f"shorten it to {context - 1} or less"
            )
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise PromptError(f"token id {wrong[0]} in the prompt: the model has ids 0 to {vocab - 1}")

    def abort(self, request: Request) -> None:
        """End a request now; what it has committed stays in it."""
        if not request.finished:
            self._finish(request, "abort")

    @property
    def idle(self) -> bool:
        """True when nothing runs and nothing waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    def step(self) -> StepStats:
        """Advance every running request by one pass. At least one request must be unfinished."""
        watch = Stopwatch(self._clock)
        decoding = self._admit()
        load = self.scheduler.load(self._chains_only)
        watch.lap("other")
        plan = self._leader.plan(decoding, load, Asking(self._drafters, decoding, load.room, watch).ask)
        watch.lap("plan")
        batch = self.scheduler.batch(self._fitted(plan, load))
        watch.lap("other")
        result = self.model.forward(batch.rows, self._readings.hidden_layers)
        watch.lap("verify")
        due = batch.due()
        verdicts = self._verify(batch, due, result.logits)
        watch.lap("sample")
        outcome, committed = self._commit(batch, zip(due, verdicts, strict=True), result, watch, plan)
        self._leader.learn(outcome, committed)
        return outcome

    def _admit(self) -> list[Request]:
        """Let waiting requests join; returns all requests that are past their prompt."""
        for request in self.scheduler.admit():
            for drafter in self._drafters.values():
                drafter.start(request)
        return [request for request in self.scheduler.running if request.decoding]

    def _fitted(self, plan: Plan, load: Load) -> dict[int, Draft]:
        """The planned drafts, as far as there is room for them."""
        return {
            id_: (draft.trunk() if load.chains else draft).head(load.room[id_]) for id_, draft in plan.drafts.items()
        }

    def _verify(self, batch: Batch, due: Sequence[Due], logits: Tensor) -> list[Verdict]:
        """Note the likelihood of prompts where asked for, then let the rule judge the rest."""
        start = 0
        for request, row in zip(batch.requests, batch.rows, strict=True):
            if request.cached + 1 < request.prompt_len and request.params.prompt_logprobs is not None:
                read = request.cached + 1  # a step that is interrupted does the same again
                tokens = request.tokens[read : read + len(row.tokens)]
                found = token_logprobs(logits[start : start + len(tokens)], tokens, request.params.prompt_logprobs)
                request.prompt_logprobs[read:] = found
            start += row.outputs
        wanted = [row for _, draft, root in due for row in range(root, root + 1 + len(draft))]
        judged = logits if len(wanted) == len(logits) else logits[wanted]
        return self._rule.verify(judged, [request for request, *_ in due], [draft for _, draft, _ in due])

    def _commit(
        self,
        batch: Batch,
        judged: Iterator[tuple[Due, Verdict]],
        result: ForwardResult,
        watch: Stopwatch,
        plan: Plan,
    ) -> tuple[StepStats, dict[int, Sequence[int]]]:
        """Move every request on, and say what the step came to and which tokens each request committed."""
        cached = sum(request.cached for request in batch.requests)
        drafted, tested, accepted = Counter[str](), Counter[str](), Counter[str]()
        committed: dict[int, Sequence[int]] = {}
        kept: list[Kept] = []
        for request, row in zip(batch.requests, batch.rows, strict=True):
            mine = next(judged) if len(row.tokens) == request.pending else None
            if request.finished:  # aborted since the step began: a stream that was let go
                continue
            first = request.cached
            if mine is None:
                request.cached += len(row.tokens)
                request.stats.prompt_passes += 1
                kept.append(Kept(request, row, first, ()))
                continue
            (_, draft, root), verdict = mine
            tokens, tried, credits = self._advance(request, row, verdict, result.logits[root : root + 1 + len(draft)])
            if not request.finished:
                kept.append(Kept(request, row, first, verdict.path[: len(tokens)]))
            committed[request.id] = tokens
            request.stats.expect(plan.expected.get(request.id))
            drafted.update(draft.drafters)
            tested.update(tried)
            accepted.update(credits)
        watch.lap("other")
        for name in self._readings.names() if kept else ():
            self._readings.show(name, batch.rows, kept, result)
            watch.read_seconds[name] = watch.lap("draft")
            watch.charge(name, watch.read_seconds[name])
        for request in batch.requests:
            request.stats.charge(watch.seconds, watch.draft_seconds)
        new_tokens = sum(len(row.tokens) + len(row.draft) for row in batch.rows)
        outcome = StepStats(
            len(batch.rows),
            new_tokens,
            cached,
            sum(map(len, committed.values())),
            drafted,
            tested,
            accepted,
            watch.seconds,
            watch.draft_seconds,
            watch.read_seconds,
        )
        return outcome, committed

    def _advance(
        self, request: Request, row: Row, verdict: Verdict, logits: Tensor
    ) -> tuple[Sequence[int], list[str], list[str]]:
        """Commit one verdict up to the request's end.

        Returns:
            The tokens, who drafted the nodes that were compared, and who those that were committed.
        """
        draft = row.draft
        try:
            tokens, reason = cut(request, verdict.tokens)
            path = verdict.path[: len(tokens)]
            standing = (-1, *path)[: len(tokens)]  # where each token was due
            tried = [draft.drafters[node] for node, parent in enumerate(draft.parents) if parent in standing]
            credits = [draft.drafters[node] for node in path]
            if request.params.logprobs is not None:
                rows = logits[[node + 1 for node in standing]]
                request.logprobs += token_logprobs(rows, tokens, request.params.logprobs)
            request.commit(tokens, credits)
            request.cached += len(row.tokens)
            request.stats.drafted.update(draft.drafters)
            request.stats.choices["+".join(dict.fromkeys(draft.drafters)) or "off"] += 1
            request.stats.tested.update(tried)
            if reason is not None:
                self._finish(request, reason)
        except BaseException:  # the watches have moved: nobody could go on from half a verdict
            self.abort(request)
            raise
        if reason is None:
            self.model.keep(row.slot, request.cached, path)
            request.cached += len(path)
            for drafter in self._drafters.values():
                drafter.observe(request, tokens)
        return tokens, tried, credits

    def _finish(self, request: Request, reason: FinishReason) -> None:
        started = request.slot is not None
        self.scheduler.remove(request)
        if started:
            for drafter in self._drafters.values():
                drafter.stop(request)
        request.finish_reason = reason
