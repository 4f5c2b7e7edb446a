"""A calibration finds the law of a machine whose law is known, in bounded time, and leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from bozza.core import Draft, Request
from bozza.drafters.base import Drafter, Reading
from bozza.engine import Engine
from bozza.leader import Leader
from bozza.leader.cost import CostModel
from bozza.models.runner import ForwardResult, RaggedRunner, Row
from bozza.rules import Coupled
from bozza.study.calibrate import GRADES, calibrate
from bozza.study.stand import ASKED_ROWS
from toy import ToyModel

VOCAB = 60
LAW = {"base": 0.030, "per_token": 0.0011, "per_row": 0.0007, "per_cached": 4e-6}
DRAFT = {"base": 0.004, "per_depth": 0.0015, "per_token": 0.0003}
READ = 0.125  # of a drafter's base, for each token that it has missed


class Clock:
    """Stands still unless something takes its time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Lawful(ToyModel):
    """A model whose passes take what a law says, and longer when the machine stalls."""

    def __init__(self, clock: Clock, law: Mapping[str, float], context: int, stalls: float = 0.0) -> None:
        table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        super().__init__(table, context)
        self.clock = clock
        self._law = law
        self._stalls = stalls
        self._random = random.Random(5)
        self.slow_from, self.slower = 1 << 30, 1.0  # the first pass of a machine that got slow, and how much slower

    def forward(self, rows: Sequence[Row], hidden_layers: Sequence[int] = ()) -> ForwardResult:
        cached = sum(len(self.tokens[row.slot]) for row in rows)
        tokens = sum(len(row.tokens) + len(row.draft) for row in rows)
        law = self._law
        seconds = law["base"] + law["per_token"] * tokens + law["per_row"] * (len(rows) - 1)
        seconds += law["per_cached"] * cached
        seconds *= self.slower if len(self.passes) >= self.slow_from else 1.0
        self.clock.now += seconds * (4.0 if self._random.random() < self._stalls else 1.0)
        return super().forward(rows, hidden_layers)


