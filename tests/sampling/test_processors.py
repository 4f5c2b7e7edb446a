"""Bias, penalties, bans, processors and grammars at every place of a draft, against transformers' own processors."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from bozza import LLM, SamplingParams
from bozza.core import Request
from bozza.drafters.model import ModelDrafter
from bozza.sampling.processors import Place, Processors
from bozza.sampling.sampler import Filters, Sampler, warp
from grammars import OneOf
from tiny import VOCAB, token_prompts
from toy import ToyModel

ENDS = frozenset([2, 60])


def request(prompt, output=(), *, constraint=None, id_=0, **params):
    """A request whose output so far is `output`; bad words are token ids."""
    asked = SamplingParams(max_tokens=100, **params)
    return Request(id_, [*prompt, *output], len(prompt), asked, 7, ENDS, 1000, asked.bad_words, constraint=constraint)


def noise(rows, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def apply(logits, *places):
    return Processors().apply(logits, places)


BIAS = {4: 3.0, 11: -2.5, 60: 1.0}
WORDS = ((9,), (4, 11), (11, 4, 4), (2, 11))
ALLOWED = tuple(range(0, VOCAB, 3))
ALONE: dict[str, tuple[dict[str, Any], Any]] = {
    "repetition": ({"repetition_penalty": 1.7}, lambda prompt: RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition_bonus": ({"repetition_penalty": 0.6}, lambda prompt: RepetitionPenaltyLogitsProcessor(0.6)),
    "logit_bias": (
        {"logit_bias": BIAS},
        lambda prompt: SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]),
    ),
    "bad_words": ({"bad_words": WORDS}, lambda prompt: NoBadWordsLogitsProcessor([list(word) for word in WORDS])),
    "min_tokens": ({"min_tokens": 3}, lambda prompt: MinNewTokensLengthLogitsProcessor(len(prompt), 3, sorted(ENDS))),
    "allowed_token_ids": (
        {"allowed_token_ids": ALLOWED},
        lambda prompt: SuppressTokensLogitsProcessor([t for t in range(VOCAB) if t not in ALLOWED]),
    ),
}
# (prompt, output, path): nothing drafted, drafted tokens that repeat, tokens of the prompt, endings of bad words.
SPOTS = [
    ([5, 6], [], ()),
    ([5, 6], [], (9,)),
    ([5, 6, 5], [7], (8, 8)),
    ([5], [4], ()),
    ([5], [], (4,)),
    ([5], [3, 11], (4,)),
    ([5], [11], (4, 4)),
    ([5, 6], [2], (11, 4)),
    ([7] * 12, [7, 7], (7, 7, 7)),
    ([5, 6, 7], [8, 9, 10, 11, 12], (13, 14, 15, 4, 11)),
]


@pytest.mark.parametrize("spot", SPOTS, ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_report_73_81_each_parameter_does_what_transformers_does_after_any_path(name, spot):
    params, processor = ALONE[name]
    prompt, output, path = spot
    logits = noise(1, seed=len(path))
    expected = processor(prompt)(torch.tensor([[*prompt, *output, *path]]), logits.clone())
    assert torch.equal(apply(logits, Place(request(prompt, output, **params), path)), expected)
    # It makes no difference how much of it is committed and how much drafted.
    assert torch.equal(apply(logits, Place(request(prompt, [*output, *path], **params))), expected)


def test_the_spots_are_worth_testing():
    """Each parameter changes something at most of them, and bad words end at some."""
    for name, (params, _) in ALONE.items():
        changed = [not torch.equal(apply(noise(1), Place(request(p, o, **params), d)), noise(1)) for p, o, d in SPOTS]
        assert sum(changed) >= (4 if name == "min_tokens" else 10)
    endings = [apply(noise(1), Place(request(p, o, bad_words=WORDS[1:]), d)).isinf().sum() for p, o, d in SPOTS]
    assert sum(int(count) > 0 for count in endings) >= 4


def test_a_bad_word_that_the_prompt_begins_is_no_concern_of_the_output():
    """Here transformers bans more: it looks back into the prompt."""
    logits = noise(1)
    assert torch.equal(apply(logits, Place(request([5, 4], bad_words=[(4, 11)]))), logits)
    assert apply(logits, Place(request([5], [4], bad_words=[(4, 11)])))[0, 11] == -math.inf
    assert apply(logits, Place(request([5, 11], [4], bad_words=[(11, 4, 4)])))[0, 4] > -math.inf


def openai(logits, output, presence, frequency):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, as the API's documentation has it."""
    counts = torch.tensor([float(output.count(token)) for token in range(logits.shape[1])])
    return logits - counts * frequency - (counts > 0) * presence


