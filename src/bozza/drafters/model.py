"""A smaller model with the target's vocabulary drafts a chain, one pass of all its requests per token.

Under a rule that accepts by equality (`coupled`) it draws with the target's own noise: where both models give a token
the best chance, they draw the same one. Beside acceptance draws (`rejection`, `block`) it draws with a noise of its own
and says from what, with the same temperature, filters, penalties and bans as the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bozza.core import NO_DRAFT, Draft, Request
from bozza.models.runner import Model, Row
from bozza.sampling.chance import Coins
from bozza.sampling.processors import Place
from bozza.sampling.sampler import Sampler

CHUNK = 512  # prompt tokens per request and pass


@dataclass(slots=True)
class _State:
    slot: int
    fed: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the slot
    readable: bool = True  # False once the request holds a token that the draft model lacks
    agreed: int = 0  # leading tokens of `fed` that are known to be the request's own


class ModelDrafter:
    """Owns its slots in the draft model. What the target rejected is rolled back when the request drafts next.

    Args:
        model: the draft model, ready to run.
        vocab_size: the target's; a token at or above it is never proposed, however far either embedding is padded.
        coupled: draw with the noise of the output (see `Rule.coupled`).
    """

    def __init__(self, model: Model, vocab_size: int, name: str = "model", *, coupled: bool = True) -> None:
        self.name = name
        self._coupled = coupled
        self._sampler = Sampler(in_turn=False)
        self._model = model
        self._vocab = min(vocab_size, model.vocab_size)
        self._states: dict[int, _State] = {}

    def start(self, request: Request) -> None:
        """See `Drafter.start`; a slot is taken at the first draft."""

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """See `Drafter.observe`; the request's tokens are compared with what was fed at the next draft."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See `Drafter.draft`. A request that the draft model cannot read gets an empty draft.

        That is one which has outgrown its context, or holds a token that only the target has.
        """
        room = [
            min(budget, self._model.context_length - len(request.tokens) + 1)
            for request, budget in zip(requests, budgets, strict=True)
        ]
        able = [pair for pair in zip(requests, room, strict=True) if pair[1] > 0 and self._reads(pair[0])]
        drafted = self._draw_chains(able)
        return [drafted.get(request.id, NO_DRAFT) for request in requests]

    def stop(self, request: Request) -> None:
        """See `Drafter.stop`."""
        if state := self._states.pop(request.id, None):
            self._model.free(state.slot)

    def _draw_chains(self, able: Sequence[tuple[Request, int]]) -> dict[int, Draft]:
        chains: dict[int, list[int]] = {request.id: [] for request, _ in able}
        laws: dict[int, list[Tensor]] = {request.id: [] for request, _ in able}
        coins = {request.id: Coins(request, f"draft {self.name}") for request, _ in able}
        pending = {request.id: self._unread(request) for request, _ in able}
        self._read_prompts(pending)
        for depth in range(max((budget for _, budget in able), default=0)):
            # A law of nothing but NaN gives no token, and its chain ends there.
            active = [request for request, budget in able if budget > depth and len(chains[request.id]) == depth]
            if not active:
                break
            logits = self._read(active, [pending[request.id] for request in active])
            places = [Place(request, tuple(chains[request.id])) for request in active]
            if self._coupled:
                tokens = self._sampler.draw(logits, places)
                for request, token in zip(active, tokens, strict=True):
                    chains[request.id].append(token)
            else:
                for request, law in zip(active, self._sampler.laws(logits, places), strict=True):
                    if bool(law.sum() > 0.0):
                        laws[request.id].append(law)
                        chains[request.id].append(coins[request.id].pick(law))
            for request in active:
                pending[request.id] = chains[request.id][-1:]
        return {id_: Draft.chain(tokens, self.name, laws[id_]) for id_, tokens in chains.items()}

    def _reads(self, request: Request) -> bool:
        """Whether the draft model has all of the request's tokens."""
        state = self._states.get(request.id)
        if state is None:
            state = self._states[request.id] = _State(self._model.alloc())
        state.readable = state.readable and max(request.tokens[state.agreed :], default=0) < self._model.vocab_size
        return state.readable

    def _unread(self, request: Request) -> list[int]:
        """Roll the request's slot back to what was committed, and return the tokens that it lacks: at least one."""
        state = self._states[request.id]
        tokens, fed = request.tokens, state.fed
        end = min(len(fed), len(tokens) - 1)
        while state.agreed < end and fed[state.agreed] == tokens[state.agreed]:
            state.agreed += 1
        self._model.truncate(state.slot, state.agreed)
        del fed[state.agreed :]
        return tokens[state.agreed :]

    def _read_prompts(self, pending: dict[int, list[int]]) -> None:
        """Shorten each list of unread tokens to one chunk, the whole batch at once."""
        while long := [id_ for id_, tokens in pending.items() if len(tokens) > CHUNK]:
            self._model.forward([Row(self._states[id_].slot, pending[id_][:CHUNK], wanted=0) for id_ in long])
            for id_ in long:
                self._states[id_].fed += pending[id_][:CHUNK]
                pending[id_] = pending[id_][CHUNK:]

    def _read(self, requests: Sequence[Request], unread: Sequence[list[int]]) -> Tensor:
        """Feed each request's unread tokens; logits of the next one [requests, vocab]."""
        rows = [Row(self._states[request.id].slot, tokens) for request, tokens in zip(requests, unread, strict=True)]
        logits = self._model.forward(rows).logits[:, : self._vocab]
        for request, tokens in zip(requests, unread, strict=True):
            self._states[request.id].fed += tokens
        return logits
