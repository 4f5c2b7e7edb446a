"""Rule `block`: the whole chain is accepted or cut together (Sun et al., 2024, block verification).

Token by token, `rejection` loses the surplus of a prefix that the target likes better than the drafter does. Here the
surplus is carried along: with p_0 = 1 and p_i = min(1, p_{i-1} P(x_i) / Q(x_i)), position i may be the last accepted
one with probability h_i = Z_i / (Z_i + 1 - p_i), Z_i = sum_x max(p_i P_i(x) - Q_i(x), 0), and h_g = p_g. All positions
are tried, and the last success stands; the next token is drawn from the positive part of p_i P_i - Q_i. The law
of the output is the target's, and the expected number of accepted tokens at least that of `rejection`.
"""

from __future__ import annotations

from bozza.core import Draft, Request, Verdict
from bozza.rules.rejection import Laws, Rejection, proposed, walk
from bozza.sampling.chance import Chance


class Block(Rejection):
    """Block verification of chains. Trees and merged drafts are judged by recursive rejection, which is as exact.

    So are requests with processors or a grammar of their own, whose laws can only be had in turn.
    """

    name = "block"

    def judge(self, laws: Laws, draft: Draft, request: Request, chance: Chance) -> Verdict:
        """See `Rejection.judge`."""
        chain = not draft.merged and draft.parents == tuple(range(-1, len(draft) - 1))
        if chain and not request.params.in_turn:
            return judge_block(laws, draft, chance)
        return walk(laws, draft, chance, request.end_ids)


def judge_block(laws: Laws, draft: Draft, chance: Chance) -> Verdict:
    """The verdict on a chain."""
    accepted, carried = 0, 1.0  # how many tokens stand, and p at the last of them
    share = 1.0  # p_i
    for count in range(1, len(draft) + 1):
        token = draft.tokens[count - 1]
        law = laws(count - 2)
        share = min(1.0, share * float(law[token]) / float(proposed(draft, count - 1, law)[token]))
        if chance.accept(_last_here(laws, draft, count, share)):
            accepted, carried = count, share
    law = laws(accepted - 1)
    if accepted < len(draft):
        left = (carried * law - proposed(draft, accepted, law)).clamp_(min=0.0)
        law = left if float(left.sum()) > 0.0 else law
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], chance.pick(law)))


def _last_here(laws: Laws, draft: Draft, count: int, share: float) -> float:
    """h: the probability that `count` tokens are accepted, given that no more are."""
    if count == len(draft):
        return share
    law = laws(count - 1)
    surplus = float((share * law - proposed(draft, count, law)).clamp_(min=0.0).sum())
    return surplus / (surplus + (1.0 - share)) if surplus > 0.0 else 0.0