@pytest.mark.parametrize("spot", SPOTS, ids=str)
@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.5, 2.0)])
def test_presence_and_frequency_count_the_output_and_the_path_but_not_the_prompt(spot, presence, frequency):
    prompt, output, path = spot
    place = Place(request(prompt, output, presence_penalty=presence, frequency_penalty=frequency), path)
    expected = openai(noise(1), [*output, *path], presence, frequency)
    torch.testing.assert_close(apply(noise(1), place), expected, rtol=0, atol=1e-5)


def test_presence_and_frequency_come_after_the_repetition_penalty():
    place = Place(request([5], [6, 6], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), (7,))
    logits = torch.full((1, 9), 4.0)
    assert apply(logits, place)[0].tolist() == [4.0, 4.0, 4.0, 4.0, 4.0, 2.0, 1.0, 1.25, 4.0]


def test_report_73_the_second_of_two_equal_drafts_sees_the_first():
    """Block [8, 8] after the committed 7, which counts once although the pass starts with it."""
    asked = request([5], [7], frequency_penalty=1.0)
    rows = Processors().apply(torch.zeros(3, 10), [Place(asked), Place(asked, (8,)), Place(asked, (8, 8))])
    assert rows[:, 7].tolist() == [-1.0, -1.0, -1.0]
    assert rows[:, 8].tolist() == [0.0, -1.0, -2.0]
    assert rows[:, 5].tolist() == [0.0, 0.0, 0.0]


