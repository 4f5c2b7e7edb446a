import pytest
import torch

from bozza.core import Request
from bozza.drafters.model import CHUNK, ModelDrafter
from bozza.models.probe import load_runner
from bozza.params import SamplingParams
from tiny import VOCAB, shallower, tiny
from toy import ToyModel, cycle


def request(tokens, id_=0, **params):
    return Request(id_, list(tokens), len(tokens), SamplingParams(**params), 7, frozenset(), 10_000)


def commit(asked, tokens):
    asked.tokens += tokens


def test_follows_rollbacks_and_feeds_only_what_is_new():
    model = cycle(20)
    drafter = ModelDrafter(model, 20)
    asked = request([3, 4])
    assert drafter.draft([asked], [3])[0].tokens == (5, 6, 7)
    slot = next(iter(model.tokens))
    assert model.tokens[slot] == [3, 4, 5, 6]
    commit(asked, [5, 9])  # 6 and 7 were rejected
    model.passes.clear()
    assert drafter.draft([asked], [2])[0].tokens == (10, 11)
    assert model.tokens[slot] == [3, 4, 5, 9, 10]
    assert [len(rows[0].tokens) for rows in model.passes] == [1, 1]
    commit(asked, [10, 11, 12])  # all accepted: the last draft and the bonus were never fed
    model.passes.clear()
    drafter.draft([asked], [1])
    assert model.passes[0][0].tokens == [11, 12]


def test_a_token_that_returns_behind_a_rejected_one_is_not_mistaken_for_it():
    model = cycle(20)
    drafter = ModelDrafter(model, 20)
    asked = request([3])
    drafter.draft([asked], [4])  # fed 3 4 5 6
    commit(asked, [9, 5, 6, 1])  # 5 and 6 stand where they were fed, but after another token
    drafter.draft([asked], [1])
    assert next(iter(model.tokens.values())) == [3, 9, 5, 6, 1]


def test_one_pass_per_depth_for_the_whole_batch():
    model = cycle(30)
    drafter = ModelDrafter(model, 30)
    asked = [request([n], n) for n in range(5)]
    drafts = drafter.draft(asked, [1, 2, 3, 4, 4])
    assert [len(draft) for draft in drafts] == [1, 2, 3, 4, 4]
    assert [len(rows) for rows in model.passes] == [5, 4, 3, 2]


def test_long_prompts_are_read_in_chunks():
    model = cycle(50)
    drafter = ModelDrafter(model, 50)
    model.context_length = 5000
    asked = request([i % 50 for i in range(2 * CHUNK + 10)])
    assert len(drafter.draft([asked], [2])[0]) == 2
    assert [len(rows[0].tokens) for rows in model.passes] == [CHUNK, CHUNK, 10, 1]


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66])
def test_report_19_a_request_that_outgrows_the_draft_context_gets_no_draft(length):
    model = cycle(100)
    model.context_length = 64
    drafter = ModelDrafter(model, 100)
    draft = drafter.draft([request(list(range(length)))], [4])[0]
    # Drafting token n feeds n - 1 tokens more than the request has.
    assert len(draft) == max(0, min(4, 64 - length + 1))


def test_report_105_110_padded_vocabularies_never_leak_ids():
    table = torch.zeros(8, 8)
    table[:, 7] = 5.0  # beyond the target's vocabulary
    table[:, 2] = 1.0
    for target_vocab, expected in ((7, 2), (8, 7)):
        drafter = ModelDrafter(ToyModel(table), target_vocab)
        assert drafter.draft([request([0])], [1])[0].tokens == (expected,)
    assert len(ModelDrafter(ToyModel(table), 100).draft([request([0])], [2])[0]) == 2


def test_slots_are_given_back():
    model = cycle(10)
    drafter = ModelDrafter(model, 10)
    asked = request([1])
    drafter.start(asked)
    drafter.stop(asked)  # never drafted
    drafter.draft([asked], [2])
    assert len(model.tokens) == 1
    drafter.stop(asked)
    assert not model.tokens


def test_the_same_model_with_the_same_noise_draws_the_same_tokens():
    model = tiny("llama")
    one, other = ModelDrafter(load_runner(model), VOCAB), ModelDrafter(load_runner(shallower(model, 3)), VOCAB)
    asked = request([5, 6, 7], temperature=1.0)
    assert one.draft([asked], [6]) == other.draft([asked], [6])
    changed = Request(1, [5, 6, 7], 3, asked.params, 8, frozenset(), 10_000)
    assert one.draft([changed], [6]) != one.draft([asked], [6])


def test_two_drafters_draw_independently_of_each_other_and_say_from_what():
    """Beside coins the numbers of one must not be those of the other: the second would not be drawn from its law."""
    flat = ToyModel(torch.zeros(1000, 1000))
    drafters = [ModelDrafter(flat, 1000, name, coupled=False) for name in ("model", "model2")]
    met = 0
    for seed in range(20):
        drafts = [d.draft([request([3, 4], id_=seed, temperature=1.0)], [4])[0] for d in drafters]
        for draft in drafts:
            assert all(torch.allclose(law, torch.full((1000,), 1e-3)) for law in draft.laws)
        met += sum(a == b for a, b in zip(*(draft.tokens for draft in drafts), strict=True))
    assert met <= 3  # of 80; a shared number would make it 80


def test_a_drafter_repeats_itself_under_one_seed_and_moves_on_with_each_pass():
    flat = ToyModel(torch.zeros(1000, 1000))
    drafter = ModelDrafter(flat, 1000, coupled=False)
    asked = request([3, 4], temperature=1.0)
    first = drafter.draft([asked], [4])[0]
    assert drafter.draft([asked], [4])[0] == first
    asked.stats.passes += 1
    assert drafter.draft([asked], [4])[0] != first
