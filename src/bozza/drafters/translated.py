"""Draft models with another tokenizer than the target's, as dialects of `ModelDrafter`.

`ThroughText` lets the draft model write as it likes and tokenises its text for the target: a guess, which `coupled`
may be given from anywhere. `ThroughShared` keeps to the tokens that both vocabularies have, so that the law over the
target's ids can be stated exactly, as the rules with coins need it (Timor et al., 2025: SLEM and TLI).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bozza.core import Request
from bozza.drafters.model import Dialect
from bozza.errors import ModelError
from bozza.models.runner import Model
from bozza.models.translation import Transcript, Translation

LEAST_SHARE = 0.2  # of the draft model's tokens that must be the target's too, where nothing else can be drawn


class DraftModel(NamedTuple):
    """A draft model that is ready to run."""

    name: str
    runner: Model
    translation: Translation | None  # None: its tokens are the target's


class _Translated:
    """What both ways have in common.

    Args:
        translation: between the vocabularies.
        ids: draft id -> the id that it is drawn as; others are never drawn.
        size: how many ids there are to draw from.
    """

    def __init__(self, translation: Translation, ids: dict[int, int], size: int, device: torch.device) -> None:
        self._translation = translation
        self._transcripts: dict[int, Transcript] = {}
        self._spoken = {drawn: token for token, drawn in ids.items()}
        self._from = torch.tensor(list(ids), dtype=torch.int64, device=device)
        self._to = torch.tensor(list(ids.values()), dtype=torch.int64, device=device)
        self._size = size

    def context(self, request: Request) -> tuple[Sequence[int], int]:
        """See `Dialect.context`."""
        if request.id not in self._transcripts:
            self._transcripts[request.id] = Transcript(self._translation)
        return self._transcripts[request.id].follow(request.tokens)

    def spread(self, logits: Tensor) -> Tensor:
        """See `Dialect.spread`; -inf for what the draft model does not have."""
        over = logits.new_full((len(logits), self._size), -torch.inf)
        over[:, self._to] = logits[:, self._from]
        return over

    def spoken(self, token: int) -> int | None:
        """See `Dialect.spoken`."""
        return self._spoken.get(token)

    def forget(self, request: Request) -> None:
        """See `Dialect.forget`."""
        self._transcripts.pop(request.id, None)


class ThroughShared(_Translated):
    """Draws only tokens that both models have, as the target's ids: the draft model's law given that it says one.

    Args:
        translation: between the vocabularies.
        vocab_size: the target's.
        device: the draft model's.
    """

    def __init__(self, translation: Translation, vocab_size: int, device: torch.device) -> None:
        shared = {token: id_ for id_, token in translation.shared.items()}
        super().__init__(translation, shared, vocab_size, device)

    def written(self, drawn: Sequence[int]) -> Sequence[int]:
        """See `Dialect.written`."""
        return drawn


class ThroughText(_Translated):
    """Draws all tokens of text, and writes them in the target's tokens.

    Tokens that both have are drawn as the target's ids, with the output's own noise; the others as ids behind these,
    so that a sampled draft meets the output wherever it can. What was drawn is tokenised by itself: the request's last
    token stands, and if another tokenisation would have joined it with the draft, the target has chosen differently
    already. The last drafted token may be half of one; it stays, since a wrong guess at the end costs a row at most.

    Args:
        translation: between the vocabularies.
        vocab_size: the target's.
        device: the draft model's.
    """

    def __init__(self, translation: Translation, vocab_size: int, device: torch.device) -> None:
        draft = translation.draft
        ids = {token: id_ for id_, token in translation.shared.items()}
        own = {token for token in draft.pieces if token not in ids}
        ids |= {token: vocab_size + place for place, token in enumerate(sorted(own))}
        super().__init__(translation, ids, vocab_size + len(own), device)
        self._pieces = {id_: draft.pieces[token] for token, id_ in ids.items() if token in draft.pieces}

    def written(self, drawn: Sequence[int]) -> Sequence[int]:
        """See `Dialect.written`."""
        target = self._translation.target
        tokens: list[int] = []
        for is_text, run in itertools.groupby(drawn, lambda token: token in self._pieces):
            new = list(run)
            if is_text:
                new = target.encode(b"".join(self._pieces[token] for token in new))
                # What the target's tokenizer cannot write comes out as a token without text: nothing can follow it.
                unwritten = (place for place, token in enumerate(new) if token not in target.pieces)
                end = next(unwritten, None)
                if end is not None:
                    return tokens + new[:end]
            tokens += new
        return tokens


def dialect_for(draft: DraftModel, vocab_size: int, shared: bool) -> Dialect | None:
    """How to draft with a model; None when it has the target's tokens.

    Args:
        draft: the model.
        vocab_size: the target's.
        shared: tokens that only the draft model has must not be drawn: laws are to be stated, or trees to be grown.

    Raises:
        ModelError: then the two have too little in common.
    """
    translation = draft.translation
    if translation is None:
        return None
    if not shared:
        return ThroughText(translation, vocab_size, draft.runner.device)
    if translation.share < LEAST_SHARE:
        raise ModelError(
            f"the target has only {translation.share:.1%} of {draft.name}'s tokens, too few to draw from: "
            "use rule 'coupled' and no width, or a draft model of the same family"
        )
    return ThroughShared(translation, vocab_size, draft.runner.device)
