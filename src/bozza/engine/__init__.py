"""The loop that serves requests. It knows token ids, never text."""

from bozza.engine.loop import Engine

__all__ = ["Engine"]
