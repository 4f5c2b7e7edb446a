import pytest
from hypothesis import given
from hypothesis import strategies as st

from bozza.core import Request
from bozza.drafters.suffix import LONGEST, ORDERS, RECENT, SuffixDrafter, SuffixIndex, vote
from bozza.params import SamplingParams


def request(tokens, id_=0):
    return Request(id_, list(tokens), len(tokens), SamplingParams(), 0, frozenset(), 10_000)


def draft(tokens, nodes=8):
    drafter = SuffixDrafter()
    asked = request(tokens)
    drafter.start(asked)
    return drafter.draft([asked], [nodes])[0]


def paths(tree):
    return {path for path in tree.paths() if path}


def test_one_continuation_is_a_chain_that_repeats_past_its_own_end():
    assert draft([1, 2, 3, 4, 5, 1, 2, 3, 4], 6).tokens == (5, 1, 2, 3, 4, 5)
    assert draft([7] * 12, 5).tokens == (7,) * 5


def test_what_was_followed_by_different_things_is_a_tree():
    tree = draft([1, 2, 3, 9, 8, 1, 2, 4, 7, 6, 1, 2, 3, 5, 5, 1, 2], 4)
    firsts = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert firsts == [3, 4]  # the one that has more of the votes comes first
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_a_longer_match_outweighs_recency():
    tree = draft([5, 6, 7, 8, 1, 9, 9, 7, 8, 2, 9, 5, 6, 7, 8], 1)
    assert tree.tokens == (1,)


def test_depth_grows_with_the_match():
    assert max(draft([5, 1, 2, 3, 4, 9, 8, 5], 20).depths()) == 2  # one token agrees
    assert max(draft([5, 6, 1, 2, 3, 4, 9, 8, 5, 6], 20).depths()) == 4


def test_nothing_known_is_no_draft():
    assert len(draft([1, 2, 3, 4])) == 0
    assert len(draft([1])) == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 12))
def test_every_path_followed_an_end_of_the_text_somewhere(tokens, nodes):
    tree = draft(tokens, nodes)
    assert len(tree) <= nodes
    kept = tree.paths()
    assert len(set(kept)) == len(kept)
    for first in {path[0] for path in kept}:
        assert any(tokens[i] == tokens[-1] and tokens[i + 1] == first for i in range(len(tokens) - 1))
    if any(token == tokens[-1] for token in tokens[:-1]):
        assert len(tree) >= 1


@given(st.lists(st.integers(0, 3), min_size=2, max_size=80))
def test_matches_are_as_long_as_they_are_said_to_be(tokens):
    index, text = SuffixIndex(), []
    index.extend(text, tokens)
    found = index.find(text)
    assert len(found) <= RECENT
    for place in found:
        assert place.end < len(text)
        assert tokens[place.end - place.match : place.end] == tokens[-place.match :]
        longer = place.match + 1
        stops = place.match == LONGEST or longer > place.end
        assert stops or tokens[place.end - longer : place.end] != tokens[-longer:]
    longest = max((n for n in ORDERS for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]), default=0)
    assert (min(place.match for place in found) if found else 0) >= longest


def test_growing_a_text_is_the_same_as_reading_it_at_once():
    tokens = [i * i % 7 for i in range(60)]
    drafter, asked = SuffixDrafter(), request(tokens[:20])
    drafter.start(asked)
    for token in tokens[20:]:
        asked.tokens.append(token)
        drafter.observe(asked, [token])
    assert drafter.draft([asked], [9])[0] == draft(tokens, 9)
    drafter.stop(asked)
    assert drafter._texts == {}


def test_report_43_requests_do_not_see_each_other():
    drafter = SuffixDrafter()
    one, other = request([1, 2, 3, 1, 2], 0), request([1, 2], 1)
    drafter.start(one)
    drafter.start(other)
    drafts = drafter.draft([one, other], [3, 3])
    assert drafts[0].tokens[0] == 3
    assert len(drafts[1]) == 0


def test_memory_is_bounded_where_one_token_repeats():
    index, text = SuffixIndex(), []
    index.extend(text, [5] * 3000)
    assert sum(len(ends) for ends in index._ends.values()) <= RECENT * len(ORDERS)


@pytest.mark.parametrize("nodes", [1, 3, 40])
def test_votes_for_nothing_are_no_draft(nodes):
    assert len(vote([], nodes, "x")) == 0
