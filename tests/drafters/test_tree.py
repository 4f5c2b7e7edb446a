"""Trees that grow level by level are the best ones, and every node has the value of its path."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bozza.core import Request
from bozza.drafters.tree import CONTENDERS, DEPTH, LEAST, Rank, Tree, grow
from bozza.params import SamplingParams
from bozza.sampling.noise import arrivals, race, race_keys
from bozza.sampling.processors import Place

CPU = torch.device("cpu")


def request(last=0, id_=0, seed=7, output=(), temperature=0.0):
    prompt = [5, 6, last]
    return Request(id_, [*prompt, *output], 3, SamplingParams(temperature=temperature), seed, frozenset(), 1000)


class Table:
    """A drafter whose guesses depend on the last token alone. Remembers what it was asked, and checks it."""

    def __init__(self, logits):
        self.logits = logits
        self.calls = []
        self.fed = {}

    def roots(self, trees):
        return self.logits[[tree.request.tokens[-1] for tree in trees]]

    def expand(self, asked):
        self.calls.append([len(draft) - fed for _, draft, fed in asked])
        new = []
        for tree, draft, fed in asked:
            paths = draft.paths()
            assert paths[:fed] == self.fed.get(tree.request.id, [])  # what the slot holds comes first, unchanged
            assert len(paths) > fed
            assert len({len(path) for path in paths[fed:]}) == 1  # one level
            self.fed[tree.request.id] = paths
            new += draft.tokens[fed:]
        return self.logits[new]


def best(law, last, nodes):
    """The likeliest paths of a table and their values: every path that may be drafted is looked at."""
    found = {}

    def below(path, value):
        for token, share in enumerate(law[path[-1] if path else last].tolist()):
            assume(not 0.999 * LEAST < value * share < 1.001 * LEAST)  # rounding would decide
            if value * share >= LEAST and len(path) < nodes:
                found[*path, token] = value * share
                below((*path, token), value * share)

    below((), 1.0)
    return sorted(found.items(), key=lambda item: -item[1])


def grown(logits, lasts, budgets, width):
    table = Table(logits)
    trees = [Tree(request(last, id_), budget) for id_, (last, budget) in enumerate(zip(lasts, budgets, strict=True))]
    grow(trees, table.roots(trees), table.expand, Rank(coupled=True), width)
    return [tree.draft("x") for tree in trees], table


@settings(deadline=None)
@given(
    st.integers(2, 9), st.floats(0.3, 6.0), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 2**32)
)
def test_the_best_nodes_of_all_are_found(vocab, scale, budgets, seed):
    """As long as a level has room for all of them."""
    logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    lasts = [index % vocab for index in range(len(budgets))]
    drafts, _ = grown(logits, lasts, budgets, width=8)
    for draft, last, budget in zip(drafts, lasts, budgets, strict=True):
        paths, values = zip(*best(logits.softmax(dim=1), last, budget), strict=True)
        assert draft.confidences == pytest.approx(values[:budget], rel=1e-4)
        if len(paths) <= budget or values[budget] < 0.999 * values[budget - 1]:  # not the same steps in another order
            assert set(draft.paths()) == set(paths[:budget])


@settings(deadline=None)
@given(st.integers(2, 12), st.floats(0.1, 4.0), st.integers(1, 60), st.integers(1, 4), st.integers(0, 2**32))
def test_a_narrow_tree_keeps_to_its_limits(vocab, scale, budget, width, seed):
    logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    (draft,), table = grown(logits, [0], [budget], width)
    law = logits.softmax(dim=1)
    assert len(draft) <= budget
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert len(set(draft.paths())) == len(draft)
    assert list(draft.confidences) == sorted(draft.confidences, reverse=True)
    assert all(value >= LEAST for value in draft.confidences)
    assert all(len(nodes) <= width for nodes in draft.children().values())
    assert all(count <= width for call in table.calls for count in call)
    assert max(draft.depths(), default=0) <= min(DEPTH, budget)
    assert set(draft.drafters) <= {"x"}
    for path, value in zip(draft.paths(), draft.confidences, strict=True):
        shares = [float(law[before, token]) for before, token in zip((0, *path), path, strict=False)]
        assert value == pytest.approx(math.prod(shares), rel=1e-4)
        assert path[-1] in law[path[-2] if len(path) > 1 else 0].topk(min(width, vocab)).indices.tolist()


def test_a_sure_chain_ends_at_the_deepest_level():
    draft = grown(60.0 * torch.roll(torch.eye(30), 1, dims=1), [3], [25], 4)[0][0]
    assert draft.tokens == tuple(range(4, 4 + DEPTH))
    assert draft.confidences == pytest.approx([1.0] * DEPTH)


def test_what_cannot_make_it_into_the_draft_is_not_looked_at():
    """The last nodes of the budget need no children, and one node needs no level at all."""
    chain = 60.0 * torch.roll(torch.eye(30), 1, dims=1)
    for budget in (1, 2, 5):
        draft, table = grown(chain, [3], [budget], 4)
        assert len(draft[0]) == budget
        assert table.calls == [[1]] * (budget - 1)


def test_requests_of_different_needs_share_the_calls():
    chain = 60.0 * torch.roll(torch.eye(30), 1, dims=1)
    drafts, table = grown(chain, [3, 9, 20], [4, 1, 2], 4)
    assert [draft.tokens for draft in drafts] == [(4, 5, 6, 7), (10,), (21, 22)]
    assert table.calls == [[1, 1], [1], [1]]


def test_only_what_still_belongs_to_the_best_gets_children():
    tree = Tree(request(), 3)
    tree.add(-1, [1, 2, 3], [0.6, 0.3, 0.05])
    assert tree.promising(8) == [0, 1, 2]
    assert tree.promising(2) == [0, 1]
    tree.feed([0, 1])
    tree.add(0, [4, 5], [0.9, 0.08])
    tree.add(1, [6, 7], [0.5, 0.3])
    assert tree.values == pytest.approx([0.6, 0.3, 0.05, 0.54, 0.048, 0.15, 0.09])
    assert tree.best() == [0, 3, 1]
    assert tree.promising(8) == [3]  # node 1 is among the best, but has had its turn
    draft = tree.draft("me")
    assert (draft.tokens, draft.parents, draft.drafters) == ((1, 4, 2), (-1, 0, -1), ("me",) * 3)
    assert draft.confidences == pytest.approx((0.6, 0.54, 0.3))


def test_a_confidence_never_makes_a_child_likelier_than_its_parent():
    """Sums of rounded shares may exceed one."""
    tree = Tree(request(), 2)
    tree.add(-1, [1], [1.0000001])
    tree.add(0, [2], [1.0000001])
    assert tree.values == [1.0, 1.0]
    assert tree.best() == [0, 1]


def test_greedy_children_are_the_likeliest_tokens():
    logits = torch.randn(4, 50) * 2
    for coupled in (True, False):
        ranked = Rank(coupled)(logits, [Place(request())] * 4, 6)
        shares, ids = logits.softmax(dim=1).topk(6, dim=1)
        assert [tokens for tokens, _ in ranked] == ids.tolist()
        torch.testing.assert_close(torch.tensor([confidences for _, confidences in ranked]), shares)


def test_without_coupling_a_temperature_only_changes_confidences():
    logits = torch.randn(3, 50) * 2
    places = [Place(request(temperature=t)) for t in (0.5, 0.0, 2.0)]
    shares, ids = (logits / torch.tensor([[0.5], [1.0], [2.0]])).softmax(dim=1).topk(5, dim=1)
    ranked = Rank(coupled=False)(logits, places, 5)
    assert [tokens for tokens, _ in ranked] == ids.tolist()
    torch.testing.assert_close(torch.tensor([confidences for _, confidences in ranked]), shares)


PLACES = [
    Place(request(seed=3, temperature=0.7), ()),
    Place(request(seed=3, temperature=0.7), (4,)),
    Place(request(seed=4, temperature=1.3, output=(9, 9)), (1, 2)),
    Place(request(seed=3), ()),
    Place(request(seed=2**40, temperature=1.0, output=(8,)), ()),
]


@pytest.mark.parametrize("mapped", [False, True])
def test_coupled_children_stand_in_the_order_of_the_race_that_decides_the_output(mapped):
    """First the token that rule `coupled` would draw under the same law, then who wins without that one, and so on."""
    vocab, own = 300, CONTENDERS  # all of the draft's tokens take part
    targets = torch.randperm(vocab)[:own].sort().values if mapped else torch.arange(own)
    logits = torch.randn(len(PLACES), own, generator=torch.Generator().manual_seed(1)) * 1.5
    ranked = Rank(True, targets if mapped else None)(logits, PLACES, 4)
    for row, (place, (tokens, confidences)) in enumerate(zip(PLACES, ranked, strict=True)):
        temperature = place.request.params.temperature
        full = torch.full((1, vocab), -math.inf)
        full[0, targets] = logits[row]
        if temperature == 0.0:
            assert tokens == full.topk(4, dim=1).indices[0].tolist()
            assert confidences == pytest.approx(full.softmax(dim=1)[0, tokens].tolist())
            continue
        keys = race_keys([(place.request.seed, place.position)], CPU)
        rates = (full / temperature).softmax(dim=1).double() / arrivals(keys, torch.arange(vocab)[None])
        assert confidences == pytest.approx((rates / rates.sum())[0, tokens].tolist(), rel=1e-4)
        for token in tokens:
            assert token == race(full, keys, temperature).item()
            full[0, token] = -math.inf
    assert len({tuple(tokens) for tokens, _ in ranked[:2]}) == 2  # a place further has a noise of its own


def test_the_draw_is_found_in_large_vocabularies_where_the_law_is_peaked():
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(2)) * 5
    places = [Place(request(seed=seed, temperature=0.8)) for seed in range(200)]
    ranked = Rank(coupled=True)(logits, places, 8)
    drawn = race(logits, race_keys([(place.request.seed, 0) for place in places], CPU), 0.8).tolist()
    met = sum(tokens[0] == token for (tokens, _), token in zip(ranked, drawn, strict=True))
    assert met >= 190


def test_a_level_that_is_hardly_ever_reached_is_not_paid_for():
    """Each token is followed by one of two others, equally likely."""
    logits = torch.full((4, 4), -30.0)
    logits[:, :2] = 0.0
    for width, least, depth in ((2, 0.9, 2), (1, 0.9, 1), (1, 0.4, 2), (1, 0.2, 3), (1, 0.0, 6)):
        table, tree = Table(logits), Tree(request(0, 0), 6)
        grow([tree], table.roots([tree]), table.expand, Rank(coupled=True), width, least)
        assert max(tree.draft("x").depths()) == depth, (width, least)
