"""Structured output: in the language, the same with and without drafts, and over exactly where nothing may follow."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest

from bozza import LLM, ConfigError, SamplingParams
from bozza.params import Structured
from bozza.structured import GrammarCompiler
from grammars import OneOf
from tiny import VOCAB

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def is_person(text):
    found = json.loads(text)
    assert list(found) == ["name", "age", "kind"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 4
    assert 0 <= found["age"] <= 99
    assert found["kind"] in ("alpha", "alphabet", "beta")


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(f"{text!r} does not match {pattern}")


CASES = {
    "schema": (Structured(json_schema=PERSON), is_person),
    "list": (
        Structured(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
        matches(r"\[(true|false)(, (true|false)){1,2}\]"),
    ),
    "regex": (Structured(regex=r"[ab]{3,6}(c|dd)e?"), matches(r"[ab]{3,6}(c|dd)e?")),
    "words": (Structured(regex=r"(foo|foobar|bar) [0-9]{2}\.[0-9]"), matches(r"(foo|foobar|bar) \d\d\.\d")),
    "two_bytes": (Structured(regex="[éΩ]{2}x[éΩ]{1,3}"), matches("[éΩ]{2}x[éΩ]{1,3}")),
    "lark": (
        Structured(grammar='start: item ("," item)~1..2\nitem: "<" WORD ">"\nWORD: /[a-c]{1,3}/'),
        matches(r"<[a-c]{1,3}>(,<[a-c]{1,3}>){1,2}"),
    ),
}
DRAFTS = {
    "ngram": ["ngram"],
    "grammar": ["grammar"],
    "model": ["model:{shallow},k=6"],
    "all": ["grammar:k=5", "ngram:k=3", "model:{target},k=7"],
}
PROMPTS = ["hello world", 'so {"name": "ab", "age": 12, "kind": "beta"} {"name": "ab"']
CHANCES = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 8},
    "filtered": {"temperature": 1.5, "seed": 2, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def drafting(folders):
    return LLM(folders["target"], policy="fixed", draft=[f"model:{folders[name]}" for name in ("target", "shallow")])


@pytest.fixture(scope="module")
def llms(drafting, folders):
    made = {"off": drafting.with_policy("off", max_batch=1)}
    for name, draft in DRAFTS.items():
        made[name] = drafting.with_policy("fixed", [text.format_map(folders) for text in draft])
    return made


@pytest.fixture(scope="module")
def plain(llms):
    known = {}

    def run(case, chance):
        if (case, chance) not in known:
            params = SamplingParams(max_tokens=90, structured=CASES[case][0], **CHANCES[chance])
            known[case, chance] = llms["off"].generate(PROMPTS, params)
        return known[case, chance]

    return run


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("case", CASES)
def test_output_is_in_the_language_and_ends_with_it(plain, case, chance):
    for out in plain(case, chance):
        CASES[case][1](out.text)
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("case", CASES)
def test_report_85_86_structured_output_is_that_of_plain_decoding(llms, plain, case, draft):
    """Greedy and seeded requests in one batch."""
    params = [
        SamplingParams(max_tokens=90, structured=CASES[case][0], **chance)
        for chance in CHANCES.values()
        for _ in PROMPTS
    ]
    outputs = llms[draft].generate(PROMPTS * len(CHANCES), params)
    expected = [out for chance in CHANCES for out in plain(case, chance)]
    assert [(out.token_ids, out.text) for out in outputs] == [(out.token_ids, out.text) for out in expected]
    assert all(out.finish_reason == "stop" for out in outputs)
    assert all(out.stats.committed == len(out.token_ids) for out in outputs)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("case", ["schema", "regex", "lark"])
def test_rules_that_toss_coins_stay_in_the_language(llms, plain, folders, case, rule):
    llm = llms["all"].with_policy("fixed", ["grammar:k=5", f"model:{folders['shallow']}"], rule=rule)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=90, structured=CASES[case][0]))
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain(case, "greedy")]
    for seed in range(3):
        params = SamplingParams(max_tokens=90, structured=CASES[case][0], temperature=1.0, seed=seed)
        for out in llm.generate(PROMPTS, params):
            CASES[case][1](out.text)
            assert out.finish_reason == "stop"


def test_forced_tokens_are_drafted_and_all_of_them_stand(llms):
    """Keys, punctuation, the rest of an alternative."""
    for out in llms["grammar"].generate(PROMPTS, SamplingParams(max_tokens=90, structured=CASES["schema"][0])):
        assert out.stats.drafted["grammar"] == out.stats.accepted["grammar"] >= len('"name": "", "age": , "kind": ""')
        assert out.stats.passes <= len(out.token_ids) - out.stats.accepted["grammar"] + 1  # the last may add nothing


def test_report_93_the_default_drafters_of_structured_output_are_at_work(folders):
    out = LLM(folders["target"]).generate("x", SamplingParams(structured=CASES["schema"][0], max_tokens=90))[0]
    assert out.stats.accepted["grammar"] > 20


@pytest.mark.parametrize("draft", ["off", *DRAFTS])
@pytest.mark.parametrize("length", range(1, 12))
def test_report_85_91_a_language_that_ends_inside_a_block_ends_there(llms, draft, length):
    """No end token follows: nothing may follow."""
    params = SamplingParams(max_tokens=40, structured=Structured(regex="ab" * length))
    out = llms[draft].generate("abab" * 4, params)[0]
    assert (out.text, out.finish_reason) == ("ab" * length, "stop")
    assert len(out.token_ids) == out.stats.committed == 2 * length


@pytest.mark.parametrize("draft", ["off", *DRAFTS])
@pytest.mark.parametrize("most", [1, 2, 5, 6, 11])
def test_a_limit_cuts_structured_output(llms, draft, most):
    params = SamplingParams(max_tokens=most, structured=Structured(regex="abcdefghijkl"))
    out = llms[draft].generate("abab", params)[0]
    assert (out.text, out.finish_reason) == ("abcdefghijkl"[:most], "length")


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_language_that_may_go_on_ends_at_the_models_own_end(llms, draft):
    free = SamplingParams(max_tokens=20, structured=Structured(regex="[ -~]*"), temperature=1.0, logit_bias={2: 3.0})
    params = [replace(free, seed=seed) for seed in range(12)]
    outputs = llms[draft].generate(["abc"] * 12, params)
    assert [out.token_ids for out in outputs] == [llms["off"].generate("abc", chosen)[0].token_ids for chosen in params]
    ended = [out for out in outputs if out.finish_reason == "stop"]
    assert len({len(out.token_ids) for out in ended}) > 2
    assert all(out.token_ids[-1] == 2 and len(out.text) == len(out.token_ids) - 1 for out in ended)
    assert all(re.fullmatch("[ -~]*", out.text) for out in outputs)


def test_report_86_an_ngram_that_the_language_bans_is_cut_where_it_is_banned(llms):
    """The prompt suggests X after abc; the language allows only digits there."""
    params = SamplingParams(max_tokens=40, structured=Structured(regex="(abc[0-9] ){5}"))
    out = llms["ngram"].generate("abcX abcX abcX abcX ", params)[0]
    assert re.fullmatch("(abc[0-9] ){5}", out.text)
    assert 5 <= out.stats.accepted["ngram"] < out.stats.drafted["ngram"]
    assert out.token_ids == llms["off"].generate("abcX abcX abcX abcX ", params)[0].token_ids


def test_report_87_many_requests_with_other_languages_at_once(llms):
    structured = [CASES[case][0] for case in CASES] * 5
    params = [
        SamplingParams(max_tokens=60, structured=one, temperature=1.0 if i % 2 else 0.0, seed=i)
        for i, one in enumerate(structured)
    ]
    outputs = llms["all"].generate(["ab"] * len(params), params)
    for case, out in zip(list(CASES) * 5, outputs, strict=True):
        CASES[case][1](out.text)
    for chosen, out in list(zip(params, outputs, strict=True))[::6]:
        assert out.token_ids == llms["off"].generate("ab", chosen)[0].token_ids


@pytest.mark.parametrize("draft", ["all", "model"])
def test_report_89_requests_without_a_language_are_untouched_by_those_that_have_one(llms, draft):
    free = [SamplingParams(max_tokens=24, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 1.0)]
    bound = [SamplingParams(max_tokens=90, structured=CASES[case][0]) for case in ("schema", "regex")]
    mixed = llms[draft].generate(["hello world"] * 4, [free[0], bound[0], free[1], bound[1]])
    alone = [llms["off"].generate("hello world", params)[0] for params in (free[0], bound[0], free[1], bound[1])]
    assert [out.token_ids for out in mixed] == [out.token_ids for out in alone]
    assert mixed[0].stats.drafted["grammar"] == mixed[2].stats.drafted["grammar"] == 0


def test_report_89_a_language_that_is_wrong_is_the_error_of_its_own_call(llms):
    llm = llms["all"]
    stream = llm.stream("hello", SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    with pytest.raises(ConfigError, match="structured output"):
        llm.generate("hello", SamplingParams(structured=Structured(regex="(")))
    assert len([token for chunk in stream for token in chunk.token_ids]) < 9
    assert len(stream.token_ids) == 9
    assert llm.engine.idle


@pytest.mark.parametrize("draft", ["off", "ngram", "all"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 6}])
def test_report_88_the_language_holds_from_the_token_after_its_beginning(llms, draft, sampling):
    """Free until a character that the model says by itself, also in the middle of a block."""
    free = SamplingParams(max_tokens=30, ignore_eos=True, **sampling)
    ids = llms["off"].generate("hello world", free)[0].token_ids
    tokenizer, tried = llms["off"].tokenizer, 0
    for place, token in enumerate(ids):
        after = tokenizer.decode([token])
        if not re.fullmatch(r"[!-~]", after) or token in ids[:place]:
            continue
        tried += 1
        shape = Structured(regex=r"[xyz]{2}(ok|no){2}", after=after)
        out = llms[draft].generate("hello world", replace(free, structured=shape, max_tokens=60))[0]
        assert out.token_ids[: place + 1] == ids[: place + 1]
        assert re.fullmatch(r"[xyz]{2}(ok|no){2}", tokenizer.decode(out.token_ids[place + 1 :]))
        assert out.finish_reason == "stop"
        assert out.token_ids == llms["off"].generate("hello world", replace(free, structured=shape))[0].token_ids
        if tried == 3:
            break
    assert tried >= 2


def test_report_88_a_beginning_that_never_comes_leaves_the_output_free(llms):
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    bound = replace(free, structured=Structured(regex="ok", after="!"), bad_words=["!"])
    banned = replace(free, bad_words=["!"])
    for name in ("off", "all"):
        assert llms[name].generate("abc", bound)[0].token_ids == llms[name].generate("abc", banned)[0].token_ids


class Wobble:
    """A processor with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores.roll(self.calls, dims=1) * 0.5 + scores