def many_places(seed, requests=12):
    """Places of requests with all kinds of parameters: several places of one request, some without parameters."""
    rng = random.Random(seed)
    places = []
    for id_ in range(requests):
        params: dict[str, Any] = {}
        if rng.random() < 0.5:
            params["repetition_penalty"] = rng.choice([0.7, 1.3])
        if rng.random() < 0.5:
            params |= {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)}
        if rng.random() < 0.4:
            params["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(4)}
        if rng.random() < 0.4:
            params["bad_words"] = [[rng.randrange(3, 6) for _ in range(rng.randint(1, 3))] for _ in range(4)]
        if rng.random() < 0.3:
            params["min_tokens"] = rng.randint(1, 5)
        if rng.random() < 0.3:
            params["allowed_token_ids"] = rng.sample(range(VOCAB), 20)
        if rng.random() < 0.2:
            params["logits_processors"] = [lambda ids, scores: scores * 0.5 + ids.shape[1]]
        prompt = [rng.randrange(3, 9) for _ in range(rng.randint(1, 6))]
        asked = request(prompt, [rng.randrange(3, 9) for _ in range(rng.randint(0, 5))], id_=id_, **params)
        path = tuple(rng.randrange(3, 9) for _ in range(rng.randint(0, 4)))
        places += [Place(asked, path[:depth]) for depth in range(len(path) + 1)]
    return places


@pytest.mark.parametrize("seed", range(6))
def test_report_74_many_rows_of_several_requests_equal_each_row_alone(seed):
    places = many_places(seed)
    logits = noise(len(places), seed=seed)
    before = logits.clone()
    together = apply(logits, *places)
    assert torch.equal(logits, before)  # the input is not changed
    for row, place in enumerate(places):
        assert torch.equal(together[row], apply(logits[row : row + 1], place)[0])
        if not place.request.params.adjusts:
            assert torch.equal(together[row], logits[row])


def test_nothing_to_do_costs_nothing():
    logits = noise(2)
    assert apply(logits, *[Place(request([5], temperature=1.0, top_k=4))] * 2) is logits


@pytest.mark.parametrize("seed", range(4))
def test_history_follows_a_growing_request(seed):
    """One `Processors` serves a request all along, with commits and rejected drafts between the calls."""
    rng = random.Random(seed)
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    served, asked = Processors(), request([5, 6, 5], **params)
    for step in range(12):
        path = tuple(rng.randrange(4, 12) for _ in range(rng.randint(0, 4)))
        places = [Place(asked, path[:depth]) for depth in range(len(path) + 1)]
        logits = noise(len(places), seed=step)
        given = served.apply(logits, places)
        assert torch.equal(given, Processors().apply(logits, places))
        again = served.apply(logits, places)  # what an interrupted step leaves is asked for again
        assert torch.equal(again, given)
        asked.commit([*path[: rng.randint(0, len(path))], rng.randrange(4, 12)], [])


def test_history_is_forgotten_with_its_request():
    served = Processors()
    asked = [request([5, n], frequency_penalty=1.0, id_=0) for n in range(6, 9)]  # one id: it is the object that counts
    for one in asked:
        assert served.apply(torch.zeros(1, 20), [Place(one, (one.tokens[-1],))])[0].count_nonzero() == 1
    assert len(served._histories) == 3
    del asked, one
    gc.collect()
    assert len(served._histories) == 0


SMALL = 50
BEYOND: list[dict[str, Any]] = [
    {"logit_bias": {3: 1.0, SMALL: 5.0, 200: 5.0}},
    {"logit_bias": {200: 5.0}},
    {"allowed_token_ids": [3, 4, SMALL, 200]},
    {"allowed_token_ids": [200]},
    {"bad_words": [[SMALL], [3], [5, 200]]},
    {"min_tokens": 3},  # token 60 is an end token
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("params", BEYOND, ids=str)
def test_report_105_a_smaller_draft_vocabulary_leaves_out_what_it_lacks(params):
    asked = request([5, 6], [5], **params)
    small, whole = noise(1)[:, :SMALL], noise(1)
    given, full = apply(small, Place(asked)), apply(whole, Place(asked))
    assert torch.equal(given, full[:, :SMALL])


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", BEYOND, ids=str)
def test_report_105_a_draft_model_that_lacks_named_tokens_drafts_on(params, temperature, coupled):
    drafter = ModelDrafter(ToyModel(noise(SMALL, SMALL)), VOCAB, coupled=coupled)
    draft = drafter.draft([request([5, 6], temperature=temperature, **params)], [4])[0]
    assert all(token < SMALL for token in draft.tokens)
    if params.get("allowed_token_ids") != [200]:  # of the only allowed token it knows nothing
        assert len(draft) == 4


def half_unbanned(ids, scores):
    """Of use only where it runs: after the bans, whose marks on even tokens it takes away, and before the filters."""
    even = torch.arange(scores.shape[1]) % 2 == 0
    return torch.where(scores.isinf() & even, -1.0, scores * 0.9 + (ids.shape[1] % 3))


TOGETHER: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "logit_bias": {t: (6.0 if t % 3 else -6.0) for t in range(3, VOCAB, 5)},  # so large that signs change
    "bad_words": [[8], [30, 31], [9, 9, 9], [12]],
    "min_tokens": 6,
    "allowed_token_ids": [t for t in range(VOCAB) if t % 7],
}
TOGETHER_THERE: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "sequence_bias": [[[token], bias] for token, bias in TOGETHER["logit_bias"].items()],
    "bad_words_ids": TOGETHER["bad_words"],
    "min_new_tokens": 6,
    "suppress_tokens": [t for t in range(VOCAB) if t % 7 == 0],
    "pad_token_id": 0,
}


