"""The law of the output is the target's own, to 1e-12: all drafts and all decisions of tiny models are enumerated."""

import itertools
import math

import pytest
import torch

from bozza.core import NO_DRAFT, Draft
from bozza.drafters.merge import merge
from bozza.drafters.model import ModelDrafter
from bozza.params import SamplingParams
from bozza.rules import RULES, Block, Rejection
from bozza.sampling import sampler
from bozza.sampling.chance import Coins
from enumeration import (
    SAMPLED,
    Enumerator,
    chain,
    check,
    filtered,
    guess,
    judge,
    logits_of,
    merged,
    outcomes,
    request,
    settle,
    spread,
    table,
    unlikely,
)
from toy import ToyModel

VOCAB = 3
EXACT, WRONG = 1e-12, 1e-3
DRAWN = [rule for rule in RULES.values() if not rule.coupled]
COUPLED = [rule for rule in RULES.values() if rule.coupled]

FILTERS = [
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.4),
    SamplingParams(temperature=1.0, typical_p=0.6),
    SamplingParams(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0.0),
]

# (the target's kind of laws, the drafters' kind, seed)
EVEN = ("even", "even", 0)
PEAKED = ("peaked", "peaked", 1)
ZEROS = ("zeros", "zeros", 4)
MODELS = [EVEN, PEAKED, ZEROS, ("even", "peaked", 2), ("zeros", "even", 5)]


def models(target, drafter, seed, vocab=VOCAB, length=4):
    """A target and two drafters."""
    return [table(10 * seed + i, vocab, length, kind) for i, kind in enumerate((target, drafter, drafter))]


def mixed(laws, sampled):
    """A chain of drawn tokens and, where `sampled` is False, the likeliest ones."""

    def draw(chance):
        tokens, stated = (), []
        for drawn in sampled:
            law = laws[tokens]
            tokens = (*tokens, chance.pick(law) if drawn else int(law.argmax()))
            stated.append(law if drawn else None)
        return Draft.chain(tokens, "mixed", stated)

    return draw


def until(laws, end, length):
    """A chain that goes no further than the first `end` in it."""

    def draw(chance):
        tokens = ()
        while len(tokens) < length and end not in tokens:
            tokens = (*tokens, chance.pick(laws[tokens]))
        return Draft.chain(tokens, "until", [laws[tokens[:place]] for place in range(len(tokens))])

    return draw


def best(laws, widths):
    """A tree of the likeliest tokens after each node."""
    tokens, parents, level, paths = [], [], [-1], []
    for width in widths:
        below = []
        for node in level:
            path = paths[node] if node >= 0 else ()
            for token in laws[path].topk(width).indices.tolist():
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                paths.append((*path, token))
        level = below
    return guess(tokens, parents, "best")


def siblings(laws, sampled):
    """Children of the root, each drawn from what the ones before it have left, or the likeliest of that."""

    def draw(chance):
        tokens, stated, left = [], [], laws[()].clone()
        for drawn in sampled:
            if not bool((left > 0.0).any()):
                break
            tokens.append(chance.pick(left) if drawn else int(left.argmax()))
            stated.append(laws[()] if drawn else None)
            left[tokens[-1]] = 0.0
        return Draft(tuple(tokens), (-1,) * len(tokens), ("mixed",) * len(tokens), tuple(stated))

    return draw


# name -> how to draft from the laws of two drafters

CHAINS = {
    "nothing": lambda q, r: lambda chance: NO_DRAFT,
    "drawn 1": lambda q, r: chain(q, 1),
    "drawn 2": lambda q, r: chain(q, 2),
    "drawn 3": lambda q, r: chain(q, 3),
    "guess, drawn, guess": lambda q, r: mixed(q, (False, True, False)),
    "drawn, guess, drawn": lambda q, r: mixed(q, (True, False, True)),
    "guess, drawn, drawn": lambda q, r: mixed(q, (False, True, True)),
    "drawn, ends after a token": lambda q, r: until(q, 1, 3),
    "guess 1": lambda q, r: guess((1,)),
    "guess 2": lambda q, r: guess((2, 0)),
    "guess 3": lambda q, r: guess((0, 0, 1)),
}

