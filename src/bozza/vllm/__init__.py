"""Bozza's leader and free drafters inside vLLM: see docs/vllm.md.

`bozza.vllm.Proposer` is the class for `--speculative-config`. Only `proposer.py` knows vLLM; what it adapts
(`Drafting` and below) runs, and is tested, without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bozza.vllm.proposer import Proposer

__all__ = ["Proposer"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that whoever asks for it without vLLM reads one line that says so.
    if name == "Proposer":
        from bozza.vllm.proposer import Proposer, check_engine

        check_engine()
        return Proposer
    raise AttributeError(f"module 'bozza.vllm' has no attribute '{name}'")