@pytest.mark.parametrize("prompt", token_prompts(8), ids=len)
def test_all_together_have_the_meaning_and_the_order_of_transformers_generate(target, prompt):
    """Its own scores at each step, after its own processors and filters, equal ours."""
    with torch.inference_mode():
        out = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            top_p=1.0,
            min_p=0.001,
            logits_processor=LogitsProcessorList([half_unbanned]),
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **TOGETHER_THERE,
        )
    ids = out.sequences[0, len(prompt) :].tolist()
    params = TOGETHER | {"logits_processors": [half_unbanned]}
    for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        for drafted in {0, step // 2, step}:
            committed, path = ids[: step - drafted], tuple(ids[step - drafted : step])
            asked = request(prompt, committed, **params)
            asked.end_ids = frozenset([2])
            given = warp(apply(logits, Place(asked, path)), Filters(temperature=0.8, top_k=50, min_p=0.001))
            assert torch.equal(given.isinf(), scores.isinf())
            kept = ~given.isinf()
            torch.testing.assert_close(given[kept], scores[kept], rtol=1e-6, atol=1e-6)


def test_a_sampler_draws_from_what_the_processors_leave():
    places = many_places(3)
    logits = noise(len(places), seed=5)
    adjusted = apply(logits, *places)
    assert Sampler().draw(logits, places) == adjusted.argmax(dim=1).tolist()  # all of them are greedy
    laws = Sampler().laws(logits, places)
    assert torch.equal(laws, torch.nn.functional.one_hot(adjusted.argmax(dim=1), VOCAB).float())


# ------------------------------------------------------------------------------------- grammars and processors

SEQUENCES = [(3, 4, 5), (3, 4, 6, 7), (3, 8), (9,), (3, 4, 6, 2)]


def places_of(sequences):
    """(committed, path) for every way to split every beginning of a sequence."""
    whole = {sequence[:end] for sequence in sequences for end in range(len(sequence))}
    return [(way[:split], way[split:]) for way in sorted(whole) for split in range(len(way) + 1)]


def bound(committed, vocab=VOCAB, **params):
    asked = request([5, 9], constraint=OneOf(SEQUENCES, vocab), **params)
    object.__setattr__(asked.params, "structured", "the request holds the constraint")  # needs no text here
    for token in committed:
        asked.constraint.push(token)
        asked.commit([token], [])
    return asked


@pytest.mark.parametrize(("committed", "path"), places_of(SEQUENCES))
@pytest.mark.parametrize("vocab", [10, 64, VOCAB])  # masks come in whole bytes: shorter and longer than a row
def test_a_grammar_masks_what_may_not_follow_at_every_path(committed, path, vocab):
    way = (*committed, *path)
    allowed = {s[len(way)] for s in SEQUENCES if s[: len(way)] == way and len(s) > len(way)}
    asked = bound(committed)
    given = apply(noise(1, vocab), Place(asked, path))
    assert set((~given[0].isinf()).nonzero()[:, 0].tolist()) == allowed
    assert torch.equal(given[0, sorted(allowed)], noise(1, vocab)[0, sorted(allowed)])
    assert asked.constraint.taken == committed  # asking moves nothing


def test_a_grammar_that_ends_along_a_path_forbids_nothing_behind_its_end():
    """Nothing is committed there; a row of nothing but -inf would only be in the way."""
    assert torch.equal(apply(noise(1), Place(bound((3,)), (4, 5, 100))), noise(1))


def test_bans_count_inside_a_grammar():
    given = apply(noise(1), Place(bound((3, 4), bad_words=[[6]])))
    assert set((~given[0].isinf()).nonzero()[:, 0].tolist()) == {5}


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": [[3], [9]]},
        {"min_tokens": 5, "bad_words": [[3], [9]]},
        {"logits_processors": [lambda ids, scores: torch.full_like(scores, -math.inf)]},
    ],
)
def test_a_ban_never_leaves_nothing_of_a_grammar(params):
    """What the grammar alone leaves over has the last word."""
    given = apply(noise(1), Place(bound((), **params)))
    assert set((~given[0].isinf()).nonzero()[:, 0].tolist()) == {3, 9}
    assert torch.equal(given[0, [3, 9]], noise(1)[0, [3, 9]])


