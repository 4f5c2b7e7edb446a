"""An EAGLE-3 head drafts a tree, see `bozza.drafters.heads`: one pass of the head per level."""

from __future__ import annotations

from bozza.drafters.heads import HeadDrafter
from bozza.drafters.tree import WIDTH
from bozza.models.head_runner import HeadRunner


class EagleDrafter(HeadDrafter):
    """See `HeadDrafter`.

    Args:
        runner: runs the head.
        name: its own.
        coupled: see `bozza.drafters.tree.Rank`.
        width: most children of a node, and nodes that get children at one level.
    """

    def __init__(self, runner: HeadRunner, name: str = "eagle", *, coupled: bool = True, width: int = WIDTH) -> None:
        super().__init__([runner], name, coupled=coupled, width=width)
