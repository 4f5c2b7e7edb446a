"""Conversations laid side by side, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bozza.train.features import KEPT, Features


@dataclass(frozen=True, slots=True)
class Lines:
    """Several conversations, filled up behind to the same length, so that nothing sees what fills up."""

    tokens: Tensor  # int64 [lines, length]
    hidden: Tensor  # bfloat16 [lines, length, width], the target's features of each token
    due: Tensor  # bool [lines, length]: places after which a token of the answer comes
    law_ids: Tensor  # int64 [lines, length, kept], the likeliest tokens there
    law_probs: Tensor  # float32, their probabilities

    def ahead(self, steps: int) -> Lines:
        """The same, as seen `steps` tokens earlier: place s shows what stands at s + steps."""
        if steps == 0:
            return self
        parts = (self.tokens, self.hidden, self.due, self.law_ids, self.law_probs)
        return Lines(*(_shifted(part, steps) for part in parts))

    @property
    def next_tokens(self) -> Tensor:
        """int64 [lines, length], the token after each place; -1 behind the end."""
        return functional.pad(self.tokens[:, 1:], (0, 1), value=-1)


def _shifted(part: Tensor, steps: int) -> Tensor:
    return functional.pad(part[:, steps:], (0, 0) * (part.dim() - 2) + (0, steps))


def lay_out(features: Features, chosen: Sequence[int], device: torch.device) -> Lines:
    """Some conversations of the data."""
    conversations = [features.conversations[index] for index in chosen]
    length = max(len(conversation.tokens) for conversation in conversations)
    tokens = torch.zeros(len(chosen), length, dtype=torch.int64)
    hidden = torch.zeros(len(chosen), length, features.hidden.shape[1], dtype=torch.bfloat16)
    due = torch.zeros(len(chosen), length, dtype=torch.bool)
    law_ids = torch.zeros(len(chosen), length, KEPT, dtype=torch.int64)
    law_probs = torch.zeros(len(chosen), length, KEPT)
    for line, (index, conversation) in enumerate(zip(chosen, conversations, strict=True)):
        count = len(conversation.tokens)
        tokens[line, :count] = torch.tensor(conversation.tokens)
        if features.layers:
            hidden[line, :count] = features.features(index)
        due[line, max(conversation.prompt_len - 1, 0) : count - 1] = True
        law_ids[line, :count], law_probs[line, :count] = features.laws(index)
    return Lines(*(part.to(device) for part in (tokens, hidden, due, law_ids, law_probs)))


class Frequent:
    """The tokens over which laws are compared, and the output rows of these.

    Args:
        targets: int64 [tokens], their ids.
        rows: [tokens, size].
        vocab_size: of the target.
    """

    def __init__(self, targets: Tensor, rows: Tensor, vocab_size: int) -> None:
        self.targets = targets.to(rows.device)
        self.rows = rows.detach()
        self._place = torch.full((vocab_size,), -1, device=rows.device)
        self._place[self.targets] = torch.arange(len(targets), device=rows.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., tokens] of hidden states [..., size] after the final norm."""
        return functional.linear(hidden, self.rows)

    def entropy(self, logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """Mean cross-entropy of logits [places, tokens] against laws on these tokens; a law without any counts as 0."""
        return cross_entropy(logits, self._place[ids], probs)


def cross_entropy(logits: Tensor, places: Tensor, probs: Tensor) -> Tensor:
    """Mean over rows, against a law of which the tokens at `places` [rows, kept] are known; -1: no token of ours."""
    known = probs.masked_fill(places < 0, 0.0)
    known = known / known.sum(dim=1, keepdim=True).clamp(min=1e-3)
    likely = logits.gather(1, places.clamp(min=0))
    return (known.sum(dim=1) * logits.logsumexp(dim=1) - (known * likely).sum(dim=1)).mean()
