"""The seam between the target's logits and the tokens that are committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from bozza.core import Draft, Request, Verdict


class Rule(Protocol):
    """Judges the drafts of one pass."""

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """One verdict per request.

        Args:
            logits: [rows, vocab] float32; for each request in turn, the row after its last committed token, then one
            row
                per node of its draft.
            requests: those whose next token is due.
            drafts: one per request, possibly empty.
        """
        ...
