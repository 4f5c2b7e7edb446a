"""The seam between the target's logits and the tokens that are committed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from bozza.core import Draft, Request, Verdict


class Rule(Protocol):
    """Judges the drafts of one pass."""

    name: str
    coupled: bool  # True: model drafters draw with the noise of the output; False: by themselves, and say from what

    def verify(self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[Verdict]:
        """One verdict per request.

        Args:
            logits: [rows, vocab], float; for each request in turn, the row after its last committed token, then one row
                per node of its draft.
            requests: those whose next token is due.
            drafts: one per request, possibly empty.
        """
        ...


def root_rows(drafts: Sequence[Draft]) -> list[int]:
    """The row of each request's last committed token; node i of its draft has the row i + 1 further on."""
    return list(itertools.accumulate((1 + len(draft) for draft in drafts[:-1]), initial=0)) if drafts else []
