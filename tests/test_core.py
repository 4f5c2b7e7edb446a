import pytest

from bozza.core import Draft, RequestStats
from bozza.errors import ConfigError
from bozza.params import SamplingParams


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 10.5},
        {"temperature": 1e-30},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
    ],
)
def test_out_of_range_parameters_are_refused_in_one_line(bad):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert next(iter(bad)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(max_token=3)


def test_a_chain_is_a_tree_without_siblings():
    chain = Draft.chain([4, 5, 6], "x")
    assert chain.parents == (-1, 0, 1)
    assert chain.depths() == [1, 2, 3]


def test_the_head_of_a_tree_is_a_tree():
    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 2), ("a", "a", "b", "b"))
    assert tree.depths() == [1, 1, 2, 3]
    assert tree.head(3) == Draft((1, 2, 3), (-1, -1, 0), ("a", "a", "b"))
    assert tree.head(9) is tree
    assert len(tree.head(0)) == 0


def test_confidences_stay_with_their_nodes():
    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 2), ("a", "a", "b", "b"), confidences=(0.9, 0.05, 0.5, 0.4))
    assert tree.head(3).confidences == (0.9, 0.05, 0.5)
    assert tree.head(9).confidences == tree.confidences
    assert tree.head(0).confidences == ()
    trunk = tree.trunk()
    assert (trunk.tokens, trunk.confidences) == ((1, 3, 4), (0.9, 0.5, 0.4))
    assert [tree.confidence(node) for node in range(4)] == [0.9, 0.05, 0.5, 0.4]


def test_a_drafter_need_not_be_confident():
    chain = Draft.chain([4, 5, 6], "x")
    assert chain.confidences == chain.head(2).confidences == chain.trunk().confidences == ()
    assert chain.confidence(1) is None


def test_confidences_do_not_make_another_draft():
    """What is drafted is the tokens; two ways to the same draft are equal however sure they are."""
    assert Draft((1,), (-1,), ("a",), confidences=(0.3,)) == Draft((1,), (-1,), ("a",))


def test_committed_per_pass_of_nothing_is_zero():
    assert RequestStats().committed_per_pass == 0.0
