"""The leader decides, per request and step, which drafters are asked and what of their drafts is verified."""

from bozza.leader.adaptive import Adaptive
from bozza.leader.base import Ask, Leader
from bozza.leader.cost import CostModel
from bozza.leader.fixed import Fixed, Off

__all__ = ["Adaptive", "Ask", "CostModel", "Fixed", "Leader", "Off"]
