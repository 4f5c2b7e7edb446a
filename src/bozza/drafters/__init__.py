"""Drafters guess the next tokens of a request. None of them decides how much is guessed: that is the leader's."""

from bozza.drafters.base import Drafter
from bozza.drafters.merge import merge
from bozza.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter", "merge"]
