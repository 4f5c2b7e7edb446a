"""The counts of a proposer as Prometheus metrics of its process, beside vLLM's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from bozza.errors import ConfigError, first_line
from bozza.vllm.drafting import Counts

Series = tuple[str, str]  # a metric, and the value of its label if it has one

PLAIN = {
    "bozza_steps": "Calls of the proposer, one per step.",
    "bozza_committed_tokens": "Tokens that steps committed.",
    "bozza_proposer_seconds": "Seconds spent in the proposer.",
}
LABELLED = {
    "bozza_choices": ("choice", "Requests and steps by what was drafted for them; off: nothing."),
    "bozza_drafted_tokens": ("drafter", "Tokens that were drafted and verified."),
    "bozza_accepted_tokens": ("drafter", "Drafted tokens that were accepted."),
}
GAUGE = ("bozza_requests", "Requests of which something is remembered.")


class Metrics:
    """Shows counts; those of several proposers in one process add up.

    Args:
        registry: of prometheus_client; None: its usual one.
    """

    def __init__(self, registry: Any = None) -> None:
        client = importlib.import_module("prometheus_client")
        self._metrics = _metrics(client.REGISTRY if registry is None else registry)
        self._shown: dict[Series, float] = {}

    def show(self, counts: Counts) -> None:
        """Add what is new."""
        for (name, label), value in _series(counts):
            more = value - self._shown.get((name, label), 0.0)
            if more > 0.0:
                metric = self._metrics[name]
                (metric.labels(label) if label else metric).inc(more)
                self._shown[name, label] = value
        self._metrics[GAUGE[0]].set(counts.requests)


@cache  # the next engine of a process finds its port served already, and its counts are shown there too
def serve(port: int) -> Any:
    """Serve this process's metrics at a port; returns the server and its thread.

    Raises:
        ConfigError: the port cannot be had.
    """
    try:
        return importlib.import_module("prometheus_client").start_http_server(port)
    except OSError as problem:
        raise ConfigError(f"metrics_port {port} cannot be used ({first_line(problem)}): name another one") from problem


def _series(counts: Counts) -> Iterator[tuple[Series, float]]:
    yield ("bozza_steps", ""), counts.steps
    yield ("bozza_committed_tokens", ""), counts.committed
    yield ("bozza_proposer_seconds", ""), counts.seconds
    labelled: dict[str, Mapping[str, int]] = {
        "bozza_choices": counts.choices,
        "bozza_drafted_tokens": counts.drafted,
        "bozza_accepted_tokens": counts.accepted,
    }
    for name, values in labelled.items():
        for label, value in values.items():
            yield (name, label), value


@cache  # a process has each metric once, however many proposers it makes
def _metrics(registry: Any) -> dict[str, Any]:
    client = importlib.import_module("prometheus_client")
    metrics: dict[str, Any] = {name: client.Counter(name, text, registry=registry) for name, text in PLAIN.items()}
    for name, (label, text) in LABELLED.items():
        metrics[name] = client.Counter(name, text, [label], registry=registry)
    metrics[GAUGE[0]] = client.Gauge(*GAUGE, registry=registry, multiprocess_mode="livesum")
    return metrics