TREES = {
    "drawn 2": lambda q, r: spread(q, (2,)),
    "drawn 3": lambda q, r: spread(q, (3,)),
    "drawn 2 x 2": lambda q, r: spread(q, (2, 2)),
    "drawn 3 x 1": lambda q, r: spread(q, (3, 1)),
    "drawn 1 x 2 x 1": lambda q, r: spread(q, (1, 2, 1)),
    "guessed 2 x 2": lambda q, r: best(q, (2, 2)),
    "guessed 3 x 3": lambda q, r: best(q, (3, 3)),
    "guessed, out of order": lambda q, r: guess((2, 1, 0, 2, 1), (-1, 0, -1, 0, 2)),
    "siblings: guess, drawn, drawn": lambda q, r: siblings(q, (False, True, True)),
    "siblings: drawn, guess, drawn": lambda q, r: siblings(q, (True, False, True)),
}

PARTS = {
    "drawn 2 + drawn 2": (4, lambda q, r: [chain(q, 2), chain(r, 2, "other")]),
    "drawn 1 + drawn 2": (3, lambda q, r: [chain(q, 1), chain(r, 2, "other")]),
    "drawn 3 + drawn 1": (4, lambda q, r: [chain(q, 3), chain(r, 1, "other")]),
    "drawn 1 + drawn 1 + guess 2": (4, lambda q, r: [chain(q, 1), chain(r, 1, "other"), guess((1, 1))]),
    "the same drafter twice": (4, lambda q, r: [chain(q, 2), chain(q, 2)]),
    "guess 2 + drawn 2": (4, lambda q, r: [guess((0, 2)), chain(q, 2)]),
    "drawn 2 + guess 2": (4, lambda q, r: [chain(q, 2), guess((0, 2))]),
    "guess 1 + drawn 3": (4, lambda q, r: [guess((1,)), chain(q, 3)]),
    "drawn 3 + guess 2": (5, lambda q, r: [chain(q, 3), guess((1, 0))]),
    "guess 2 + drawn 1 + guess 2": (5, lambda q, r: [guess((0, 2)), chain(q, 1), guess((2, 2))]),
    "tree 2 x 1 + drawn 1": (5, lambda q, r: [spread(q, (2, 1)), chain(r, 1, "other")]),
    "tree 2 + drawn 2": (4, lambda q, r: [spread(q, (2,)), chain(r, 2, "other")]),
    "drawn 2 + tree 2": (4, lambda q, r: [chain(q, 2), spread(r, (2,), "other")]),
    "guess 2 + tree 2 x 1": (6, lambda q, r: [guess((1, 2)), spread(q, (2, 1))]),
}
MERGED = {
    f"{name}, room {room}": lambda q, r, parts=parts, room=room: merged(parts(q, r), room)
    for name, (most, parts) in PARTS.items()
    for room in range(1, most + 1)
}


def test_the_enumeration_finds_every_outcome_once():
    laws = table(0, 3, 2, "zeros")
    found = list(outcomes(lambda chance: (chance.accept(0.25), chain(laws, 2)(chance).tokens, chance.accept(1.0))))
    assert len({result for _, result in found}) == len(found)
    for weight, (first, (a, b), last) in found:
        assert last
        assert weight == pytest.approx((0.25 if first else 0.75) * float(laws[()][a] * laws[(a,)][b]), abs=1e-15)
    assert math.fsum(weight for weight, _ in found) == pytest.approx(1.0, abs=1e-15)


