"""The leader decides, per request and step, which drafters are asked and what of their drafts is verified."""

from bozza.leader.base import Ask, Leader
from bozza.leader.fixed import Fixed, Off

__all__ = ["Ask", "Fixed", "Leader", "Off"]
