"""Where committed tokens end. Tokens pass one by one, so that a block stops exactly where single tokens would."""

from __future__ import annotations

from collections.abc import Sequence

from bozza.core import FinishReason, Request


def cut(request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
    """The leading `tokens` that the request takes, and why it ends there if it does.

    An end token is kept and counts; one that is the last allowed token finishes with "stop", not "length". Watches hear
    every token that the request takes, and no other.
    """
    for count, token in enumerate(tokens, 1):
        ended = [watch.push(token) for watch in request.watches]
        if request.constraint is not None and request.constraint.failure is not None:
            return tokens[:count], "abort"
        if token in request.end_ids or any(ended):
            return tokens[:count], "stop"
        if count == request.remaining:
            return tokens[:count], "length"
    return tokens, None