# Rules that toss coins: everything is enumerated.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("rule", DRAWN)
def test_report_49_chains_leave_the_law_as_it_is(rule, shape, model):
    target, q, r = models(*model)
    assert judge(rule, target, CHAINS[shape](q, r)).error < EXACT


@pytest.mark.parametrize(("vocab", "depth"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("rule", DRAWN)
def test_longer_chains_and_larger_vocabularies_leave_the_law_as_it_is(rule, vocab, depth):
    for model in MODELS:
        target, q, _ = models(*model, vocab, depth + 1)
        assert judge(rule, target, chain(q, depth)).error < EXACT


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("rule", DRAWN)
def test_report_58_trees_leave_the_law_as_it_is(rule, shape, model):
    target, q, r = models(*model)
    assert judge(rule, target, TREES[shape](q, r)).error < EXACT


@pytest.mark.parametrize("shape", MERGED)
@pytest.mark.parametrize("rule", DRAWN)
def test_merged_drafts_leave_the_law_as_it_is_however_short_the_room(rule, shape):
    for model in MODELS:
        target, q, r = models(*model)
        assert judge(rule, target, MERGED[shape](q, r)).error < EXACT


def test_block_does_not_take_two_drafts_that_met_for_a_chain():
    # That both say 1, 1 selects what was drawn: it no longer comes from q. The law would be off by 0.096.
    p, q = torch.tensor([0.8, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.8], dtype=torch.float64)
    target, drafter = (dict.fromkeys(table(0, 2, 3), law) for law in (p, q))
    assert judge(Block, target, merged([chain(drafter, 2), guess((1, 1))])).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_the_trunk_of_merged_drafts_leaves_the_law_as_it_is(rule):
    # What is left of a merged draft where only chains can be judged. A longer drafter may go on where another ended.
    for model, shape in itertools.product((PEAKED, ZEROS), MERGED.values()):
        target, q, r = models(*model)
        draw = shape(q, r)
        assert judge(rule, target, lambda chance: draw(chance).trunk()).error < EXACT  # noqa: B023


@pytest.mark.parametrize("rule", DRAWN)
def test_every_guess_leaves_the_law_as_it_is_also_what_the_target_never_says(rule):
    target, *_ = models(*ZEROS)
    hopeless = 0
    for tokens in itertools.product(range(VOCAB), repeat=2):
        judged = judge(rule, target, guess(tokens))
        assert judged.error < EXACT
        if target[()][tokens[0]] == 0.0:
            hopeless += 1
            assert judged.accepted == 0.0
    assert hopeless


@pytest.mark.parametrize("rule", DRAWN)
def test_a_drafter_may_know_fewer_tokens_than_the_target(rule):
    target, small = table(1, 4, 3), table(2, 3, 3)
    for draw in (chain(small, 2), spread(small, (2, 1)), merged([guess((3, 3)), chain(small, 2)])):
        assert judge(rule, target, draw).error < EXACT


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("rule", DRAWN)
def test_report_52_temperature_and_filters_act_on_both_laws(rule, params):
    # The first model is the report's own: logits 2, 1.5, 1, 0.5 after every prefix.
    report = dict.fromkeys(table(0, 4, 3), torch.tensor([2.0, 1.5, 1.0, 0.5], dtype=torch.float64).softmax(dim=0))
    for target, drafter in ((report, table(7, 4, 3)), (table(8, 4, 3, "peaked"), table(9, 4, 3))):
        q = filtered(drafter, params)
        for draw in (chain(q, 2), spread(q, (2,)), merged([chain(q, 1), guess((1, 0))]), guess((0, 1))):
            assert judge(rule, target, draw, params).error < EXACT
        # Lossless does not need the drafter to obey them, as long as it says what it drew from.
        assert judge(rule, target, chain(drafter, 2), params).error < EXACT


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("rule", DRAWN)
def test_report_50_the_model_drafter_states_what_it_draws_from(rule, params, monkeypatch):
    target = table(3, VOCAB, 3)
    drafting = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def draw(chance):
        monkeypatch.setattr("bozza.drafters.model.Coins", lambda *_: chance)
        drafter = ModelDrafter(ToyModel(drafting), VOCAB, coupled=False)
        asked = request(params)
        drafter.start(asked)
        return drafter.draft([asked], [2])[0]

    for weight, draft in outcomes(draw):
        assert len(draft) == 2
        stated = math.prod(float(draft.law(node)[token]) for node, token in enumerate(draft.tokens))
        assert stated == pytest.approx(weight, abs=EXACT)
    assert judge(rule, target, draw, params).error < EXACT
    assert judge(rule, target, merged([guess((1,)), draw]), params).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_penalties_and_processors_act_at_every_place_of_a_draft(rule):
    target, q, r = models(*EVEN)
    penalty = 0.8
    penalised = {
        path: (law.log() - penalty * torch.tensor([path.count(token) for token in range(VOCAB)]).double()).softmax(0)
        for path, law in target.items()
    }
    # A processor sees the prompt of one token and then the output, and turns what the model says into the target.
    processed = SamplingParams(
        temperature=1.0,
        logits_processors=(lambda ids, scores: scores + (target[path := tuple(ids[0, 1:].tolist())] / r[path]).log(),),
    )
    for draw in (chain(q, 3), spread(q, (2, 2)), merged([chain(q, 2), chain(r, 1)]), guess((0, 0, 0))):
        params = SamplingParams(temperature=1.0, frequency_penalty=penalty)
        assert judge(rule, target, draw, params, laws=penalised).error < EXACT
        assert judge(rule, r, draw, processed, laws=target).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_in_single_precision_the_law_is_off_by_rounding_only(rule):
    for model in (PEAKED, ZEROS):
        target, q, _ = ({path: law.float() for path, law in laws.items()} for laws in models(*model))
        assert judge(rule, target, chain(q, 3)).error < 1e-6
        assert judge(rule, target, spread(q, (2, 2))).error < 1e-6


@pytest.mark.parametrize("rule", DRAWN)
def test_report_49_requests_of_one_pass_do_not_mix(rule):
    target, q, r = models(*EVEN)
    drafts = [
        next(draft for _, draft in outcomes(draw))
        for draw in (chain(q, 2), guess(()), spread(r, (2, 1)), guess((1, 1), (-1, -1)))
    ]
    rows = [logits_of(target, draft) for draft in drafts]

    def law(drafts, rows):
        """The law of the verdicts on all of them."""
        asked = [request() for _ in drafts]
        return {
            tuple(found): weight
            for weight, found in outcomes(lambda c: rule(chance=lambda _: c).verify(torch.cat(rows), asked, drafts))
        }

    together = law(drafts, rows)
    alone = [law([draft], [row]) for draft, row in zip(drafts, rows, strict=True)]
    assert len(together) == math.prod(len(each) for each in alone)
    for found, weight in together.items():
        expected = math.prod(each[(verdict,)] for each, verdict in zip(alone, found, strict=True))
        assert weight == pytest.approx(expected, abs=EXACT)


# Edges


@pytest.mark.parametrize("params", [SAMPLED, FILTERS[-2], FILTERS[-1]])
@pytest.mark.parametrize("rule", DRAWN)
def test_a_drafter_that_equals_the_target_is_always_right(rule, params):
    # What q missed of p is then nothing at all: 0 / 0 if it were looked at.
    for model in MODELS:
        target, *_ = models(*model)
        q = filtered(target, params)
        judged = judge(rule, target, chain(q, 3), params)
        assert judged.error < EXACT
        assert judged.accepted == pytest.approx(3.0, abs=EXACT)
        assert judge(rule, target, spread(q, (2, 2)), params).error < EXACT
        # One rounding step more, and a token may be rejected although nothing of p is left to draw from.
        more = {path: law * (1.0 + 1e-15) for path, law in q.items()}
        assert judge(rule, target, chain(more, 3), params).error < EXACT
        assert judge(rule, target, spread(more, (2,)), params).error < EXACT


def test_a_surplus_below_rounding_is_no_division_by_zero():
    # As at a low temperature: the drafter is as sure as the target, and they differ by less than rounding.
    for gap in (34.0, 36.0, 38.0, 46.0):
        p, q = (torch.tensor([0.0, -x], dtype=torch.float64).softmax(dim=0) for x in (gap, gap + 1.0))
        target, drafter = (dict.fromkeys(table(0, 2, 3), law) for law in (p, q))
        for rule in DRAWN:
            assert judge(rule, target, chain(drafter, 2)).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_a_law_that_rules_out_its_own_token_counts_for_nothing(rule):
    target, q, _ = models(*EVEN)
    for tokens in itertools.product(range(VOCAB), repeat=2):
        laws = [q[tokens[:place]].clone() for place in range(2)]
        for law, token in zip(laws, tokens, strict=True):
            law[token] = 0.0
            law /= law.sum()
        contradicting = judge(rule, target, lambda _: Draft.chain(tokens, "model", laws))  # noqa: B023
        chosen = judge(rule, target, guess(tokens))
        assert contradicting.error < EXACT
        assert torch.equal(contradicting.law, chosen.law)
        assert contradicting.accepted == chosen.accepted


@pytest.mark.parametrize("rule", DRAWN)
def test_a_sibling_for_which_its_law_has_nothing_left_counts_as_chosen(rule):
    target, *_ = models(*EVEN)
    sure = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for second in (0, 1, 2):  # 1 is the first one again
        judged = judge(rule, target, lambda _: Draft((1, second), (-1, -1), ("m",) * 2, (sure, sure)))  # noqa: B023
        assert judged.error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_report_51_greedy_decoding_says_what_the_target_says(rule):
    p = torch.tensor([0.3, 0.5, 0.05, 0.05, 0.05, 0.05], dtype=torch.float64)  # the report's A is token 0, B token 1
    q = torch.tensor([0.2, 0.16, 0.16, 0.16, 0.16, 0.16], dtype=torch.float64)
    target = dict.fromkeys(table(0, 6, 2), p)
    draws = [lambda _, laws=laws: Draft.chain([0], "model", laws) for laws in ([], [q], [torch.eye(6).double()[0]])]
    for draw in (*draws, chain(dict.fromkeys(target, q), 1)):
        judged = judge(rule, target, draw, SamplingParams(temperature=0.0))
        assert judged.error == 0.0
        assert judged.law[1 * 6 + 1] == 1.0


# How many tokens are accepted: closed forms


def reach(q, length):
    """All sequences of up to `length` tokens, and the probability that the drafter begins with them."""
    for size in range(1, length + 1):
        for path in itertools.product(range(len(q[()])), repeat=size):
            weight = math.prod(float(q[path[:place]][token]) for place, token in enumerate(path))
            if weight > 0.0:
                yield path, weight


def ratios(p, q, path):
    return [float(p[path[:place]][token] / q[path[:place]][token]) for place, token in enumerate(path)]


def by_token(p, q, length):
    """sum_i E[prod_{j <= i} min(1, r_j)]"""
    return math.fsum(w * math.prod(min(1.0, r) for r in ratios(p, q, path)) for path, w in reach(q, length))


def by_block(p, q, length):
    """sum_i E[p_i], p_i = min(1, p_{i-1} r_i)"""
    total = []
    for path, weight in reach(q, length):
        share = 1.0
        for ratio in ratios(p, q, path):
            share = min(1.0, share * ratio)
        total.append(weight * share)
    return math.fsum(total)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_expected_number_of_accepted_tokens_has_a_closed_form(depth):
    better = 0
    for model in MODELS:
        target, q, _ = models(*model, VOCAB, depth + 1)
        token, block = (judge(rule, target, chain(q, depth)) for rule in (Rejection, Block))
        assert max(token.error, block.error) < EXACT
        assert token.accepted == pytest.approx(by_token(target, q, depth), abs=EXACT)
        assert block.accepted == pytest.approx(by_block(target, q, depth), abs=EXACT)
        assert block.accepted >= token.accepted - EXACT
        better += block.accepted > token.accepted + WRONG
    assert better >= 2 or depth == 1


@pytest.mark.parametrize("shape", CHAINS)
def test_block_accepts_no_less_than_rejection_and_the_same_of_guesses(shape):
    for model in MODELS:
        target, q, r = models(*model)
        token, block = (judge(rule, target, CHAINS[shape](q, r)).accepted for rule in (Rejection, Block))
        assert block >= token - EXACT
        if shape.startswith("guess ") and "," not in shape:
            assert block == pytest.approx(token, abs=EXACT)


def test_the_papers_toy_accepts_ten_ninths_by_token_and_eleven_ninths_by_block():
    p, q = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3.0, torch.tensor([2.0, 1.0], dtype=torch.float64) / 3.0
    target, drafter = (dict.fromkeys(table(0, 2, 3), law) for law in (p, q))
    assert judge(Rejection, target, chain(drafter, 2)).accepted == pytest.approx(10 / 9, abs=EXACT)
    assert judge(Block, target, chain(drafter, 2)).accepted == pytest.approx(11 / 9, abs=EXACT)


# Rules that draw with the noise of (seed, position)


def plainly(target, params, seeds, length):
    """Tokens drawn one at a time, for each seed."""
    found = [()] * len(seeds)
    for position in range(length):
        rows = torch.stack([target[path] for path in found]).log()
        tokens = sampler.draw_tokens(rows, [sampler.Draw(params, seed, position) for seed in seeds])
        found = [(*path, token) for path, token in zip(found, tokens, strict=True)]
    return found


@pytest.mark.parametrize("params", [SAMPLED, FILTERS[-2], FILTERS[-1]])
@pytest.mark.parametrize("rule", COUPLED)
def test_coupled_rules_say_what_plain_drawing_says_for_every_shape(rule, params):
    seeds = range(30)
    deep = 0
    for model in (EVEN, PEAKED, ZEROS):
        target, q, r = models(*model)
        plain = plainly(target, params, seeds, 4)
        for draw in [*CHAINS.values(), *TREES.values(), *MERGED.values()]:
            drafts = [draw(q, r)(Coins(request(seed=seed), "draft")) for seed in seeds]
            rows = torch.cat([logits_of(target, draft) for draft in drafts])
            verdicts = rule().verify(rows, [request(params, seed) for seed in seeds], drafts)
            for draft, verdict, tokens in zip(drafts, verdicts, plain, strict=True):
                check(draft, verdict)
                assert verdict.tokens == tokens[: len(verdict.tokens)]
                # Nothing that was drafted and drawn is left on the table.
                assert tokens[: len(verdict.tokens)] not in draft.paths()
                deep += len(verdict.path) > 1
    assert deep > 300


def two_passes(rule, target, draft, seeds, moved=True):
    """How often each pair of first tokens occurs: what the first pass leaves open, a second one says."""
    asked = [request(seed=seed) for seed in seeds]
    verdicts = rule().verify(logits_of(target, draft).repeat(len(asked), 1), asked, [draft] * len(asked))
    short = [i for i, verdict in enumerate(verdicts) if len(verdict.tokens) == 1]
    for i in short:
        asked[i].tokens += verdicts[i].tokens if moved else ()
    rows = torch.stack([target[verdicts[i].tokens] for i in short]).log()
    more = dict(zip(short, rule().verify(rows, [asked[i] for i in short], [NO_DRAFT] * len(short)), strict=True))
    counts = torch.zeros(VOCAB, VOCAB)
    for i, verdict in enumerate(verdicts):
        a, b = (*verdict.tokens, *(more[i].tokens if i in more else ()))[:2]
        counts[a, b] += 1
    return counts.flatten()


@pytest.mark.parametrize("rule", COUPLED)
def test_over_seeds_coupled_rules_draw_from_the_law(rule):
    target, *_ = models(*EVEN, VOCAB, 3)
    law = torch.stack([target[()][token] * target[(token,)] for token in range(VOCAB)]).flatten()
    draft = Draft((0, 1, 0, 2), (-1, -1, 0, 1), ("x",) * 4)
    counts = two_passes(rule, target, draft, range(20_000))
    assert not unlikely(counts, law)
    # Negative controls: a law that is slightly off, and a second pass with the noise of the first.
    off = law * torch.linspace(0.8, 1.2, VOCAB**2, dtype=torch.float64)
    assert unlikely(counts, off / off.sum())
    assert unlikely(two_passes(rule, target, draft, range(3000), moved=False), law)


def tossed(rule, target, q, seeds, stream="draft"):
    """How often each pair of first tokens occurs with real coins, in one pass or two."""
    counts = torch.zeros(VOCAB, VOCAB)
    for seed in seeds:
        asked = request(seed=seed)
        while asked.output_len < 2:
            path = tuple(asked.output)
            below = {each[len(path) :]: law for each, law in q.items() if each[: len(path)] == path}
            draft = chain(below, 2 - len(path))(Coins(asked, stream))
            rows = torch.stack([target[(*path, *each)] for each in [(), *draft.paths()]]).log()
            asked.commit(rule().verify(rows, [asked], [draft])[0].tokens, ())
        counts[tuple(asked.output[:2])] += 1
    return counts.flatten()


@pytest.mark.parametrize("rule", DRAWN)
def test_over_seeds_the_real_coins_draw_from_the_law(rule):
    target, q, _ = models(*EVEN, VOCAB, 3)
    law = torch.stack([target[()][token] * target[(token,)] for token in range(VOCAB)]).flatten()
    assert not unlikely(tossed(rule, target, q, range(2000)), law)
    # Negative control: drafting with the numbers that acceptance uses.
    assert unlikely(tossed(rule, target, q, range(1000), "accept"), law)


# Negative controls: the same comparison, with one thing wrong, must fail.


def surely(laws, length, stated=True):
    """The likeliest token each time, stated as if drawn."""
    tokens = ()
    while len(tokens) < length:
        tokens = (*tokens, int(laws[tokens].argmax()))
    return lambda _: Draft.chain(tokens, "m", [laws[tokens[:place]] for place in range(length)] if stated else [])


def misstated(drawn, stated, length):
    """Drawn from one law, and stated to be from another."""

    def draw(chance):
        draft = chain(drawn, length)(chance)
        return Draft.chain(draft.tokens, "m", [stated[path[:-1]] for path in draft.paths()])

    return draw


@pytest.mark.parametrize("rule", DRAWN)
def test_report_50_negative_control_likeliest_tokens_stated_as_drawn_are_noticed(rule):
    target, q, _ = models(*EVEN)
    assert judge(rule, target, surely(q, 2)).error > WRONG
    assert judge(rule, target, surely(q, 2, stated=False)).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_report_57_negative_control_a_tree_of_likeliest_tokens_stated_as_drawn_is_noticed(rule):
    target, q, _ = models(*EVEN)

    def draw(chance, stated):
        draft = best(q, (2, 2))(chance)
        laws = tuple(q[path[:-1]] for path in draft.paths()) if stated else ()
        return Draft(draft.tokens, draft.parents, draft.drafters, laws)

    assert judge(rule, target, lambda chance: draw(chance, True)).error > WRONG
    assert judge(rule, target, lambda chance: draw(chance, False)).error < EXACT


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.5), SamplingParams(temperature=1.0, top_p=0.7)],
    ids=["temperature", "top_p"],
)
@pytest.mark.parametrize("rule", DRAWN)
def test_report_50_negative_control_a_law_stated_without_its_filters_is_noticed(rule, params):
    target, q, _ = models(*EVEN)
    narrow = filtered(q, params)
    assert judge(rule, target, misstated(narrow, q, 2)).error > WRONG
    assert judge(rule, target, misstated(narrow, narrow, 2)).error < EXACT


