import pytest
import torch

from bozza import LLM
from bozza.core import Request
from bozza.drafters.model import CHUNK, ModelDrafter
from bozza.drafters.tree import LEAST
from bozza.leader import Fixed
from bozza.models.probe import load_runner
from bozza.models.runner import RaggedRunner
from bozza.params import SamplingParams
from tiny import VOCAB, shallower, tiny, token_prompts
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


# Trees


class Recorder(RaggedRunner):
    """Remembers its passes."""

    def __init__(self, model):
        super().__init__(model)
        self.passes = []

    def forward(self, rows, hidden_layers=()):
        self.passes.append(list(rows))
        longest = [self.store.length(row.slot) - (row.fed or 0) + len(row.tokens) for row in rows]
        deepest = [max(row.draft.depths(), default=0) for row in rows]
        assert max(map(sum, zip(longest, deepest, strict=True))) <= self.context_length
        return super().forward(rows, hidden_layers)


def plain_tree(model, tokens, budget, width):
    """Paths of the best nodes, by plain passes over every path: confidences multiplied, level by level."""
    values, level = {}, [()]
    while level:
        for path in level:
            with torch.inference_mode():
                law = model(input_ids=torch.tensor([[*tokens, *path]]), use_cache=False).logits[0, -1].softmax(dim=0)
            for token in law.topk(width).indices.tolist():
                values[(*path, token)] = values.get(path, 1.0) * float(law[token])
        deepest = max(map(len, values))
        best = sorted((path for path, value in values.items() if value >= LEAST), key=lambda path: -values[path])
        level = [path for path in best[:budget] if len(path) == deepest and deepest < budget][:width]
    return {path: values[path] for path in best[:budget]}


@pytest.mark.parametrize(("budget", "width"), [(1, 3), (4, 2), (12, 3), (12, 8)])
def test_a_tree_holds_the_likeliest_paths(budget, width):
    model = tiny("mistral")
    model.lm_head.weight.data *= 3  # surer of itself: deeper trees
    drafter = ModelDrafter(RaggedRunner(model), VOCAB, width=width)
    deep = 0
    for prompt in token_prompts(8):
        draft = drafter.draft([request(prompt, id_=len(prompt))], [budget])[0]
        expected = plain_tree(model, prompt, budget, width)
        found = dict(zip(draft.paths(), draft.confidences, strict=True))
        for path in found.keys() | expected.keys():  # where two are about as likely, rounding chooses
            least = min(*found.values(), *expected.values()) if len(found) == budget else LEAST
            assert abs(found.get(path, least) - expected.get(path, least)) < 1e-4
        assert not draft.laws
        deep = max(deep, *draft.depths())
    assert deep >= min(budget, 3)


def test_trees_of_a_batch_grow_together_and_are_those_of_each_request_alone():
    model = tiny("llama")
    prompts = token_prompts(6)
    asked = [request(prompt, index) for index, prompt in enumerate(prompts)]
    runner = Recorder(model)
    drafts = ModelDrafter(runner, VOCAB, width=3).draft(asked, [1, 4, 6, 8, 8, 8])
    levels = max(max(draft.depths()) for draft in drafts)
    assert len(runner.passes[0]) == len(asked)
    assert len(runner.passes) <= max(levels, 2) + 1
    assert all(row.fed is not None for rows in runner.passes[1:] for row in rows)
    assert len({row.slot for rows in runner.passes[1:] for row in rows}) == 5  # a single node has no children
    for one, budget, draft in zip(asked, [1, 4, 6, 8, 8, 8], drafts, strict=True):
        assert len(draft) <= budget
        assert ModelDrafter(RaggedRunner(model), VOCAB, width=3).draft([one], [budget])[0] == draft


def test_a_tree_leaves_nothing_behind():
    """Whatever was committed, the next draft is that of a drafter that never saw the first tree."""
    model = tiny("gemma2")
    drafter = ModelDrafter(Recorder(model), VOCAB, width=3)
    for number, prompt in enumerate(token_prompts(8)):
        asked = request(prompt, number)
        first = drafter.draft([asked], [8])[0]
        slot = drafter._slots._states[number].slot
        assert drafter._model.store.length(slot) == len(prompt)
        commit(asked, [*first.paths()[-1], 9] if number % 2 else [9])
        drafter._model.passes.clear()
        again = drafter.draft([asked], [8])[0]
        assert again == ModelDrafter(RaggedRunner(model), VOCAB, width=3).draft([asked], [8])[0]
        assert list(drafter._model.passes[0][0].tokens) == asked.tokens[len(prompt) :]


def test_an_interrupted_tree_is_rolled_back():
    model = tiny("llama")
    runner = Recorder(model)
    drafter = ModelDrafter(runner, VOCAB, width=2)
    asked = request([5, 6, 7])
    expand = drafter._slots.expand

    def interrupted(trees):
        expand(trees)
        raise KeyboardInterrupt

    drafter._slots.expand = interrupted
    with pytest.raises(KeyboardInterrupt):
        drafter.draft([asked], [6])
    drafter._slots.expand = expand
    assert drafter.draft([asked], [6]) == ModelDrafter(RaggedRunner(model), VOCAB, width=2).draft([asked], [6])


@pytest.mark.parametrize("length", range(58, 66))
def test_report_19_trees_end_where_the_context_does(length):
    model = tiny("llama", max_position_embeddings=64)
    draft = ModelDrafter(Recorder(model), VOCAB, width=4).draft([request([7] * length)], [12])[0]
    assert (max(draft.depths()) <= 64 - length + 1) if length <= 64 else not len(draft)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_catches_more_than_its_best_branch(rule, temperature):
    """And what comes out is the target's own. Beside coins a drawn chain may be better: the target then draws anew."""
    model = tiny("llama")
    prompts = token_prompts(12)
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True) for i in range(12)]
    plain = LLM(model, policy="off").generate(prompts, params)
    passes = {}
    for width in (1, 4):
        llm = LLM(model, policy="off", rule=rule)
        drafter = ModelDrafter(RaggedRunner(shallower(model, 2)), VOCAB, coupled=llm.engine._rule.coupled, width=width)
        llm.engine._drafters[drafter.name] = drafter
        llm.engine._leader = Fixed({"model": 12 if width > 1 else 3})
        outputs = llm.generate(prompts, params)
        passes[width] = sum(out.stats.passes for out in outputs)
        if rule == "coupled" or temperature == 0.0:
            assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert passes[4] < passes[1] or not (rule == "coupled" or temperature == 0.0)
