"""Drafts of several drafters for one request become one tree, so that one pass hedges between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bozza.core import Draft


def merge(drafts: Sequence[Draft], nodes: int) -> Draft:
    """The union of the drafts' paths: equal prefixes become one node, credited to whoever came first.

    Args:
        drafts: in order of trust.
        nodes: the most nodes in the result. When there are more, all drafts are cut at the same depth.

    Where drafts were sampled, the depth of the cut must not depend on what was drawn (a node that stays only because
    others met would no longer be distributed as its drafter says): nodes that meet are then counted twice.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) == 1:
        return drafts[0].head(nodes)
    depth = max((max(draft.depths()) for draft in drafts), default=0)
    sampled = any(law is not None for draft in drafts for law in draft.laws)
    union = _union(drafts, depth)
    while depth > 1 and (_together(drafts, depth) if sampled else len(union)) > nodes:
        depth -= 1
        union = _union(drafts, depth)
    return union.head(nodes)


def _together(drafts: Sequence[Draft], depth: int) -> int:
    """Nodes of all drafts down to a depth."""
    return sum(deep <= depth for draft in drafts for deep in draft.depths())


def _union(drafts: Sequence[Draft], depth: int) -> Draft:
    """All paths of the drafts down to a depth."""
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    drafters: list[str] = []
    laws: list[Any] = []
    confidences: list[float] = []
    for draft in drafts:
        merged: list[int] = []  # node of the draft -> node of the union; what is too deep has only deeper children
        for node, (token, parent, drafter, deep) in enumerate(
            zip(draft.tokens, draft.parents, draft.drafters, draft.depths(), strict=True)
        ):
            if deep > depth:
                merged.append(-1)
                continue
            key = (merged[parent] if parent >= 0 else -1, token)
            if key not in index:
                index[key] = len(index)
                drafters.append(drafter)
                laws.append(draft.law(node))
                confidences.append(0.0)
            merged.append(index[key])
            confidences[index[key]] = max(confidences[index[key]], draft.confidence(node) or 0.0)
    tokens, parents = tuple(token for _, token in index), tuple(parent for parent, _ in index)
    return Draft(tokens, parents, tuple(drafters), tuple(laws), True, tuple(confidences))
