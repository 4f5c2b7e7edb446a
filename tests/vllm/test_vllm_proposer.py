"""The adapter itself, with a stand-in for vLLM's configuration."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, Job, copying, drafted, prose

import bozza.vllm
from bozza.errors import ConfigError
from bozza.vllm.options import VARIABLE, Options
from bozza.vllm.proposer import of_replica


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.1")


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Pretend that this vLLM is installed."""
    module = ModuleType("vllm")
    if version is not None:
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


def config(
    rank: int = 0,
    tensor: int = 1,
    pipeline: int = 1,
    backend: str | type | None = None,
    replica: int = 0,
    scheduled: int | None = 2048,
    drafted: int = 6,
) -> Any:
    """What is read of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        model_config=SimpleNamespace(max_model_len=512, model="some/model", get_vocab_size=lambda: 10_000),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_scheduled_tokens=scheduled),
        parallel_config=SimpleNamespace(
            rank=rank,
            world_size=tensor * pipeline,
            tensor_parallel_size=tensor,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=pipeline,
            data_parallel_index=replica,
            distributed_executor_backend=backend,
        ),
    )


def set_options(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps(given))


def engine_of(proposer: Any) -> FakeEngine:
    return FakeEngine(lambda sampled, lengths, table: proposer.propose(sampled, lengths, table, slot_mappings=None))


def test_vllm_can_make_it_by_name_and_gets_drafts() -> None:
    made = getattr(importlib.import_module("bozza.vllm"), "Proposer", None)  # as vLLM does
    assert made is not None
    proposer = made(config())
    proposer.load_model(object())
    fake = engine_of(proposer)
    fake.add(copying("a", 1000))
    fake.run()
    assert max(len(draft) for call in fake.calls for draft in call.values()) == 6


def test_there_is_nothing_else_in_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        bozza.vllm.Scheduler  # noqa: B018


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "0.320.1", "1.0"])
def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    proposer = bozza.vllm.Proposer
    install(monkeypatch, version)
    with pytest.raises(ConfigError, match=f"inside vLLM 0.32, and this is vLLM {version}"):
        proposer(config())


def test_without_vllm_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match="not installed here"):
        bozza.vllm.Proposer  # noqa: B018
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="not installed here"):
        bozza.vllm.Proposer  # noqa: B018


def test_wrong_options_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, draughts=["suffix"])
    with pytest.raises(ConfigError, match="unknown option 'draughts'"):
        bozza.vllm.Proposer(config())


@pytest.mark.parametrize(
    ("rank", "tensor", "speaks"), [(0, 2, True), (1, 2, False), (3, 4, False), (4, 4, True), (5, 4, False)]
)
def test_one_rank_decides(rank: int, tensor: int, speaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    fake = engine_of(bozza.vllm.Proposer(config(rank, tensor)))
    fake.add(copying("a", 1000))
    fake.run()
    assert (drafted(fake.calls, "a") > 0) is speaks
    assert not caplog.records


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="use tensor parallel"):
        bozza.vllm.Proposer(config(4, 4, pipeline=2))


class ExecutorWithExternalLauncher:
    """Named as vLLM's own."""


class OfOurs(ExecutorWithExternalLauncher):
    """An executor that somebody derived from it."""


@pytest.mark.parametrize(
    "backend",
    [
        "external_launcher",
        "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher",
        ExecutorWithExternalLauncher,
        OfOurs,
    ],
)
def test_such_an_executor_is_known_by_any_name(backend: str | type) -> None:
    with pytest.raises(ConfigError, match='set "clock": "steps"'):
        bozza.vllm.Proposer(config(1, 2, backend=backend))


@pytest.mark.parametrize("backend", ["mp", "ray", int])
def test_other_executors_take_one_answer(backend: str | type) -> None:
    fake = engine_of(bozza.vllm.Proposer(config(1, 2, backend=backend)))
    fake.add(copying("a", 1000))
    fake.run()
    assert drafted(fake.calls, "a") == 0


