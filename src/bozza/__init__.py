"""Bozza: lossless speculative decoding. The same output as your model alone, only sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bozza.core import TokenLogprob
from bozza.errors import BozzaError, ConfigError, ModelError, PromptError, UnsupportedModel
from bozza.params import SamplingParams, Structured

if TYPE_CHECKING:
    from bozza.llm import LLM, Output
    from bozza.stream import Chunk, Stream

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BozzaError",
    "Chunk",
    "ConfigError",
    "ModelError",
    "Output",
    "PromptError",
    "SamplingParams",
    "Stream",
    "Structured",
    "TokenLogprob",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the leader and the free drafters run where torch is not wanted.
    if name in {"LLM", "Output"}:
        from bozza import llm

        return getattr(llm, name)
    if name in {"Chunk", "Stream"}:
        from bozza import stream

        return getattr(stream, name)
    raise AttributeError(f"module 'bozza' has no attribute '{name}'")
