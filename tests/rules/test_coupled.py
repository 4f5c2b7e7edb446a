import itertools

import pytest
import torch

from bozza.core import Draft, Request
from bozza.params import SamplingParams
from bozza.rules import Coupled
from bozza.sampling.sampler import Draw, draw_tokens

VOCAB = 3


def request(temperature, seed=0, length=2):
    params = SamplingParams(temperature=temperature, max_tokens=50)
    return Request(0, [1] * length, 2, params, seed, frozenset(), 100)


def table(seed=0):
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def plain(law, last, temperature, seed, length, count):
    """Tokens drawn one at a time."""
    tokens = []
    for position in range(length, length + count):
        draw = Draw(SamplingParams(temperature=temperature), seed, position)
        last = draw_tokens(law[last][None], [draw])[0]
        tokens.append(last)
    return tokens


TREES = [
    Draft(),
    *(Draft.chain(tokens, "x") for tokens in itertools.product(range(VOCAB), repeat=2)),
    Draft((0, 1, 2), (-1, -1, -1), ("x",) * 3),
    Draft((0, 1, 0, 1, 2, 2), (-1, -1, 0, 0, 1, 3), ("x",) * 6),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_tree_commits_what_plain_drawing_commits(temperature):
    law = table()
    deep = 0
    for seed, draft, last in itertools.product(range(20), TREES, range(VOCAB)):
        asked = request(temperature, seed, length=6)
        logits = law[[last, *draft.tokens]]
        verdict = Coupled().verify(logits, [asked], [draft])[0]
        assert len(verdict.tokens) == len(verdict.path) + 1
        assert [draft.tokens[node] for node in verdict.path] == list(verdict.tokens[:-1])
        assert all(draft.parents[b] == a for a, b in itertools.pairwise((-1, *verdict.path)))
        assert list(verdict.tokens) == plain(law, last, temperature, seed, 4, len(verdict.tokens))
        # Nothing that was drafted and drawn is left on the table.
        children = {(p, t) for p, t in zip(draft.parents, draft.tokens, strict=True)}
        assert (verdict.path[-1] if verdict.path else -1, verdict.tokens[-1]) not in children
        deep += len(verdict.path) >= 2
    assert deep > 10


def test_requests_of_one_pass_do_not_mix():
    law = table(1)
    asked = [request(1.0, seed) for seed in range(5)]
    drafts = [TREES[0], TREES[3], TREES[-1], TREES[5], TREES[-2]]
    rows = torch.cat([law[[1, *draft.tokens]] for draft in drafts])
    together = Coupled().verify(rows, asked, drafts)
    alone = [Coupled().verify(law[[1, *d.tokens]], [q], [d])[0] for q, d in zip(asked, drafts, strict=True)]
    assert together == alone


def test_nothing_due_is_no_verdict():
    assert Coupled().verify(torch.empty(0, VOCAB), [], []) == []


def test_negative_control_a_position_off_by_one_is_noticed():
    law, differs = torch.zeros(VOCAB, VOCAB), 0
    for seed in range(50):
        draft = Draft.chain(plain(law, 1, 1.0, seed, 0, 3), "x")
        good = request(1.0, seed)
        shifted = request(1.0, seed, length=3)
        logits = law[[1, *draft.tokens]]
        assert len(Coupled().verify(logits, [good], [draft])[0].path) == 3
        differs += len(Coupled().verify(logits, [shifted], [draft])[0].path) < 3
    assert differs > 40
