"""Multi-token-prediction modules draft, see `bozza.drafters.heads`: a chain, or with `width` a tree."""

from __future__ import annotations

from collections.abc import Sequence

from bozza.drafters.heads import HeadDrafter
from bozza.models.head_runner import HeadRunner

WIDTH = 1  # modules are trained to continue one text: each further branch costs a row in every later module


class MtpDrafter(HeadDrafter):
    """See `HeadDrafter`.

    Args:
        runners: run the modules, in their order.
        name: its own.
        coupled: see `bozza.drafters.tree.Rank`.
        width: most children of a node, and nodes that get children at one level.
    """

    def __init__(
        self, runners: Sequence[HeadRunner], name: str = "mtp", *, coupled: bool = True, width: int = WIDTH
    ) -> None:
        super().__init__(runners, name, coupled=coupled, width=width)
