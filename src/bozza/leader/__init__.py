"""The leader decides, per request and step, which drafters are asked and for how many tokens."""

from bozza.leader.base import Leader
from bozza.leader.fixed import Fixed, Off

__all__ = ["Fixed", "Leader", "Off"]
