"""Recorded traces: what is recorded is what happens, and a file that was stopped goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bozza import LLM, SamplingParams
from bozza.bench import Case
from bozza.core import Load, Plan, Request, StepStats
from bozza.drafters import NgramDrafter
from bozza.errors import ConfigError, PromptError
from bozza.leader import Fixed
from bozza.leader.base import Ask
from bozza.leader.cost import CostModel
from bozza.study.guesses import parse_guessers, request_of
from bozza.study.recorder import record
from bozza.study.replay import Simulation
from bozza.study.traces import Trace, load_traces
from invented import COSTS
from tiny import tiny, token_prompts

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
VOCAB = 40
CASES = [
    Case(f"kind {index % 3}", [token % VOCAB for token in prompt]) for index, prompt in enumerate(token_prompts(8))
]
DRAFT = ["ngram:k=6", "suffix:k=5"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Of a model that repeats itself, at times for long."""
    return LLM(tiny("llama", vocab_size=VOCAB, initializer_range=0.1), draft=DRAFT, policy="fixed", max_batch=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


class Commits:
    """A leader that lets another one lead, and counts what each pass drafts and commits."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._leader = Fixed(tokens)
        self.counts: list[int] = []
        self.drafted: list[int] = []

    def plan(self, requests: Sequence[Request], load: Load, ask: Ask) -> Plan:
        return self._leader.plan(requests, load, ask)

    def learn(self, outcome: StepStats, committed: Mapping[int, Sequence[int]]) -> None:
        self.counts += [len(tokens) for tokens in committed.values()]
        self.drafted.append(outcome.drafted.total())


def test_a_trace_is_plain_decoding(llm: LLM, file: Path) -> None:
    told = []
    assert record(llm, CASES, PARAMS, file, lambda: told.append(1)) == len(CASES) == len(told)
    traces = load_traces(file)
    plain = llm.with_policy("off").generate([case.prompt for case in CASES], PARAMS)
    for trace, case, output in zip(traces, CASES, plain, strict=True):
        assert trace.prompt == tuple(case.prompt)
        assert trace.output == tuple(output.token_ids)
        assert trace.workload == case.workload
        assert trace.cap == {"ngram": 6, "suffix": 5}


def test_what_stands_is_how_far_the_drafter_is_right_at_every_place(llm: LLM, file: Path) -> None:
    record(llm, CASES, PARAMS, file)
    right = 0
    for trace in load_traces(file):
        drafter = NgramDrafter()
        request = request_of(trace, 0)
        drafter.start(request)
        for place, token in enumerate(trace.output):
            budget = min(6, len(trace.output) - place - 1)
            draft = drafter.draft([request], [budget])[0].tokens if budget else ()
            agree = 0
            while agree < len(draft) and draft[agree] == trace.output[place + agree]:
                agree += 1
            if place or len(trace.prompt) == 1:  # before, the prompt has not been read
                assert trace.accept["ngram"][place] == agree
                right += agree
            else:
                assert trace.accept["ngram"][place] == 0
            request.tokens.append(token)
            drafter.observe(request, [token])
    assert right > 100, "nothing was tested"


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_replayed_drafter_commits_what_the_engine_commits_pass_by_pass(llm: LLM, file: Path, k: int) -> None:
    record(llm, CASES, PARAMS, file)
    traces = load_traces(file)
    engine = Commits({"ngram": k})
    real = llm.with_leader(engine)
    for case in CASES:
        real.generate([case.prompt], PARAMS)
    replayed = Commits({"ngram": k})
    guessers = parse_guessers(["recorded:ngram"], traces)
    Simulation(traces, guessers, CostModel.from_document(COSTS), replayed).run()
    assert replayed.counts == engine.counts
    assert max(engine.counts) == k + 1
    assert min(engine.counts) == 1


@pytest.mark.parametrize("draft", ["ngram:k=4", "suffix:k=7"])
def test_a_free_drafter_commits_in_replay_what_it_commits_in_the_engine(llm: LLM, file: Path, draft: str) -> None:
    record(llm, CASES, PARAMS, file)
    # The engine's first pass reads the prompt and commits a token: begin after it.
    traces = [
        Trace((*trace.prompt, trace.output[0]), trace.output[1:], {}, {})
        for trace in load_traces(file)
        if len(trace.prompt) > 1
    ]
    name, k = draft.split(":k=")
    expected = []
    for case in (case for case in CASES if len(case.prompt) > 1):
        engine = Commits({name: int(k)})
        llm.with_leader(engine).generate([case.prompt], PARAMS)
        expected += engine.counts[1:]
    replayed = Commits({name: int(k)})
    Simulation(traces, parse_guessers([draft], traces), CostModel.from_document(COSTS), replayed).run()
    assert replayed.counts == expected
    assert max(expected) > 2


def test_drafters_that_have_confidences_say_them(target: Any, folders: dict[str, Path], file: Path) -> None:
    llm = LLM(target, draft=["ngram", f"eagle:{folders['head']},k=3,width=1"], policy="fixed", max_batch=1)
    record(llm, CASES[:2], PARAMS, file)
    for trace in load_traces(file):
        assert set(trace.confidence) == {"eagle"}
        for place, chances in enumerate(trace.confidence["eagle"]):
            assert len(chances) <= 3
            assert trace.accept["eagle"][place] <= len(chances)
            assert list(chances) == sorted(chances, reverse=True)
            assert all(round(chance, 3) == chance for chance in chances)
        assert any(trace.confidence["eagle"])


def test_a_head_drafts_and_commits_in_replay_what_it_does_in_the_engine(
    target: Any, folders: dict[str, Path], file: Path
) -> None:
    llm = LLM(target, draft=[f"eagle:{folders['head']},k=5,width=1"], policy="fixed", max_batch=1)
    record(llm, CASES, PARAMS, file)
    traces = load_traces(file)
    engine, replayed = Commits({"eagle": 4}), Commits({"eagle": 4})
    real = llm.with_leader(engine)
    for case in CASES:
        real.generate([case.prompt], PARAMS)
    Simulation(traces, parse_guessers(None, traces)[1:], CostModel.from_document(COSTS), replayed).run()
    assert replayed.counts == engine.counts
    assert replayed.drafted == engine.drafted
    assert len(set(engine.drafted)) > 2
    assert max(engine.counts) > 1


def test_a_file_goes_on_where_it_was_stopped(llm: LLM, file: Path) -> None:
    record(llm, CASES, PARAMS, file)
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:50])
    told = []
    assert record(llm, CASES, PARAMS, file, lambda: told.append(1)) == len(CASES) - 3
    assert file.read_text() == whole
    assert len(told) == len(CASES)
    assert record(llm, CASES, PARAMS, file) == 0
    assert file.read_text() == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_prompt_that_comes_twice_is_recorded_once(llm: LLM, file: Path) -> None:
    assert record(llm, [CASES[0], CASES[0]], PARAMS, file) == 1


def test_a_file_of_something_else_is_refused_and_left_alone(llm: LLM, file: Path) -> None:
    record(llm, CASES[2:4], PARAMS, file)
    before = file.read_text()
    others = [
        (LLM(tiny("llama", seed=7), draft=DRAFT, policy="fixed"), PARAMS),
        (LLM(tiny("llama", vocab_size=20), draft=DRAFT, policy="fixed"), PARAMS),
        (llm.with_policy("fixed", ["ngram:k=6"]), PARAMS),
        (llm.with_policy("fixed", ["ngram:k=6", "suffix:k=6"]), PARAMS),
        (llm, SamplingParams(max_tokens=39, ignore_eos=True)),
        (llm, SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=1)),
    ]
    for other, params in others:
        with pytest.raises(ConfigError, match="another model or other options"):
            record(other, CASES, params, file)
    assert file.read_text() == before


def test_a_file_that_is_none_of_traces_is_left_alone(llm: LLM, file: Path) -> None:
    for text in ("dear diary", "dear diary\nnothing today\n", '{"prompt": 3}\n'):
        file.write_text(text)
        with pytest.raises(PromptError):
            record(llm, CASES, PARAMS, file)
        assert file.read_text() == text
    with pytest.raises(ConfigError, match="cannot be read or written"):
        record(llm, CASES, PARAMS, file.parent)


def test_drafters_with_nothing_to_say_are_refused(llm: LLM, file: Path) -> None:
    with pytest.raises(ConfigError, match="drafter grammar has nothing to say"):
        record(llm.with_policy("fixed", ["ngram", "grammar"]), CASES, PARAMS, file)
    with pytest.raises(ConfigError, match="name some"):
        record(llm.with_policy("off"), CASES, PARAMS, file)
    assert not file.exists()