def test_an_end_token_that_a_grammar_demands_is_not_banned_by_min_tokens():
    """Token 2 is an end token, and the only one that may follow 3 4 6 besides 7."""
    given = apply(noise(1), Place(bound((3, 4, 6), min_tokens=9)))
    assert set((~given[0].isinf()).nonzero()[:, 0].tolist()) == {7}
    given = apply(noise(1), Place(bound((3, 4, 6), min_tokens=9, bad_words=[[7]])))
    assert set((~given[0].isinf()).nonzero()[:, 0].tolist()) == {2, 7}


@pytest.mark.parametrize(("output", "path"), [((), ()), ((7,), ()), ((), (8, 9)), ((7, 7), (8,))])
def test_custom_processors_see_one_row_and_the_whole_prefix(output, path):
    seen = []

    def spy(ids, scores):
        seen.append((ids.tolist(), ids.dtype, tuple(scores.shape), scores.clone()))
        return scores * 2.0

    asked = request([5, 6], output, logits_processors=[spy, spy], logit_bias={3: 2.0}, bad_words=[[4]])
    given = apply(noise(1), Place(asked, path))
    assert [entry[:3] for entry in seen] == [([[5, 6, *output, *path]], torch.int64, (1, VOCAB))] * 2
    assert seen[0][3][0, 3] == noise(1)[0, 3] + 2.0  # after the bias
    assert seen[0][3][0, 4] == -math.inf  # and the bans
    assert torch.equal(seen[1][3], seen[0][3] * 2.0)  # in their order
    assert torch.equal(given, seen[0][3] * 4.0)


def test_a_processor_that_works_in_place_changes_only_its_own_row():
    """Most of transformers' own return a new tensor, users' functions often do not."""
    logits = noise(3)
    before = logits.clone()
    free, own = request([5]), request([5], logits_processors=[lambda ids, scores: scores.mul_(2.0)])
    given = apply(logits, Place(free), Place(own), Place(free))
    assert torch.equal(logits, before)
    assert torch.equal(given, before * torch.tensor([[1.0], [2.0], [1.0]]))


def test_drafters_leave_out_what_must_be_asked_in_turn():
    def never(ids, scores):
        raise AssertionError("a draft model asked a processor that may have a state")

    asked = bound((3,), logits_processors=[never], logit_bias={7: 1.0})
    expected = noise(1)
    expected[0, 7] += 1.0
    assert torch.equal(Processors(in_turn=False).apply(noise(1), [Place(asked, (4,))]), expected)


# ------------------------------------------------------------------------------------------------ in the engine

PROMPTS = token_prompts(5)
DRAFTS = {"ngram": ["ngram:k=5"], "both": ["ngram:k=3", "model:{target},k=5"]}


