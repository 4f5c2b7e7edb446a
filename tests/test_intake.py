"""From text to what the engine serves: prompts, conversations, words, grammars, and seeds of several outputs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from bozza import LLM, ConfigError, PromptError, SamplingParams
from bozza.intake import Intake, sample_seed
from bozza.params import Structured
from bozza.structured import GrammarConstraint
from bozza.text import OutputText
from tiny import VOCAB, token_prompts


@pytest.fixture
def intake(byte_tokenizer):
    return Intake(byte_tokenizer, VOCAB, frozenset([2]))


def ids_of(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_text_is_encoded_as_it_stands(intake, byte_tokenizer):
    assert intake.encode("a b") == byte_tokenizer("a b")["input_ids"]
    with pytest.raises(PromptError, match="the prompt is empty"):
        intake.encode("")


@pytest.mark.parametrize(
    "act",
    [
        lambda intake: intake.encode("text"),
        lambda intake: intake.encode_chat([{"role": "user", "content": "hi"}]),
        lambda intake: intake.extras(SamplingParams(stop="x")),
        lambda intake: intake.extras(SamplingParams(bad_words="x")),
        lambda intake: intake.extras(SamplingParams(structured=Structured(regex="a"))),
    ],
)
def test_text_needs_a_tokenizer(act):
    with pytest.raises(PromptError, match="this LLM has no tokenizer: give token ids") as caught:
        act(Intake(None, VOCAB, frozenset()))
    assert len(str(caught.value).splitlines()) == 1


def test_without_text_no_tokenizer_is_needed():
    given = Intake(None, VOCAB, frozenset()).extras(SamplingParams(bad_words=[[5, 6]], stop_token_ids=[7], logprobs=1))
    assert given == {"bad_words": [(5, 6)], "prediction": [], "constraint": None, "watches": []}


def test_a_bad_word_stands_for_its_tokens_inside_and_at_the_start_of_a_word(intake, byte_tokenizer):
    given = intake.extras(SamplingParams(bad_words=["ab", [9, 8]]))["bad_words"]
    assert set(given) == {ids_of(byte_tokenizer, "ab"), ids_of(byte_tokenizer, " ab"), (9, 8)}


def test_a_bad_word_without_tokens_is_refused():
    class Deaf:
        def __call__(self, text, **_):
            return {"input_ids": [5] if text.startswith(" ") else []}

    with pytest.raises(ConfigError, match="bad word 'x' has no tokens"):
        Intake(Deaf(), VOCAB, frozenset()).extras(SamplingParams(bad_words="x"))


def test_each_request_has_watches_and_a_grammar_of_its_own(intake):
    """They have a state."""
    params = SamplingParams(stop=["x"], structured=Structured(regex="a*"))
    one, other = intake.extras(params), intake.extras(params)
    assert isinstance(one["watches"][0], OutputText)
    assert isinstance(one["constraint"], GrammarConstraint)
    assert one["watches"][0] is not other["watches"][0]
    assert one["constraint"] is not other["constraint"]
    assert not one["watches"][0].push(ids_of(intake.tokenizer, "a")[0])
    assert one["watches"][0].take(True) == "a"
    assert other["watches"][0].take(True) == ""


def test_the_vocabulary_is_read_for_grammars_once_and_only_if_there_is_one(intake):
    intake.extras(SamplingParams(stop="x"))
    assert intake._compiler is None
    intake.extras(SamplingParams(structured=Structured(regex="a")))
    compiler = intake._compiler
    intake.extras(SamplingParams(structured=Structured(regex="b")))
    assert intake._compiler is compiler


def test_min_tokens_reach_the_stop_strings(intake):
    watch = intake.extras(SamplingParams(stop="a", min_tokens=3))["watches"][0]
    token = ids_of(intake.tokenizer, "a")[0]
    assert [watch.push(token) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "conversation is empty"),
        (["hi"], "needs 'role' and 'content'"),
        ([{"role": "user"}], "needs 'role' and 'content'"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(intake, messages, says):
    with pytest.raises(PromptError, match=says) as caught:
        intake.encode_chat(messages)
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_that_raises_or_is_missing_is_said_in_one_line(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('only users\nmay speak') }}"
    with pytest.raises(PromptError, match=r"template refuses this conversation \(.*only users") as caught:
        Intake(tokenizer, VOCAB, frozenset()).encode_chat([{"role": "tool", "content": "x"}])
    assert len(str(caught.value).splitlines()) == 1
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        Intake(tokenizer, VOCAB, frozenset()).encode_chat([{"role": "user", "content": "x"}])


def test_seeds_of_several_outputs_are_the_own_one_and_others():
    seeds = [sample_seed(seed, index) for seed in (0, 1, 11, 2**62) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert [sample_seed(seed, 0) for seed in (0, 1, -5, 2**70)] == [0, 1, -5, 2**70]
    assert all(0 <= sample_seed(3, index) < 2**63 for index in range(1, 50))
    assert sample_seed(1, 11) != sample_seed(11, 1)
    assert sample_seed(4, 2) == sample_seed(4, 2)


# ------------------------------------------------------------------------------------------------ several outputs

PROMPTS = token_prompts(4)
PARAMS = SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=4)


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders["target"], policy="fixed", draft=["ngram:k=3", f"model:{folders['shallow']}"])


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_report_121_several_outputs_differ_and_the_first_is_that_of_one(llm, rule):
    llm = llm.with_policy("fixed", llm.draft, rule=rule)
    for prompt in PROMPTS[1:]:
        out = llm.generate([prompt], PARAMS)[0]
        assert out.samples == [out, *out.others]
        assert len({tuple(sample.token_ids) for sample in out.samples}) == 4
        assert all(sample.prompt_token_ids == prompt for sample in out.samples)
        assert all(sample.others == [] for sample in out.others)
        alone = llm.generate([prompt], replace(PARAMS, n=1))[0]
        assert out.token_ids == alone.token_ids
        assert alone.others == []
        # Asking for more adds outputs and changes none.
        more = llm.generate([prompt], replace(PARAMS, n=6))[0]
        assert [s.token_ids for s in more.samples[:4]] == [s.token_ids for s in out.samples]


def test_report_121_each_of_several_outputs_is_that_of_plain_decoding(llm):
    drafted = llm.generate(PROMPTS, PARAMS)
    plain = llm.with_policy("off", max_batch=1).generate(PROMPTS, PARAMS)
    assert [[s.token_ids for s in out.samples] for out in drafted] == [
        [s.token_ids for s in out.samples] for out in plain
    ]
    for out, prompt in zip(drafted[:2], PROMPTS[:2], strict=True):
        for index, sample in enumerate(out.samples):
            alone = replace(PARAMS, n=1, seed=sample_seed(3, index))
            assert llm.generate([prompt], alone)[0].token_ids == sample.token_ids


def test_several_outputs_end_by_themselves(llm):
    """Each has its own stop strings, counts and log-probabilities."""
    params = replace(PARAMS, max_tokens=40, stop=["a", "b", "c", "d", "e"], logprobs=1, prompt_logprobs=0, n=5)
    out = llm.generate("hello world", params)[0]
    assert len({len(sample.token_ids) for sample in out.samples}) > 1
    for sample in out.samples:
        assert not set(sample.text) & set("abcde")
        assert len(sample.logprobs) == sample.stats.committed == len(sample.token_ids)
        assert len(sample.prompt_logprobs) == len(out.prompt_token_ids)


def test_several_unseeded_outputs_differ_from_call_to_call(llm):
    params = replace(PARAMS, seed=None, n=3)
    texts = [tuple(s.token_ids) for _ in range(3) for s in llm.generate([PROMPTS[2]], params)[0].samples]
    assert len(set(texts)) == 9


def test_a_mistake_in_one_request_starts_none(llm):
    fine, wrong = SamplingParams(max_tokens=4), replace(PARAMS, structured=Structured(regex="("))
    with pytest.raises(ConfigError, match="structured output"):
        llm.generate(["a", "b"], [fine, wrong])
    assert llm.engine.idle
    assert len(llm.generate("a", fine)[0].token_ids) <= 4
