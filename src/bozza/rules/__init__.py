"""Rules decide which drafted tokens stand. Each is lossless in the sense that its module states."""

from bozza.rules.base import Rule
from bozza.rules.coupled import Coupled

__all__ = ["Coupled", "Rule"]
