"""The only module that knows vLLM: its `custom_class` protocol, its configuration and its version.

vLLM makes one `Proposer` in each worker of the last pipeline stage and calls `propose` after each step. Only the answer
of the first of these workers is used (`Executor._get_output_rank`); it goes to the scheduler, which tells all workers
what to verify. So that worker decides, and the others stay idle: they cannot disagree.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from bozza.drafters.history import SharedHistory
from bozza.errors import ConfigError
from bozza.leader.log import DecisionLog
from bozza.vllm.drafting import Drafting, Limits
from bozza.vllm.metrics import Metrics, serve
from bozza.vllm.options import VARIABLE, Options, read_options

SUPPORTED = "0.32"  # the minor version whose protocol this is
EVERY_RANK = "external_launcher"  # the executor whose workers each run a scheduler of their own


class Proposer:
    """For `{"method": "custom_class", "model": "bozza.vllm.Proposer", "num_speculative_tokens": 16}`.

    Options come from the environment, see `Options`.

    Args:
        vllm_config: vLLM's own configuration.

    Raises:
        ConfigError: vLLM is of another version, or an option is wrong.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine()
        options = read_options(os.environ)
        _check_ranks(vllm_config.parallel_config, options)
        self._log = logging.getLogger("bozza")
        self._drafting = _drafting(vllm_config, options) if decides(vllm_config.parallel_config) else None

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
    if parallel.distributed_executor_backend == EVERY_RANK:
        return True
    return bool(parallel.rank % (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size) == 0)


def _check_ranks(parallel: Any, options: Options) -> None:
    """Where every rank schedules for itself, all must come to the same drafts, or they wait for each other forever."""
    if parallel.distributed_executor_backend != EVERY_RANK or parallel.world_size == 1:
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


def _drafting(vllm_config: Any, options: Options) -> Drafting:
    limits = Limits(
        vllm_config.speculative_config.num_speculative_tokens,
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    history: SharedHistory | None = None
    if isinstance(options.shared_history, str):
        model = vllm_config.model_config
        history = SharedHistory(file=options.shared_history, identity=f"vllm {model.model} {model.get_vocab_size()}")
    elif options.shared_history:
        history = SharedHistory()
    log = DecisionLog(options.trace) if options.trace is not None else None
    if options.metrics_port is not None:
        serve(options.metrics_port)
    show = Metrics().show if importlib.util.find_spec("prometheus_client") is not None else None
    drafting = Drafting(options, limits, time.monotonic, history, log.write if log is not None else None, show)
    if log is not None:
        weakref.finalize(drafting, log.close)
    return drafting
