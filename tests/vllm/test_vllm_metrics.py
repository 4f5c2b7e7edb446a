"""Counts as Prometheus metrics."""

from __future__ import annotations

import socket
import urllib.request
from collections import Counter
from typing import Any

import pytest

from bozza.errors import ConfigError
from bozza.vllm.drafting import Counts
from bozza.vllm.metrics import Metrics, serve

prometheus: Any = pytest.importorskip("prometheus_client")


def counts(steps: int) -> Counts:
    many = Counter({"suffix": 3 * steps})
    return Counts(steps, 5 * steps, Counter({"off": steps, "suffix": 2 * steps}), many, Counter(many), 0.5 * steps, 4)


def test_counts_only_add_what_is_new() -> None:
    registry = prometheus.CollectorRegistry()
    metrics = Metrics(registry)
    for steps in (1, 1, 3):
        metrics.show(counts(steps))
    assert registry.get_sample_value("bozza_steps_total") == 3
    assert registry.get_sample_value("bozza_committed_tokens_total") == 15
    assert registry.get_sample_value("bozza_choices_total", {"choice": "suffix"}) == 6
    assert registry.get_sample_value("bozza_drafted_tokens_total", {"drafter": "suffix"}) == 9
    assert registry.get_sample_value("bozza_accepted_tokens_total", {"drafter": "suffix"}) == 9
    assert registry.get_sample_value("bozza_proposer_seconds_total") == 1.5
    assert registry.get_sample_value("bozza_requests") == 4


def test_two_proposers_of_a_process_add_up() -> None:
    registry = prometheus.CollectorRegistry()
    for metrics in (Metrics(registry), Metrics(registry)):
        metrics.show(counts(2))
    assert registry.get_sample_value("bozza_steps_total") == 4


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"metrics_port \d+ cannot be used"):
            serve(taken.getsockname()[1])


def test_metrics_are_served() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server, _ = serve(port)
    assert serve(port)[0] is server  # an engine after this one, in the same process
    Metrics().show(counts(1))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"bozza_steps_total" in answer.read()
    server.shutdown()
    server.server_close()
