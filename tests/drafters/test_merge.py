from hypothesis import given
from hypothesis import strategies as st

from bozza.core import Draft
from bozza.drafters.merge import merge


@st.composite
def trees(draw, drafter):
    size = draw(st.integers(0, 6))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    return Draft(tuple(draw(st.integers(0, 2)) for _ in range(size)), parents, (drafter,) * size)


def paths(draft):
    found = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@given(trees("a"), trees("b"), trees("c"))
def test_union_of_paths_each_once(a, b, c):
    merged = merge([a, b, c], 100)
    kept = paths(merged)
    if sum(len(draft) > 0 for draft in (a, b, c)) > 1:
        assert len(set(kept)) == len(kept)
    assert set(kept) == {*paths(a), *paths(b), *paths(c)}
    assert all(parent < node for node, parent in enumerate(merged.parents))


@given(trees("a"), trees("b"), st.integers(0, 8))
def test_what_is_cut_is_deep_and_credit_stays_with_the_first(a, b, nodes):
    merged = merge([a, b], nodes)
    assert len(merged) <= nodes
    assert all(parent < node for node, parent in enumerate(merged.parents))
    for path, drafter in zip(paths(merged), merged.drafters, strict=True):
        assert path in (paths(a) if drafter == "a" else paths(b))
        assert drafter == "a" or path not in paths(a)


def test_when_room_is_short_every_drafter_keeps_its_first_tokens():
    a, b = Draft.chain([1, 2, 3, 4, 5], "a"), Draft.chain([6, 7, 8, 9], "b")
    assert paths(merge([a, b], 5)) == [(1,), (1, 2), (6,), (6, 7)]
    assert paths(merge([a, b], 1)) == [(1,)]
    assert len(merge([a, b], 9)) == 9
    assert len(merge([a, b], 0)) == 0


def test_shared_prefix_becomes_one_branch():
    merged = merge([Draft.chain([1, 2, 3], "a"), Draft.chain([1, 2, 9, 8], "b")], 10)
    assert merged.tokens == (1, 2, 3, 9, 8)
    assert merged.parents == (-1, 0, 1, 1, 3)
    assert merged.drafters == ("a", "a", "a", "b", "b")


def sure(tokens, parents, drafter, confidences):
    return Draft(tokens, parents, (drafter,) * len(tokens), confidences=confidences)


def test_a_node_is_as_likely_as_the_surest_of_its_drafters_says():
    a = sure((1, 2, 3), (-1, 0, 0), "a", (0.5, 0.4, 0.05))
    b = sure((1, 3, 9), (-1, 0, -1), "b", (0.7, 0.6, 0.2))
    merged = merge([a, b], 10)
    assert dict(zip(merged.paths(), merged.confidences, strict=True)) == {
        (1,): 0.7, (1, 2): 0.4, (1, 3): 0.6, (9,): 0.2,
    }  # fmt: skip
    assert merged.drafters == ("a", "a", "a", "b")
    assert merge([b, a], 10).confidences == (0.7, 0.6, 0.2, 0.4)


def test_who_says_nothing_does_not_make_a_node_less_likely():
    merged = merge([Draft.chain([1, 2], "a"), sure((1, 5), (-1, 0), "b", (0.7, 0.6))], 10)
    assert dict(zip(merged.paths(), merged.confidences, strict=True)) == {(1,): 0.7, (1, 2): 0.0, (1, 5): 0.6}


def test_what_is_cut_takes_its_confidence_along():
    merged = merge([sure((1, 2, 3), (-1, 0, 1), "a", (0.9, 0.8, 0.7)), sure((1, 4), (-1, 0), "b", (0.3, 0.2))], 3)
    assert dict(zip(merged.paths(), merged.confidences, strict=True)) == {(1,): 0.9, (1, 2): 0.8, (1, 4): 0.2}


def test_nothing_merges_to_nothing():
    assert len(merge([Draft(), Draft()], 4)) == 0
