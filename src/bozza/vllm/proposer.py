"""The only module that knows vLLM: its `custom_class` protocol, its configuration and its version.

vLLM makes one `Proposer` in each worker and calls `propose` after each step. Only the answer of the first worker is
used (`Executor.take_draft_token_ids`); it goes to the scheduler, which tells all workers what to verify. So that worker
decides, and the others stay idle: they cannot disagree.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bozza.drafters.history import SharedHistory
from bozza.errors import ConfigError, first_line
from bozza.leader.log import DecisionLog
from bozza.vllm.drafting import Drafting, Limits
from bozza.vllm.metrics import Metrics, serve
from bozza.vllm.options import VARIABLE, Options, read_options

SUPPORTED = "0.32"  # the minor version whose protocol this is
EVERY_RANK = "external_launcher"  # the executor whose workers each run a scheduler of their own
LAUNCHER = "ExecutorWithExternalLauncher"  # its class, which vLLM also takes itself, or by name
MOST = 128  # drafted tokens of a request that vLLM's rejection sampler takes; it asserts that, but only when they come


class Proposer:
    """For `{"method": "custom_class", "model": "bozza.vllm.Proposer", "num_speculative_tokens": 16}`.

    Options come from the environment, see `Options`.

    Args:
        vllm_config: vLLM's own configuration.

    Raises:
        ConfigError: vLLM is of another version or set up in a way that cannot work, or an option is wrong.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine()
        parallel = vllm_config.parallel_config
        options = of_replica(read_options(os.environ), parallel.data_parallel_index)
        _check_ranks(parallel, options)
        self._log = logging.getLogger("bozza")
        self._drafting = _drafting(vllm_config, options) if decides(parallel) else None

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the next step.

        Args:
            sampled_token_ids: per row, what the step committed; empty for a prompt that is not read to its end.
            num_tokens_no_spec: [rows] tokens of each row, the committed ones included.
            token_ids_cpu: [rows, context] the tokens.
            slot_mappings: where keys and values are; not used.

        Returns:
            Per row at most num_speculative_tokens tokens.
        """
        if self._drafting is None:
            return [[] for _ in sampled_token_ids]
        try:
            return self._drafting.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # vLLM would end all requests; without drafts they end as they should
            self._log.exception("Bozza's proposer failed and drafts nothing from here on; please report this")
            self._drafting = None
            return [[] for _ in sampled_token_ids]

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""


def check_engine() -> None:
    """Refuse any vLLM whose protocol is not known.

    Raises:
        ConfigError: vLLM is missing or of another version.
    """
    try:
        version = getattr(importlib.import_module("vllm"), "__version__", None)
    except ImportError:
        version = None
    if version is None:
        raise ConfigError(f"bozza.vllm runs inside vLLM {SUPPORTED}, which is not installed here: see docs/vllm.md")
    if not str(version).startswith(f"{SUPPORTED}."):
        raise ConfigError(
            f"this bozza runs inside vLLM {SUPPORTED}, and this is vLLM {version}: install vLLM {SUPPORTED}, "
            "or the bozza that docs/vllm.md names for yours"
        )


def decides(parallel: Any) -> bool:
    """Whether what this worker proposes is used."""
    if _schedules_itself(parallel):
        return True
    return bool(parallel.rank % (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size) == 0)


def of_replica(options: Options, index: int) -> Options:
    """What the replica of this number uses: all of them have one environment, and may share a machine.

    Raises:
        ConfigError: what is left for it cannot be used.
    """
    if index == 0:
        return options
    shared, trace, port = options.shared_history, options.trace, options.metrics_port
    return replace(
        options,
        shared_history=f"{shared}.{index}" if isinstance(shared, str) else shared,
        trace=None if trace is None else f"{trace}.{index}",
        metrics_port=None if port is None else port + index,
    )


def _schedules_itself(parallel: Any) -> bool:
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        return any(base.__name__ == LAUNCHER for base in backend.__mro__)
    return str(backend).rpartition(".")[2] in (EVERY_RANK, LAUNCHER)


def _check_ranks(parallel: Any, options: Options) -> None:
    """Where every rank schedules for itself, all must come to the same drafts, or they wait for each other forever."""
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"vLLM {SUPPORTED} cannot draft across pipeline stages with this model runner (its first stage asks for a "
            "drafter that only the last one has): use tensor parallel"
        )
    if not _schedules_itself(parallel) or parallel.world_size == 1:
        return
    if options.policy == "adaptive" and options.clock != "steps":
        raise ConfigError(
            f'with {EVERY_RANK} every rank decides, and must decide alike: set "clock": "steps" in {VARIABLE}'
        )
    if isinstance(options.shared_history, str) or options.trace is not None or options.metrics_port is not None:
        raise ConfigError(
            f"with {EVERY_RANK} every rank would use the same file or port: drop shared_history's file, "
            f"trace and metrics_port from {VARIABLE}"
        )


def _limits(vllm_config: Any) -> Limits:
    scheduler = vllm_config.scheduler_config
    drafted = vllm_config.speculative_config.num_speculative_tokens
    if drafted > MOST:
        raise ConfigError(
            f"num_speculative_tokens is {drafted}, and vLLM {SUPPORTED} verifies {MOST} at most: 16 is good"
        )
    return Limits(
        drafted,
        vllm_config.model_config.max_model_len,
        scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        vllm_config.model_config.get_vocab_size(),
    )


def _drafting(vllm_config: Any, options: Options) -> Drafting:
    limits = _limits(vllm_config)
    history: SharedHistory | None = None
    if isinstance(options.shared_history, str):
        identity = f"vllm {vllm_config.model_config.model} {limits.vocabulary}"
        history = SharedHistory(file=options.shared_history, identity=identity)
    elif options.shared_history:
        history = SharedHistory()
    trace = _Trace(options.trace) if options.trace is not None else None
    if options.metrics_port is not None:
        serve(options.metrics_port)
    show = Metrics().show if importlib.util.find_spec("prometheus_client") is not None else None
    drafting = Drafting(options, limits, time.monotonic, history, trace.write if trace is not None else None, show)
    if trace is not None:
        weakref.finalize(drafting, trace.close)
    return drafting


class _Trace:
    """A file of decisions. It ends where it cannot be written any more: a full disk must not cost drafts."""

    def __init__(self, path: str) -> None:
        self._file: DecisionLog | None = DecisionLog(path)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(record)
        except (ConfigError, ValueError) as problem:
            logging.getLogger("bozza").warning("nothing is traced from here on: %s", first_line(problem))
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
