"""Drafts of several drafters for one request become one tree, so that one pass hedges between them."""

from __future__ import annotations

from collections.abc import Sequence

from bozza.core import Draft


def merge(drafts: Sequence[Draft], nodes: int) -> Draft:
    """The union of the drafts' paths: equal prefixes become one node, credited to whoever came first.

    Args:
        drafts: in order of trust; nodes of earlier drafts are kept first.
        nodes: the most nodes in the result.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) == 1:
        return drafts[0].head(nodes)
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens: list[int] = []
    parents: list[int] = []
    drafters: list[str] = []
    for draft in drafts:
        merged: list[int] = []  # node of the draft -> node of the union
        for token, parent, drafter in zip(draft.tokens, draft.parents, draft.drafters, strict=True):
            key = (merged[parent] if parent >= 0 else -1, token)
            if key not in index:
                if len(tokens) == nodes:
                    break
                index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                drafters.append(drafter)
            merged.append(index[key])
    return Draft(tuple(tokens), tuple(parents), tuple(drafters))