@pytest.mark.parametrize("draft", ["grammar", "all"])
def test_other_parameters_count_inside_a_language(llms, draft):
    """All of them at once, in plain decoding and with drafts."""

    def params(seed):
        return SamplingParams(
            max_tokens=60,
            structured=CASES["schema"][0],
            temperature=0.9 if seed % 2 else 0.0,
            seed=seed,
            min_p=0.01,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            logit_bias=dict.fromkeys(range(70, 80), 3.0),
            bad_words=["a", "9", "0"],
            min_tokens=20,
            logits_processors=[Wobble()],
            logprobs=1,
        )

    outputs = llms[draft].generate(["abc"] * 4, [params(seed) for seed in range(4)])
    for seed, out in enumerate(outputs):
        assert out.token_ids == llms["off"].generate("abc", params(seed))[0].token_ids
        is_person(out.text)
        assert not set(str(json.loads(out.text)["age"])) & {"9", "0"}
        assert len(out.logprobs) == len(out.token_ids)


@pytest.mark.parametrize("draft", ["off", "all"])
def test_a_stop_string_inside_structured_output_counts(llms, draft):
    params = SamplingParams(max_tokens=90, structured=CASES["schema"][0], stop='", "age')
    out = llms[draft].generate("hello world", params)[0]
    assert re.fullmatch(r'\{"name": "[^"]*', out.text)
    assert out.finish_reason == "stop"