class Shared(Enumerator):
    """The k-th acceptance uses the number that picked the k-th token, by inversion of its law.

    The number is not enumerated: the piece of [0, 1) that it lies in is integrated over.
    """

    def __init__(self, script=()):
        super().__init__(script)
        self.pieces = []
        self.tossed = 0

    def pick(self, weights):
        index = super().pick(weights)
        ends = torch.cat([weights.new_zeros(1), weights.cumsum(dim=0)]) / weights.sum()
        self.pieces.append((float(ends[index]), float(ends[index + 1])))
        return index

    def accept(self, probability):
        low, high = self.pieces[self.tossed]
        self.tossed += 1
        return super().accept(min(1.0, max(0.0, (probability - low) / (high - low))))


@pytest.mark.parametrize("rule", DRAWN)
def test_negative_control_noise_shared_by_draft_and_acceptance_is_noticed(rule):
    target, q, _ = models(*EVEN)

    def run(chance):
        draft = chain(q, 2)(chance)
        return rule(chance=lambda _: chance).verify(logits_of(target, draft), [request()], [draft])[0]

    assert settle(outcomes(run, Shared), target, 3).error > WRONG
    assert settle(outcomes(run), target, 3).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_report_49_negative_control_laws_shifted_by_one_place_are_noticed(rule):
    target, q, _ = models(*EVEN)
    earlier = {path: q[path[:-1]] for path in q}
    assert judge(rule, target, misstated(q, earlier, 2)).error > WRONG
    # The target's rows, one off; drafts as they should be.
    shifted = judge(rule, target, chain(q, 2), logits=lambda laws, draft: logits_of(laws, draft).roll(1, dims=0))
    assert shifted.error > WRONG


