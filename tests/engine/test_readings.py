"""What drafters are shown of a pass is what a plain forward of the text so far computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from bozza.core import Draft, Request
from bozza.drafters.base import Reader, Reading
from bozza.engine import Engine
from bozza.leader import Fixed
from bozza.models.probe import load_runner
from bozza.models.runner import Row
from bozza.params import SamplingParams
from bozza.rules import Coupled
from tiny import VOCAB, tiny, token_prompts


@dataclass
class Shown:
    """One reading, and what was true when it came."""

    request: Request
    tokens: list[int]
    reading: Reading
    row: Row
    likely: list[list[int]]
    probabilities: list[list[float]]


class Recorder:
    """Drafts trees that are partly right, and writes down what it is shown.

    Args:
        name: its own.
        layers: that it reads.
        texts: of each request, known beforehand; without them nothing is drafted.
        rows: by slot, those of the pass that is shown.
    """

    def __init__(self, name: str, layers: tuple[int, ...], texts: dict[int, list[int]], rows: dict[int, Row]) -> None:
        self.name = name
        self.hidden_layers = layers
        self.live: set[int] = set()
        self.seen: list[Shown] = []
        self.observed: dict[int, int] = {}
        self._texts = texts
        self._rows = rows
        self._chance = random.Random(name)

    def start(self, request: Request) -> None:
        self.live.add(request.id)
        self.observed[request.id] = request.prompt_len

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        self.observed[request.id] += len(tokens)

    def stop(self, request: Request) -> None:
        self.live.remove(request.id)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._tree(request).head(budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request) -> Draft:
        """What comes, down to a random depth, with wrong tokens before and below it."""
        nodes: dict[tuple[int, int], None] = {}  # parent and token: equal brothers would be no tree
        last = -1
        for token in self._texts[request.id][len(request.tokens) :][: self._chance.randrange(6)]:
            for wrong in self._chance.sample(range(3, VOCAB), self._chance.randrange(2)):
                nodes[last, wrong] = None
            nodes[last, token] = None
            last = list(nodes).index((last, token))
        for _ in range(2):
            nodes[self._chance.randrange(-1, len(nodes)), self._chance.randrange(3, VOCAB)] = None
        parents, tokens = zip(*nodes, strict=True)
        return Draft(tokens, parents, (self.name,) * len(tokens))

    def read(self, request: Request, reading: Reading) -> None:
        assert request.id in self.live
        assert not request.finished
        assert self.observed[request.id] == len(request.tokens)  # it comes after `observe`
        assert request.slot is not None
        places = list(range(len(reading.after)))
        likely, probabilities = reading.likeliest(places, 5)
        assert reading.likeliest(places[::-2], 3)[0] == [line[:3] for line in likely[::-2]]
        self.seen.append(Shown(request, list(request.tokens), reading, self._rows[request.slot], likely, probabilities))

    def of(self, request: Request) -> list[Shown]:
        return [shown for shown in self.seen if shown.request is request]


@torch.inference_mode()
def plain(model: Any, tokens: list[int]) -> Any:
    return model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)


def serve(engine: Engine, requests: list[Request]) -> None:
    while not all(request.finished for request in requests):
        engine.step()


def params_of(place: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=4 + 5 * (place % 4),
        temperature=0.7 * (place % 2),
        prompt_logprobs=1 if place % 3 == 0 else None,
        logprobs=1 if place % 3 == 1 else None,
    )


class Run(NamedTuple):
    model: Any
    requests: list[Request]
    readers: list[Recorder]
    passes: list[list[Row]]


@pytest.fixture(scope="module")
def run() -> Run:
    """Several requests with prompts in chunks and drafts that are accepted in part, watched by three readers."""
    model = tiny("llama")
    prompts = token_prompts(9)
    runner = load_runner(model)
    alone = Engine(runner, [], Coupled(), Fixed({}))
    texts = [alone.add(prompt, params_of(i), i) for i, prompt in enumerate(prompts)]
    serve(alone, texts)
    known, rows, passes = {request.id: request.tokens for request in texts}, {}, []
    layers = {"first": (0, 2), "second": (1,), "blind": ()}
    readers = [Recorder(name, wanted, known, rows) for name, wanted in layers.items()]
    engine = Engine(runner, readers, Coupled(), Fixed({"first": 9, "second": 6}), max_running=5, token_budget=40)
    forward = runner.forward

    def noted(asked: Sequence[Row], hidden_layers: Sequence[int] = ()) -> Any:
        passes.append(list(asked))
        rows.update({row.slot: row for row in asked})
        assert list(hidden_layers) == [0, 1, 2]
        return forward(asked, hidden_layers)

    runner.forward = noted  # type: ignore[method-assign]
    requests = [engine.add(prompt, params_of(i), i) for i, prompt in enumerate(prompts)]
    serve(engine, requests)
    assert [request.tokens for request in requests] == [request.tokens for request in texts]
    return Run(model, requests, readers, passes)


def test_the_run_has_everything_that_could_go_wrong(run: Run) -> None:
    assert all(isinstance(reader, Reader) for reader in run.readers)
    assert any(len(row.tokens) > 1 and not row.wanted for rows in run.passes for row in rows)  # chunks
    assert any(row.wanted > 1 for rows in run.passes for row in rows)  # log-probabilities of prompts
    assert sum(request.stats.accepted.total() for request in run.requests) > 40
    assert sum(request.stats.drafted.total() - request.stats.accepted.total() for request in run.requests) > 40
    paths = [shown.reading.path for shown in run.readers[0].seen]
    assert sum(path != tuple(range(len(path))) for path in paths) > 10  # branches that are not the first nodes


def test_hidden_states_are_those_of_the_tokens_added_for_good(run: Run) -> None:
    for reader in run.readers[:2]:
        for request in run.requests:
            states = plain(run.model, request.tokens).hidden_states
            end = 0
            for reading in (shown.reading for shown in reader.of(request)):
                assert reading.first == end
                end += len(reading.hidden)
                expected = torch.cat([states[layer][0, reading.first : end] for layer in reader.hidden_layers], dim=1)
                torch.testing.assert_close(reading.hidden, expected, rtol=1e-4, atol=1e-4)


def test_all_tokens_but_the_last_have_been_shown_once_the_prompt_is_read(run: Run) -> None:
    for shown in run.readers[0].seen:
        end = shown.reading.first + len(shown.reading.hidden)
        if len(shown.tokens) > shown.request.prompt_len:
            assert end == len(shown.tokens) - 1
        else:
            assert end < shown.request.prompt_len


def test_the_likeliest_successors_are_those_of_the_plain_law_after_each_path(run: Run) -> None:
    """After the last token of the row, then after each node of the draft, accepted or not."""
    checked = 0
    for shown in run.readers[0].seen:
        reading, draft = shown.reading, shown.row.draft
        if not shown.row.wanted:
            assert reading.after == ()
            continue
        assert reading.after == (shown.row.tokens[-1], *draft.tokens)
        before = shown.tokens[: reading.first + len(shown.row.tokens)]
        came = shown.tokens[len(before) :]
        assert [draft.paths()[node] for node in reading.path] == [
            tuple(came[:depth]) for depth in range(1, len(reading.path) + 1)
        ]
        for place, path in enumerate([(), *draft.paths()]):
            best = plain(run.model, [*before, *path]).logits[0, -1].softmax(dim=0).topk(5)
            assert shown.probabilities[place] == pytest.approx(best.values.tolist(), rel=1e-3, abs=1e-6)
            assert shown.likely[place] == best.indices.tolist()
            checked += 1
    assert checked > 100


def test_a_reader_without_layers_is_shown_everything_else(run: Run) -> None:
    first, _, blind = run.readers
    assert all(shown.reading.hidden is None for shown in blind.seen)
    assert len(blind.seen) == len(first.seen)
    for one, other in zip(first.seen, blind.seen, strict=True):
        assert one.request is other.request
        assert (one.reading.first, one.reading.after, one.reading.path, one.likely) == (
            other.reading.first,
            other.reading.after,
            other.reading.path,
            other.likely,
        )


def test_a_request_that_has_finished_is_not_shown(run: Run) -> None:
    """`Recorder.read` would refuse it; and its last pass really is missing."""
    first = run.readers[0]
    for request in run.requests:
        assert len(first.of(request)) == request.stats.passes + request.stats.prompt_passes - 1
    assert not first.live