class Timed:
    """A drafter that takes what a law says, longer when it has tokens to catch up with; its reading takes time too."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, clock: Clock, law: Mapping[str, float], name: str = "slow", reading: float = 0.0) -> None:
        self.name = name
        self.asked: list[tuple[int, int]] = []
        self.live: set[int] = set()
        self.longest = 0  # most tokens that it had to read for a draft
        self._unread: dict[int, int] = {}
        self._clock = clock
        self._law = law
        self._reading = reading

    def start(self, request: Request) -> None:
        self.live.add(request.id)
        self._unread[request.id] = len(request.tokens)

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        self._unread[request.id] += len(tokens)

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        law = self._law
        self.asked.append((len(requests), max(budgets)))
        self._clock.now += law["base"] + law["per_depth"] * max(budgets) + law["per_token"] * sum(budgets)
        self._clock.now += sum(READ * law["base"] * (self._unread[request.id] - 1) for request in requests)
        for request in requests:
            self.longest = max(self.longest, self._unread[request.id])
            self._unread[request.id] = 0
        return [Draft.chain([1] * budget, self.name) for budget in budgets]

    def stop(self, request: Request) -> None:
        self.live.remove(request.id)

    def read(self, request: Request, reading: Reading) -> None:
        self._clock.now += self._reading


def engines(model: ToyModel, drafters: Sequence[Drafter], clock: Clock, **options: Any) -> Callable[[Leader], Engine]:
    return lambda leader: Engine(model, drafters, Coupled(), leader, clock=clock, **options)


def measured(model: Lawful, drafters: Sequence[Drafter] = (), most: int = 6, **options: Any) -> dict[str, Any]:
    batch = options.setdefault("batch", 16)
    paid = {drafter.name: most for drafter in drafters}
    return calibrate(engines(model, drafters, model.clock, max_running=batch), paid, clock=model.clock, **options)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("text", [[], list(range(3, 40))])
def test_the_law_of_passes_and_drafts_is_recovered(drafts: bool, text: list[int]) -> None:
    model = Lawful(Clock(), LAW, 1000)
    drafter = Timed(model.clock, DRAFT)
    costs = CostModel.from_document(measured(model, [drafter] if drafts else [], text=text))
    for rows, tokens, cached in [
        (1, 1, 0),
        (1, 1, 500),
        (1, 13, 30),
        (1, 64, 80),
        (4, 4, 200),
        (7, 40, 0),
        (16, 90, 9),
    ]:
        law = LAW["base"] + LAW["per_token"] * tokens + LAW["per_row"] * (rows - 1) + LAW["per_cached"] * cached
        assert costs.pass_seconds(rows, tokens, cached) == pytest.approx(law, rel=0.01)
    for requests, depth in [(1, 1), (1, 6), (3, 4), (4, 6)] if drafts else []:
        law = DRAFT["base"] + DRAFT["per_depth"] * depth + DRAFT["per_token"] * requests * depth
        assert costs.draft_seconds("slow", requests, depth, requests * depth, 50) == pytest.approx(law, rel=0.01)


def test_each_parameter_of_the_law_is_recovered() -> None:
    model = Lawful(Clock(), LAW, 1000)
    document = measured(model, [Timed(model.clock, DRAFT)])
    knots = dict(document["verify"]["knots"])
    assert {1, 16, 64} <= set(knots)
    assert knots[1] == pytest.approx(LAW["base"] + LAW["per_token"], rel=0.01)
    assert (knots[64] - knots[1]) / 63 == pytest.approx(LAW["per_token"], rel=0.01)
    assert document["verify"]["per_row"] == pytest.approx(LAW["per_row"], rel=0.01)
    assert document["verify"]["per_cached"] == pytest.approx(LAW["per_cached"], rel=0.01)
    assert document["overhead"] == 0.0
    assert document["drafters"]["slow"] == pytest.approx(
        DRAFT | {"per_cached": 0.0, "per_read": READ * DRAFT["base"]}, rel=0.01
    )


def test_reading_a_pass_belongs_to_the_pass_and_not_to_the_draft() -> None:
    model = Lawful(Clock(), LAW, 1000)
    document = measured(model, [Timed(model.clock, DRAFT, reading=0.002)])
    assert dict(document["verify"]["knots"])[1] == pytest.approx(LAW["base"] + LAW["per_token"] + 0.002, rel=0.01)
    assert document["verify"]["per_row"] == pytest.approx(LAW["per_row"] + 0.002, rel=0.01)
    assert document["drafters"]["slow"] == pytest.approx(
        DRAFT | {"per_cached": 0.0, "per_read": READ * DRAFT["base"]}, rel=0.01
    )


def test_what_reading_takes_a_drafter_is_found_without_time_for_a_long_prompt() -> None:
    slow = {name: 10 * value for name, value in LAW.items()}
    model = Lawful(Clock(), slow, 1000)
    drafter = Timed(model.clock, {name: 10 * value for name, value in DRAFT.items()})
    document = measured(model, [drafter], seconds=1.0)
    assert drafter.longest >= 64  # over fewer tokens, what a real one takes is lost in the noise
    assert document["verify"]["per_cached"] == 0.0  # no long prompt
    assert document["drafters"]["slow"]["per_read"] == pytest.approx(READ * 10 * DRAFT["base"], rel=0.05)


def test_a_machine_that_stalls_now_and_then_is_measured_as_if_it_did_not() -> None:
    model = Lawful(Clock(), LAW, 1000, stalls=0.05)
    document = measured(model, seconds=8.0)
    knots = dict(document["verify"]["knots"])
    for tokens in (1, 4, 16, 64):
        assert knots[tokens] == pytest.approx(LAW["base"] + LAW["per_token"] * tokens, rel=0.01)


@pytest.mark.parametrize("context", [8, 64, 300])
@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("most", [1, 24])
def test_any_context_batch_and_drafter_will_do(context: int, batch: int, most: int) -> None:
    model = Lawful(Clock(), LAW | {"per_cached": 0.0}, context)
    drafters = [Timed(model.clock, DRAFT), Timed(model.clock, DRAFT, "other")]
    document = measured(model, drafters, most, batch=batch, text=[3] * 40)
    verify = document["verify"]
    assert verify["knots"][0] == pytest.approx([1, LAW["base"] + LAW["per_token"]], rel=0.01)
    assert len(verify["knots"]) >= 3
    sizes = {tokens for tokens, _ in verify["knots"][:-1]}
    assert max(sizes) <= context // 2
    assert context < 64 or sizes <= {min(tokens, context // 2) for tokens in GRADES[0].tokens}
    assert verify["per_row"] == pytest.approx(LAW["per_row"] if batch > 1 else 0.0, rel=0.01)
    costs = CostModel.from_document(document)
    for name in ("slow", "other"):
        law = DRAFT["base"] + DRAFT["per_depth"] + DRAFT["per_token"]
        assert costs.draft_seconds(name, 1, 1, 1, 0) == pytest.approx(law, rel=0.01)


@pytest.mark.parametrize(("base", "seconds"), [(0.0003, 4.0), (0.03, 4.0), (0.03, 12.0), (0.1, 4.0)])
def test_it_takes_about_as_long_as_it_may_and_less_on_a_small_model(base: float, seconds: float) -> None:
    scale = base / LAW["base"]
    model = Lawful(Clock(), {name: scale * value for name, value in LAW.items()}, 1000)
    drafter = Timed(model.clock, {name: scale * value for name, value in DRAFT.items()})
    measured(model, [drafter], seconds=seconds)
    assert model.clock.now <= (seconds * 1.5 if base < 0.1 else 3 * seconds)
    if base < 0.001:
        assert model.clock.now < 0.1


def test_a_small_model_needs_no_seconds() -> None:
    model = Lawful(Clock(), {name: value / 10 for name, value in LAW.items()}, 1000)
    measured(model)
    assert model.clock.now < 0.45  # PATIENCE passes take 0.37 seconds; more rounds than that would change nothing


def test_a_machine_that_becomes_slow_meanwhile_ends_the_rounds_early() -> None:
    model = Lawful(Clock(), LAW, 1000)
    model.slow_from, model.slower = 8, 10.0
    document = measured(model)
    assert model.clock.now < 16.0  # three rounds would take 30 seconds
    assert CostModel.from_document(document).pass_seconds(1, 1, 0) > 5 * LAW["base"]


def test_more_time_gives_more_knots() -> None:
    few, many = (measured(Lawful(Clock(), LAW, 1000), seconds=seconds)["verify"]["knots"] for seconds in (0.5, 12.0))
    assert len(few) < len(many)


@pytest.mark.parametrize("batch", [1, 16])
def test_everything_is_given_back(batch: int) -> None:
    model = Lawful(Clock(), LAW, 64)
    drafter = Timed(model.clock, DRAFT)
    measured(model, [drafter], batch=batch)
    assert model.tokens == {}
    assert drafter.live == set()
    assert max(rows for rows, _ in drafter.asked) <= ASKED_ROWS


def test_everything_is_given_back_after_an_error() -> None:
    model = Lawful(Clock(), LAW, 1000)
    drafter = Timed(model.clock, DRAFT)
    drafter.draft = lambda requests, budgets: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        measured(model, [drafter])
    assert model.tokens == {}


def test_a_drafter_that_drafts_nothing_is_left_out() -> None:
    model = Lawful(Clock(), LAW, 1000)
    drafter = Timed(model.clock, DRAFT)
    drafter.draft = lambda requests, budgets: [Draft()] * len(requests)  # type: ignore[method-assign]
    assert measured(model, [drafter])["drafters"] == {}


def test_a_seed_decides_what_is_run() -> None:
    def prompts(seed: int) -> list[tuple[int, ...]]:
        model = Lawful(Clock(), LAW, 1000)
        measured(model, seed=seed)
        return [tuple(row.tokens) for rows in model.passes for row in rows]

    assert prompts(1) == prompts(1) != prompts(2)


def test_a_clock_that_stands_still_gives_costs_that_can_be_used() -> None:
    model = Lawful(Clock(), dict.fromkeys(LAW, 0.0), 1000)
    document = measured(model, [Timed(model.clock, dict.fromkeys(DRAFT, 0.0))])
    assert CostModel.from_document(document).pass_seconds(1, 1, 0) > 0.0


def test_a_real_model_is_measured_and_its_slots_are_free(target: Any) -> None:
    runner = RaggedRunner(target)
    document = calibrate(lambda leader: Engine(runner, [], Coupled(), leader, max_running=16), {})
    CostModel.from_document(document)
    seconds = [seconds for _, seconds in document["verify"]["knots"]]
    assert seconds == sorted(seconds)
    assert all(runner.store.length(slot) == 0 for slot in range(16))