def test_streams_and_several_outputs_are_structured_too(llms, plain):
    params = SamplingParams(max_tokens=90, structured=CASES["schema"][0])
    for prompt, expected in zip(PROMPTS, plain("schema", "greedy"), strict=True):
        chunks = list(llms["all"].stream(prompt, params))
        assert "".join(chunk.text for chunk in chunks) == expected.text
    samples = llms["all"].generate("ab", replace(params, temperature=1.0, seed=1, n=4))[0].samples
    assert len({sample.text for sample in samples}) > 1
    for sample in samples:
        is_person(sample.text)


# -------------------------------------------------------------------------------------------- the constraint itself


@pytest.fixture(scope="module")
def compiler(byte_tokenizer):
    return GrammarCompiler(byte_tokenizer, VOCAB, frozenset([2]))


WORDS = ["foo", "foobar", "fox", "b", "bar"]


def tokens_of(bits):
    return None if bits is None else {i for i in range(VOCAB) if bits[i // 8] >> i % 8 & 1}


def both(compiler, byte_tokenizer):
    """The same language by llguidance and by enumeration. A word that may go on ends with the end token."""
    ids = [tuple(byte_tokenizer(word)["input_ids"]) for word in WORDS]
    longer = [any(other[: len(word)] == word != other for other in ids) for word in ids]
    ended = [(*word, 2) if more else word for word, more in zip(ids, longer, strict=True)]
    return compiler.compile(Structured(regex="|".join(WORDS))), OneOf(ended, VOCAB), ended


def test_a_compiled_language_is_that_of_its_enumeration_at_every_path(compiler, byte_tokenizer):
    """Every word, committed up to every place, asked about every path from there."""
    *_, words = both(compiler, byte_tokenizer)
    asked = 0
    for word in words:
        given, known, _ = both(compiler, byte_tokenizer)
        for token in word:
            paths = {other[len(known.taken) : end] for other in words for end in range(len(other))}
            for path in sorted(paths):
                if (*known.taken, *path) in {other[: len(known.taken) + len(path)] for other in words}:
                    assert tokens_of(given.allowed(path)) == tokens_of(known.allowed(path))
                    asked += 1
            for most in (1, 2, 3, 9):
                assert given.forced(most) == known.forced(most)
            assert given.push(token) == known.push(token)
    assert asked > 50


def test_asking_and_forcing_move_nothing(compiler):
    """Also paths that the language does not hold, or that go past its end."""
    given = compiler.compile(Structured(json_schema=PERSON))
    text = '{"name": "x", "age": 7, "kind": "beta"}'
    ids = compiler._tokenizer(text)["input_ids"]
    for place, token in enumerate(ids):
        before = given.allowed(())
        for path in ([200], ids[place:], [*ids[place:], 2], [*ids[place : place + 3], 200, 200], [2]):
            given.allowed(path)
            given.forced(1 + place % 9)
            assert given.allowed(()) == before
        assert token in tokens_of(before)
        assert given.push(token) == (place == len(ids) - 1)


def test_nothing_is_forbidden_behind_the_end_or_behind_what_is_forbidden(compiler):
    given = compiler.compile(Structured(regex="ab"))
    a, b, x = compiler._tokenizer("abx")["input_ids"]
    assert tokens_of(given.allowed([a])) == {b}
    assert given.allowed([a, b]) is None
    assert given.allowed([a, x]) is None


def test_forced_tokens_stop_at_the_first_choice_and_at_the_end(compiler):
    ids = compiler._tokenizer
    assert compiler.compile(Structured(regex="abc[de]f")).forced(9) == ids("abc")["input_ids"]
    assert compiler.compile(Structured(regex="abc[de]f")).forced(2) == ids("ab")["input_ids"]
    assert compiler.compile(Structured(regex="abc")).forced(9) == ids("abc")["input_ids"]
    assert compiler.compile(Structured(regex="[ab]")).forced(9) == []


def test_a_beginning_is_waited_for_in_the_path_too(compiler):
    given = compiler.compile(Structured(regex="ab", after="!"))
    bang, a, b, x = compiler._tokenizer("!abx")["input_ids"]
    assert given.allowed([]) is None
    assert given.allowed([x, a]) is None
    assert tokens_of(given.allowed([bang])) == {a}
    assert tokens_of(given.allowed([x, bang, a])) == {b}
    assert given.forced(5) == []  # not before it is committed
    assert not given.push(x)
    assert not given.push(bang)
    assert given.forced(5) == [a, b]
    assert tokens_of(given.allowed([])) == {a}
    assert not given.push(a)
    assert given.push(b)


def test_a_schema_may_be_given_as_text(compiler):
    text, mapping = (compiler.compile(Structured(json_schema=schema)) for schema in (json.dumps(PERSON), PERSON))
    assert text.allowed(()) == mapping.allowed(())
    assert text.forced(50) == mapping.forced(50) != []


def test_json_is_written_in_one_way(compiler):
    """Room for white space would be room to ramble, and less would be forced."""
    given = compiler.compile(
        Structured(json_schema={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    )
    head = compiler._tokenizer('{"a": 1')["input_ids"]
    assert given.forced(50)[: len(head)] == head


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (Structured(regex="("), "regex"),
        (Structured(regex="a(?=b)"), "regex"),  # what it cannot do is said too
        (Structured(json_schema="not JSON"), "this is not a JSON schema"),
        (Structured(json_schema={"type": "nonsense"}), "nonsense"),
        (Structured(json_schema={"a": {1, 2}}), "this is not a JSON schema"),
        (Structured(json_schema={"$ref": "#/nowhere"}), "nowhere"),
        (Structured(json_schema={"not": {"type": "string"}}), "not"),
        (Structured(json_schema={"type": "string", "format": "nonsense"}), "nonsense"),
        (Structured(grammar="start"), "structured output"),
        (Structured(grammar=""), "Empty grammar"),
        (Structured(grammar="start: missing"), "missing"),
        (Structured(regex="a", after="!!"), "after='!!' is 2 tokens, use one"),
        (Structured(regex="a", after=""), "after='' is 0 tokens, use one"),
    ],
)
def test_wrong_languages_are_refused_in_one_line(llms, shape, says):
    with pytest.raises(ConfigError) as caught:
        llms["off"].generate("abc", SamplingParams(structured=shape))
    assert says in str(caught.value)
    assert str(caught.value).startswith("structured output")
    assert len(str(caught.value).splitlines()) == 1
    assert llms["off"].engine.idle


def test_what_is_wrong_is_said_without_noise(compiler):
    with pytest.raises(ConfigError) as caught:
        compiler.compile(Structured(json_schema={"type": "nonsense"}))
    assert str(caught.value) == "structured output: Invalid type: nonsense"


def test_a_language_that_llguidance_gives_up_on_does_not_end_with_stop(llms):
    """It has room for 2000 items, which shows only when a token is read: the output is no word of the language then."""
    ways = [f'"w{i}" start' for i in range(2500)]
    params = SamplingParams(max_tokens=12, structured=Structured(grammar=f"start: {' | '.join(ways)}"))
    try:
        out = llms["off"].generate("abc", params)[0]
    except ConfigError:
        return
    assert out.finish_reason != "stop"


def test_without_llguidance_one_line_says_what_to_install(folders, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "llguidance"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = LLM(folders["target"])
    with pytest.raises(ConfigError) as caught:
        llm.generate("abc", SamplingParams(structured=Structured(regex="a")))
    assert "pip install" in str(caught.value)
    assert "llguidance" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert llm.engine.idle
    assert llm.generate("abc", SamplingParams(max_tokens=2))[0].token_ids  # nothing else needs it


def test_a_tokenizer_that_llguidance_cannot_read_is_said_in_one_line():
    with pytest.raises(ConfigError, match="llguidance cannot read this tokenizer") as caught:
        GrammarCompiler(object(), VOCAB, frozenset([2]))
    assert len(str(caught.value).splitlines()) == 1


def test_vocabularies_padded_beyond_the_tokenizer_stay_in_the_language(byte_tokenizer):
    """Report 105: a model may have more rows than its tokenizer has tokens."""
    padded = GrammarCompiler(byte_tokenizer, VOCAB + 53, frozenset([2])).compile(Structured(regex="[ab]c"))
    bits = padded.allowed(())
    assert {i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1} == set(byte_tokenizer("ab")["input_ids"])