def test_ranks_that_schedule_for_themselves_must_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    bozza.vllm.Proposer(config(0, 1, backend="external_launcher"))  # alone, it may decide as it likes
    with pytest.raises(ConfigError, match='set "clock": "steps"'):
        bozza.vllm.Proposer(config(1, 2, backend="external_launcher"))
    set_options(monkeypatch, clock="steps", trace="decisions.jsonl")
    with pytest.raises(ConfigError, match="the same file"):
        bozza.vllm.Proposer(config(1, 2, backend="external_launcher"))
    set_options(monkeypatch, clock="steps")
    calls = []
    for rank in (0, 1):
        fake = engine_of(bozza.vllm.Proposer(config(rank, 2, backend="external_launcher")))
        fake.add(copying("a", 1000))
        fake.run()
        calls.append(fake.calls)
    assert calls[0] == calls[1]
    assert drafted(calls[0], "a") > 0


def test_a_shared_history_outlives_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_options(monkeypatch, shared_history=str(tmp_path / "history"), trace=str(tmp_path / "trace.jsonl"))
    proposer = bozza.vllm.Proposer(config())
    fake = engine_of(proposer)
    for start in (1000, 4000):
        fake.add(copying("a", start))
        fake.run()
    del fake, proposer
    assert (tmp_path / "history").stat().st_size > 100
    assert all("choice" in json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines())


def test_more_tokens_than_vllm_verifies_are_refused() -> None:
    bozza.vllm.Proposer(config(drafted=128))
    with pytest.raises(ConfigError, match="num_speculative_tokens is 129"):
        bozza.vllm.Proposer(config(drafted=129))


def test_replicas_of_one_machine_take_files_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_options(monkeypatch, shared_history=str(tmp_path / "history"), trace=str(tmp_path / "trace"))
    for replica in (0, 2):
        proposer = bozza.vllm.Proposer(config(replica=replica))
        fake = engine_of(proposer)
        for start in (1000, 4000):
            fake.add(copying("a", start))
            fake.run()
        del fake, proposer
    assert sorted(file.name for file in tmp_path.iterdir()) == ["history", "history.2", "trace", "trace.2"]


def test_replicas_of_one_machine_take_ports_of_their_own() -> None:
    options = Options(metrics_port=9000)
    assert of_replica(options, 0) == options
    assert of_replica(options, 3) == Options(metrics_port=9003)
    with pytest.raises(ConfigError, match="metrics_port is 65536"):
        of_replica(Options(metrics_port=65535), 1)


def test_a_trace_that_cannot_be_written_ends_and_drafts_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    set_options(monkeypatch, trace="/dev/full")
    fake = engine_of(bozza.vllm.Proposer(config()))
    fake.add(copying("a", 1000))
    fake.run()
    assert drafted(fake.calls, "a") > 20
    (said,) = (record.getMessage() for record in caplog.records)
    assert "nothing is traced from here on" in said


@pytest.mark.parametrize("scheduled", [3, None])
def test_drafts_fit_into_what_a_pass_may_schedule(scheduled: int | None) -> None:
    fake = engine_of(bozza.vllm.Proposer(config(scheduled=scheduled)))
    fake.add(copying("a", 1000))
    fake.run()
    assert max(len(draft) for call in fake.calls for draft in call.values()) == (2 if scheduled else 6)


@pytest.mark.parametrize("shared", [True, False])
def test_requests_share_a_history_if_asked_to(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    set_options(monkeypatch, shared_history=shared)
    fake = engine_of(bozza.vllm.Proposer(config()))
    output = prose(60, 3000)
    fake.add(Job("a", prose(20, 1000), output))
    fake.run()
    fake.add(Job("b", prose(20, 2000), [*prose(10, 5000), *output]))
    fake.run()
    assert (drafted(fake.calls, "b") > 0) is shared


def test_a_fault_costs_drafts_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    proposer = bozza.vllm.Proposer(config())
    assert proposer.propose([[1]], [5], None) == [[]]
    assert "drafts nothing from here on" in caplog.text
    fake = engine_of(proposer)
    fake.add(copying("a", 1000))
    fake.run()
    assert drafted(fake.calls, "a") == 0


def test_it_runs_without_torch_and_transformers() -> None:
    code = (
        "import sys, bozza.vllm, bozza.vllm.proposer; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
