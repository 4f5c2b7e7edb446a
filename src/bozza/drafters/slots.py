"""What a draft model has read of each request: one slot each, rolled back to what still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bozza.core import Draft
from bozza.models.runner import Model, Row

CHUNK = 512  # prompt tokens per request and pass


@dataclass(slots=True)
class _State:
    slot: int
    fed: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the slot
    readable: bool = True  # False once the request holds a token that the draft model lacks
    agreed: int = 0  # leading tokens of `fed` that are known to be the request's own
    settled: int = 0  # leading tokens of the request that can never be others


class Slots:
    """Reads requests, given as tokens of the draft model, and remembers how far.

    Args:
        model: the draft model, ready to run.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._states: dict[int, _State] = {}

    def unread(self, id_: int, tokens: Sequence[int], settled: int) -> list[int] | None:
        """Roll a request's slot back to what still holds, and return the tokens that it lacks: at least one.

        Args:
            id_: of the request; it gets a slot when it is new.
            tokens: all of its tokens.
            settled: how many of them will be the same at every later call.

        Returns:
            None when the draft model lacks one of the tokens.
        """
        state = self._states.get(id_)
        if state is None:
            state = self._states[id_] = _State(self._model.alloc())
        state.agreed = min(state.agreed, state.settled)
        state.readable = state.readable and max(tokens[state.agreed :], default=0) < self._model.vocab_size
        if not state.readable:
            return None
        state.settled = settled
        end = min(len(state.fed), len(tokens) - 1)
        while state.agreed < end and state.fed[state.agreed] == tokens[state.agreed]:
            state.agreed += 1
        del state.fed[state.agreed :]
        self.roll_back(id_)
        return list(tokens[state.agreed :])

    def roll_back(self, id_: int) -> None:
        """Forget the tree that was grown in a request's slot, or left there by an interrupted step."""
        state = self._states[id_]
        self._model.truncate(state.slot, len(state.fed))

    def read(self, unread: Mapping[int, Sequence[int]]) -> Tensor:
        """Feed requests what they lack; logits of the next tokens [requests, vocab]."""
        rows = [Row(self._states[id_].slot, tokens) for id_, tokens in unread.items()]
        logits = self._model.forward(rows).logits
        for id_, tokens in unread.items():
            self._states[id_].fed += tokens
        return logits

    def read_prompts(self, unread: Mapping[int, list[int]]) -> None:
        """Shorten each list of unread tokens to one chunk, the whole batch at once."""
        while long := {id_: tokens for id_, tokens in unread.items() if len(tokens) > CHUNK}:
            rows = [Row(self._states[id_].slot, tokens[:CHUNK], wanted=0) for id_, tokens in long.items()]
            self._model.forward(rows)
            for id_, tokens in long.items():
                self._states[id_].fed += tokens[:CHUNK]
                del tokens[:CHUNK]

    def expand(self, trees: Sequence[tuple[int, Draft, int]]) -> Tensor:
        """Logits after the new nodes of trees [new nodes, vocab].

        Args:
            trees: for each the request's id, all of its nodes, and how many of these the slot holds.
        """
        rows = [Row(self._states[id_].slot, (), draft, fed=fed) for id_, draft, fed in trees]
        return self._model.forward(rows).logits

    def free(self, id_: int) -> None:
        """Give a request's slot back, if it has one."""
        if state := self._states.pop(id_, None):
            self._model.free(state.slot)