class Watching:
    """A processor that remembers for how many tokens it was asked each time."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids, scores):
        self.calls.append(ids.shape[1])
        return scores


class Counting(Watching):
    """A processor with a state: it changes the scores by how often it has been called."""

    def __call__(self, ids, scores):
        super().__call__(ids, scores)
        return scores + 1.5 * torch.sin(torch.arange(scores.shape[1]) * (1.0 + len(self.calls)))


PENALTIES = {"repetition_penalty": 1.15, "presence_penalty": 0.3, "frequency_penalty": 0.3}
LAWS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "openai": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "bonus": {"repetition_penalty": 0.8, "frequency_penalty": -0.5},
    "bias": {"logit_bias": dict.fromkeys(range(3, VOCAB, 2), -4.0)},
    "bad_words": {"bad_words": [[t] for t in range(10, VOCAB, 9)] + [[t, t] for t in range(VOCAB)]},
    "allowed": {"allowed_token_ids": [t for t in range(VOCAB) if t % 4]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(10, VOCAB, 3))},
    "stateless": {"logits_processors": [half_unbanned, RepetitionPenaltyLogitsProcessor(1.2)]},
    "stateful": {"logits_processors": Counting},
    "everything": TOGETHER | PENALTIES | {"logits_processors": Counting, "stop_token_ids": [60, 61]},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.7},
}
CASES = [(name, t) for name in LAWS for t in (0.0, 0.9) if t or name not in ("min_p", "typical_p")]


def asked(name, temperature, seed):
    """Parameters with a state of their own, never used before."""
    law = dict(LAWS[name])
    if law.get("logits_processors") is Counting:
        law["logits_processors"] = [Counting()]
    chance = {"temperature": temperature, "seed": seed} if temperature else {}
    return SamplingParams(max_tokens=18, **law, **chance)


def decode(llm, name, temperature):
    params = [asked(name, temperature, seed) for seed in range(len(PROMPTS))]
    return llm.generate(PROMPTS, params), params


@pytest.fixture(scope="module")
def drafting(folders):
    """An LLM that has all draft models at hand."""
    return LLM(folders["target"], policy="fixed", draft=[f"model:{folders[name]}" for name in ("target", "shallow")])


@pytest.fixture(scope="module")
def plain(drafting):
    """Plain decoding, remembered by law and temperature."""
    llm, known = drafting.with_policy("off", max_batch=1), {}

    def run(name, temperature):
        if (name, temperature) not in known:
            outputs, params = decode(llm, name, temperature) if name else ([], [])
            known[name, temperature] = ([out.token_ids for out in outputs], params)
        return known[name, temperature]

    return run


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_report_64_75_76_77_83_every_law_is_the_same_with_and_without_drafts(
    drafting, plain, folders, name, draft, temperature
):
    specs = [text.format_map(folders) for text in DRAFTS[draft]]
    outputs, _ = decode(drafting.with_policy("fixed", specs), name, temperature)
    assert [out.token_ids for out in outputs] == plain(name, temperature)[0]
    if draft != "ngram":  # the promise is not kept by refusing every draft
        assert sum(out.stats.accepted.total() for out in outputs) > 0


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_the_laws_are_worth_testing(drafting, plain, name, temperature):
    """Each of them changes some outputs."""
    free = [SamplingParams(max_tokens=18, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]
    unchanged = drafting.generate(PROMPTS, free)
    pairs = zip(plain(name, temperature)[0], unchanged, strict=True)
    assert sum(ids != out.token_ids for ids, out in pairs) >= 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["openai", "bad_words", "min_tokens", "stateful", "everything"])
def test_greedy_output_is_the_same_under_every_rule(drafting, plain, folders, name, rule):
    llm = drafting.with_policy("fixed", ["ngram:k=3", f"model:{folders['shallow']}"], rule=rule)
    outputs, _ = decode(llm, name, 0.0)
    assert [out.token_ids for out in outputs] == plain(name, 0.0)[0]


@pytest.mark.parametrize("draft", DRAFTS)
def test_report_82_greedy_output_equals_transformers_generate_with_the_same_parameters(
    drafting, target, folders, draft
):
    llm = drafting.with_policy("fixed", [text.format_map(folders) for text in DRAFTS[draft]])
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=18, logits_processors=[half_unbanned], **TOGETHER))
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            ids = target.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=18,
                do_sample=False,
                logits_processor=LogitsProcessorList([half_unbanned]),
                **TOGETHER_THERE,
            )
        assert out.token_ids == ids[0, len(prompt) :].tolist()


THEIRS = {
    "no_repeat_ngram": lambda n: transformers.NoRepeatNGramLogitsProcessor(2),
    "min_length": lambda n: transformers.MinLengthLogitsProcessor(n + 9, [2, *range(9, VOCAB, 2)]),
    "suppress_at_begin": lambda n: transformers.SuppressTokensAtBeginLogitsProcessor(list(range(9, VOCAB, 2)), n + 1),
    "forced_eos": lambda n: transformers.ForcedEOSTokenLogitsProcessor(n + 7, 2),
    "decay": lambda n: transformers.ExponentialDecayLengthPenalty((4, 1.5), 2, n),
    "prompt_penalty": lambda n: RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=n),
    "sequence_bias": lambda n: SequenceBiasLogitsProcessor([[[t, t], 4.0] for t in range(VOCAB)]),
    "top_k": lambda n: transformers.TopKLogitsWarper(8),
    "top_p": lambda n: transformers.TopPLogitsWarper(0.6),
    "typical": lambda n: transformers.TypicalLogitsWarper(0.6),
    "epsilon": lambda n: transformers.EpsilonLogitsWarper(0.01),
    "eta": lambda n: transformers.EtaLogitsWarper(0.02),
    "top_h": lambda n: transformers.TopHLogitsWarper(0.4),
    "normalise": lambda n: transformers.LogitNormalization(),
}


@pytest.mark.parametrize("name", THEIRS)
def test_report_79_any_processor_of_transformers_works_at_every_place(drafting, target, folders, name):
    """Greedy as in its own `generate`, sampled as in plain decoding."""
    llm, plain = drafting.with_policy("fixed", ["ngram:k=3", f"model:{folders['target']}"]), drafting.with_policy("off")
    for seed, prompt in enumerate(PROMPTS[1:4]):
        params = SamplingParams(max_tokens=14, logits_processors=[THEIRS[name](len(prompt))])
        with torch.inference_mode():
            ids = target.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=14,
                do_sample=False,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([THEIRS[name](len(prompt))]),
            )
        assert llm.generate([prompt], params)[0].token_ids == ids[0, len(prompt) :].tolist()
        params = replace(params, temperature=1.0, seed=seed)
        assert llm.generate([prompt], params)[0].token_ids == plain.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_report_77_a_token_that_is_pushed_down_never_shows(drafting, folders, temperature):
    """Neither as a draft that stands nor as the token that the target adds."""
    llm = drafting.with_policy("fixed", ["ngram:k=3", f"model:{folders['target']},k=4"])
    free = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
    shown = {token for out in llm.generate(PROMPTS, free) for token in out.token_ids}
    for token in sorted(shown)[:8]:
        for out in llm.generate(PROMPTS, replace(free, logit_bias={token: -100})):
            assert token not in out.token_ids
            assert len(out.token_ids) == 30


@pytest.mark.parametrize("least", range(1, 11))
def test_report_14_80_end_tokens_are_banned_at_every_place_of_a_block(drafting, plain, folders, least):
    """Nearly every token ends the output, so what min_tokens lets through ends it at once."""
    ends = [t for t in range(VOCAB) if t % 8]
    params = SamplingParams(max_tokens=30, min_tokens=least, stop_token_ids=ends)
    llm = drafting.with_policy("fixed", [f"model:{folders['target']},k=4"])
    outputs = llm.generate(PROMPTS, params)
    expected = drafting.with_policy("off").generate(PROMPTS, params)
    for out, alone in zip(outputs, expected, strict=True):
        assert out.token_ids == alone.token_ids
        assert not set(out.token_ids[:least]) & {2, *ends}
        assert len(out.token_ids) > least
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("draft", DRAFTS)
def test_report_83_a_processor_with_a_state_is_called_once_for_each_token_in_order(drafting, folders, draft):
    llm = drafting.with_policy("fixed", [text.format_map(folders) for text in DRAFTS[draft]])
    for prompt in PROMPTS:
        counting = Counting()
        params = SamplingParams(max_tokens=18, ignore_eos=True, logits_processors=[counting])
        out = llm.generate([prompt], params)[0]
        assert counting.calls == list(range(len(prompt), len(prompt) + len(out.token_ids)))


def test_report_83_a_processor_is_not_called_behind_an_end_inside_a_block(drafting, folders):
    llm = drafting.with_policy("fixed", [f"model:{folders['target']},k=8"])
    prompt, free = PROMPTS[2], SamplingParams(max_tokens=30, ignore_eos=True)
    ids = llm.generate([prompt], free)[0].token_ids
    for end in set(ids):
        watching = Watching()
        params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(end,), logits_processors=[watching])
        out = llm.generate([prompt], params)[0]
        assert out.token_ids == ids[: ids.index(end) + 1]
        assert len(watching.calls) == len(out.token_ids)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_produced_that_is_not_allowed(drafting, rule, temperature):
    """Only the end token is allowed, and min_tokens bans it: something must give, but not to a third token."""
    params = SamplingParams(max_tokens=6, min_tokens=3, allowed_token_ids=[2], temperature=temperature, seed=1)
    out = drafting.with_policy("fixed", ["ngram"], rule=rule).generate([[5, 6]], params)[0]
    assert set(out.token_ids) <= {2}
