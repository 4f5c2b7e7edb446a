"""Token recycling: the table holds what the target said, and the tree is the best one under the table."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bozza import LLM, SamplingParams
from bozza.core import Request
from bozza.drafters.base import Reading
from bozza.drafters.recycling import KEPT, LEAST, TRUST, RecyclingDrafter, Successors
from tiny import tiny, token_prompts


def request(tokens, id_=0):
    return Request(id_, list(tokens), len(tokens), SamplingParams(), 7, frozenset(), 10_000)


class Likely:
    """Laws after tokens, and which rows were asked for."""

    def __init__(self, table):
        self.laws = table
        self.asked = []

    def __call__(self, after):
        def likeliest(rows, count):
            self.asked.append([after[row] for row in rows])
            shares, ids = self.laws[[after[row] for row in rows]].topk(count, dim=1)
            return ids.tolist(), shares.tolist()

        return likeliest


def show(drafter, table, after, path=()):
    drafter.read(request([1]), Reading(0, None, tuple(after), tuple(path), table(after)))


def filled(laws, vocab):
    drafter = RecyclingDrafter(vocab)
    for token in range(vocab):
        show(drafter, Likely(laws), [token])
    return drafter


def test_a_token_of_the_vocabulary_takes_forty_bytes_and_little_more():
    table = Successors(32_000)
    held = sum(map(sys.getsizeof, (table._tokens, table._shares)))
    assert 40 * 32_000 < held < 44 * 32_000


def test_what_is_put_is_found_again_up_to_rounding():
    table = Successors(10)
    assert table.get(9, 0)[1] == 0.0
    assert table.get(9, 0)[1] == 0.0
    shares = [0.5, 0.2, 0.1, 0.05, 0.01, 0.001, 1e-9, 0.0]
    table.put(9, list(range(8)), shares)
    assert table.get(8, 0)[1] == 0.0
    assert [table.get(9, rank)[0] for rank in range(KEPT)] == list(range(8))
    assert [table.get(9, rank)[1] for rank in range(KEPT)] == pytest.approx(shares, abs=1 / 255)
    table.put(9, [3, 4], [1.0, 0.0])
    assert [table.get(9, rank)[0] for rank in range(3)] == [3, 4, 2]


def test_all_rows_are_kept_those_that_stood_last():
    laws = torch.rand(30, 30).softmax(dim=1)
    drafter, table, put = RecyclingDrafter(30), Likely(laws), []
    drafter._table.put = lambda token, *law: put.append(token)
    show(drafter, table, [3, 4, 5], path=[0])  # 3 and 4 stand, 5 does not
    show(drafter, table, [6, 5, 4, 7, 3], path=[1])
    show(drafter, table, [6], path=[])
    assert put == [5, 3, 4, 5, 7, 3, 6, 4, 6]
    show(drafter, table, [])  # a part of a prompt that needs no logits
    assert put[9:] == []


def test_the_newest_law_of_a_token_replaces_the_old_one():
    drafter = RecyclingDrafter(12)
    for seed in range(3):
        laws = torch.rand(12, 12, generator=torch.Generator().manual_seed(seed)) ** 9
        show(drafter, Likely(laws / laws.sum(dim=1, keepdim=True)), [3, 4, 5], path=[0])
        fresh = filled(laws / laws.sum(dim=1, keepdim=True), 12)
        for token in (3, 4, 5):
            for rank in range(KEPT):
                assert drafter._table.get(token, rank) == fresh._table.get(token, rank)


def best(drafter, last, nodes, vocab):
    """The values of the likeliest paths under the table, every path looked at."""
    values = {}

    def below(path, value):
        for rank in range(min(KEPT, vocab)):
            token, share = drafter._table.get(path[-1] if path else last, rank)
            if share * TRUST * value >= LEAST:
                values[*path, token] = share * TRUST * value
                below((*path, token), share * TRUST * value)

    below((), 1.0)
    return values, sorted(values.values(), reverse=True)[:nodes]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 12), st.floats(0.2, 6.0), st.integers(1, 25), st.integers(0, 2**32))
def test_the_tree_is_the_best_under_the_table(vocab, scale, nodes, seed):
    laws = (torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale).softmax(dim=1)
    drafter = filled(laws, vocab)
    last = seed % vocab
    draft = drafter.draft([request([0, last])], [nodes])[0]
    values, expected = best(drafter, last, nodes, vocab)
    assert list(draft.confidences) == pytest.approx(expected)
    assert [values[path] for path in draft.paths()] == pytest.approx(list(draft.confidences))
    assert len(set(draft.paths())) == len(draft)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert set(draft.drafters) <= {"recycling"}


def test_each_request_has_its_budget_and_its_own_last_token():
    drafter = filled((6.0 * torch.roll(torch.eye(9), 1, dims=1)).softmax(dim=1), 9)
    drafts = drafter.draft([request([0, 3]), request([5], 1), request([7, 8], 2)], [4, 1, 2])
    assert [draft.tokens for draft in drafts] == [(4, 5, 6, 7), (6,), (0, 1)]


def test_an_empty_table_drafts_nothing():
    drafter = RecyclingDrafter(200)
    assert [len(draft) for draft in drafter.draft([request([3]), request([4], 1)], [5, 5])] == [0, 0]
    show(drafter, Likely(torch.full((200, 200), 1 / 200)), [3])  # nothing is likely enough
    assert len(drafter.draft([request([3])], [5])[0]) == 0


def test_tokens_of_earlier_requests_help_later_ones_and_the_text_is_the_targets_own():
    llm = LLM(tiny("llama"), policy="fixed", draft=["recycling:k=8"])
    prompts, params = token_prompts(6), SamplingParams(max_tokens=24)
    plain = llm.with_policy("off").generate(prompts, params)
    first, second = llm.generate(prompts, params), llm.generate(prompts, params)
    assert [out.token_ids for out in first] == [out.token_ids for out in plain]
    assert [out.token_ids for out in second] == [out.token_ids for out in plain]
    accepted = [sum(out.stats.accepted["recycling"] for out in outs) for outs in (first, second)]
    assert 0 < accepted[0] < accepted[1]
    assert sum(out.stats.passes for out in second) < sum(out.stats.passes for out in plain)