class StopsEarly(Enumerator):
    """Tosses no further coin after the first failure."""

    failed = False

    def accept(self, probability):
        self.failed = self.failed or not super().accept(probability)
        return not self.failed


def test_negative_control_a_block_that_stops_at_the_first_failure_is_noticed():
    target, q, _ = models(*EVEN)
    assert judge(Block, target, chain(q, 3), make=StopsEarly).error > WRONG
    assert judge(Rejection, target, chain(q, 3), make=StopsEarly).error < EXACT  # which stops there anyway


def test_negative_control_a_cut_that_depends_on_what_was_drawn_is_noticed():
    target, q, r = models(*EVEN)

    def by_size_of_the_union(drafts, nodes):
        """Real unions of chains, but as deep as fits: deeper where the chains met."""
        unions = [merge([draft.head(depth) for draft in drafts], 100) for depth in (2, 1)]
        return next((union for union in unions if len(union) <= nodes), unions[-1].head(nodes))

    parts = [chain(q, 2), chain(r, 2)]
    wrong = judge(Rejection, target, lambda chance: by_size_of_the_union([part(chance) for part in parts], 2))
    assert wrong.error > WRONG
    assert judge(Rejection, target, merged(parts, 2)).error < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_negative_control_taking_back_an_unlikely_token_is_noticed(rule):
    # To stop after a token is fine (see CHAINS); to drop it for what it is, is not.
    target, q, _ = models(*EVEN)

    def draw(chance):
        draft = until(q, 1, 2)(chance)
        return draft.head(len(draft) - 1) if draft.tokens[-1] == 1 else draft

    assert judge(rule, target, draw).error > WRONG
