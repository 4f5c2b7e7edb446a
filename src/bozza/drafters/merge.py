"""Drafts of several drafters for one request become one tree, so that one pass hedges between them."""

from __future__ import annotations

from collections.abc import Sequence

from bozza.core import Draft


def merge(drafts: Sequence[Draft], nodes: int) -> Draft:
    """The union of the drafts' paths: equal prefixes become one node, credited to whoever came first.

    Args:
        drafts: in order of trust.
        nodes: the most nodes in the result. When there are more, all drafts are cut at the same depth.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) == 1:
        return drafts[0].head(nodes)
    depth = max((max(draft.depths()) for draft in drafts), default=0)
    union = _union(drafts, depth)
    while len(union) > nodes and depth > 1:
        depth -= 1
        union = _union(drafts, depth)
    return union.head(nodes)


def _union(drafts: Sequence[Draft], depth: int) -> Draft:
    """All paths of the drafts down to a depth."""
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    drafters: list[str] = []
    for draft in drafts:
        merged: list[int] = []  # node of the draft -> node of the union; what is too deep has only deeper children
        for token, parent, drafter, deep in zip(
            draft.tokens, draft.parents, draft.drafters, draft.depths(), strict=True
        ):
            if deep > depth:
                merged.append(-1)
                continue
            key = (merged[parent] if parent >= 0 else -1, token)
            if key not in index:
                index[key] = len(index)
                drafters.append(drafter)
            merged.append(index[key])
    return Draft(tuple(token for _, token in index), tuple(parent for parent, _ in index), tuple(drafters))
