"""Rules decide which drafted tokens stand. Each is lossless in the sense that its module states."""

from bozza.rules.base import Rule
from bozza.rules.block import Block
from bozza.rules.coupled import Coupled
from bozza.rules.rejection import Rejection

RULES: dict[str, type[Coupled | Rejection]] = {rule.name: rule for rule in (Coupled, Rejection, Block)}

__all__ = ["RULES", "Block", "Coupled", "Rejection", "Rule"]
