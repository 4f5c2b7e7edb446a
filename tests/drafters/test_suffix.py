import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bozza.core import Request
from bozza.drafters.chains import LONGEST, ORDERS, RECENT, Occurrence
from bozza.drafters.suffix import SuffixDrafter, SuffixIndex, trust, vote
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
    found = SuffixIndex(tokens).find(tokens)
    assert len(found) <= RECENT
    assert [place.end for place in found] == sorted((place.end for place in found), reverse=True)
    for place in found:
        assert place.end < len(tokens)
        assert tokens[place.end - place.match : place.end] == tokens[-place.match :]
        longer = place.match + 1
        stops = place.match == LONGEST or longer > place.end
        assert stops or tokens[place.end - longer : place.end] != tokens[-longer:]
    longest = max((n for n in ORDERS for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]), default=0)
    assert (min(place.match for place in found) if found else 0) >= longest


@pytest.mark.parametrize("length", range(1, LONGEST + 9))
def test_a_match_of_any_length_is_measured(length):
    same = list(range(100, 100 + length))
    text = [*range(500, 590), 1, *same, 3, *range(600, 690), 2, *same]
    assert SuffixIndex(text).find(text)[0].match == min(length, LONGEST)


def test_growing_a_text_is_the_same_as_reading_it_at_once():
    tokens = [i * i % 7 for i in range(60)]
    drafter, asked = SuffixDrafter(), request(tokens[:20])
    drafter.start(asked)
    for token in tokens[20:]:
        asked.tokens.append(token)
        drafter.observe(asked, [token])
    assert drafter.draft([asked], [9])[0] == draft(tokens, 9)
    drafter.stop(asked)
    assert drafter._indices == {}


def test_report_43_requests_do_not_see_each_other():
    drafter = SuffixDrafter()
    one, other = request([1, 2, 3, 1, 2], 0), request([1, 2], 1)
    drafter.start(one)
    drafter.start(other)
    drafts = drafter.draft([one, other], [3, 3])
    assert drafts[0].tokens[0] == 3
    assert len(drafts[1]) == 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=80), st.integers(1, 79), st.integers(0, 200))
def test_a_text_that_grows_is_found_in_as_if_it_had_been_there_at_once(tokens, start, room):
    text = tokens[:start]
    index = SuffixIndex(text, room)
    for token in tokens[start:]:
        text.append(token)
        index.update()
    assert [place[1:3] for place in index.find(text)] == [place[1:3] for place in SuffixIndex(tokens).find(tokens)]


def test_the_tokens_of_the_request_are_not_copied():
    drafter, asked = SuffixDrafter(), request([1, 2, 3, 1, 2])
    drafter.start(asked)
    assert drafter._indices[0]._text is asked.tokens
    assert all(place.text is asked.tokens for place in drafter._find(asked))


@pytest.mark.parametrize("tokens", [[5] * 4096, list(range(4096))])
def test_memory_per_token_is_what_the_docs_say(tokens):
    tracemalloc.start()
    index = SuffixIndex(tokens)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index._known == 4096
    assert size < 52 * 4096  # arrays grow by a few per cent more than is asked for


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 20))
def test_confidences_never_grow_on_the_way_down(tokens, nodes):
    tree = draft(tokens, nodes)
    assert len(tree.confidences) == len(tree)
    for node, parent in enumerate(tree.parents):
        assert 0.0 < tree.confidences[node] <= (1.0 if parent < 0 else tree.confidences[parent])
    assert list(tree.confidences) == sorted(tree.confidences, reverse=True)  # the likeliest nodes come first
    for siblings in tree.children().values():
        assert sum(tree.confidences[node] for node in siblings) <= 1.0 + 1e-9


def test_confidence_is_the_share_of_the_votes_times_the_trust_in_the_match():
    # After 1 2 came 3 twice and 4 once, each after two tokens that agree: 2 of 3 votes, 1 of 3.
    tree = draft([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2], 10)
    by_path = dict(zip(tree.paths(), tree.confidences, strict=True))
    assert by_path[(3,)] == pytest.approx(2 / 3 * 2 / 3)
    assert by_path[(4,)] == pytest.approx(1 / 3 * 2 / 3)
    assert by_path[(3, 7)] == pytest.approx(1 / 3 * 2 / 4)
    assert by_path[(3, 9, 1)] == pytest.approx(1 / 3 * 2 / 5)


def test_confidence_grows_with_the_match_and_is_never_certain():
    firsts = [
        draft([*range(10, 10 + n), 5, *range(100, 140), *range(10, 10 + n)], 4).confidences[0] for n in range(1, 60)
    ]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == trust(1, 1) == 0.5
    assert 0.98 < firsts[-1] < 1.0


def test_a_node_is_trusted_as_far_as_its_own_voters_match():
    tree = vote([Occurrence([9, 1, 2], 1, 6), Occurrence([9, 3, 4], 1, 3)], 3, "x")
    assert tree.paths() == [(1,), (1, 2), (3,)]
    assert tree.confidences == pytest.approx([36 / 45 * 6 / 7, 36 / 45 * 6 / 8, 9 / 45 * 3 / 4])


def test_voters_that_agree_are_judged_as_those_that_do_not():
    """The short way through `vote` gives what the long one would."""
    agreeing = [Occurrence([1, 2, 3, 4, 5, 6], 2, 3), Occurrence([9, 3, 4, 5, 6], 1, 2)]
    chain = vote(agreeing, 4, "x")
    dissent = vote([*agreeing, Occurrence([7, 7], 1, 1)], 4, "x")  # 1 of 14 votes: too few to be drafted
    assert chain.tokens == dissent.tokens == (3, 4, 5, 6)
    assert chain.parents == dissent.parents
    assert dissent.confidences == pytest.approx([13 / 14 * sure for sure in chain.confidences])
    assert chain.confidences == pytest.approx([3 / 4, 3 / 5, 3 / 6, 3 / 7])


@pytest.mark.parametrize("nodes", [1, 3, 40])
def test_votes_for_nothing_are_no_draft(nodes):
    assert len(vote([], nodes, "x")) == 0
