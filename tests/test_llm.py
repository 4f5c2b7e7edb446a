import itertools

import pytest

import bozza
from bozza import LLM, BozzaError, ConfigError, ModelError, PromptError, SamplingParams
from bozza.models import packing
from bozza.models.compiling import CompiledForward
from bozza.models.loading import load
from bozza.text import decode
from products import needs_compiler, needs_int8, needs_packing
from tiny import tiny, token_prompts


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders["target"], policy="fixed", draft=["ngram", f"model:{folders['shallow']}"])


def test_a_folder_becomes_an_llm(llm, folders):
    assert llm.model_path == folders["target"]
    out = llm.generate("abab", SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert out.prompt_token_ids == llm.tokenizer("abab")["input_ids"]
    assert out.text == decode(llm.tokenizer, out.token_ids)
    assert out.finish_reason == "length"
    assert set(out.stats.drafted) <= {"ngram", "model"}
    assert set(out.stats.seconds) == {"plan", "draft", "verify", "sample", "other"}
    assert set(out.stats.draft_seconds) == {"ngram", "model"}


def test_a_loaded_model_stays_usable_by_its_owner(byte_tokenizer):
    import torch

    model = tiny("llama", dtype=torch.float64)
    before = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    out = LLM(model, tokenizer=byte_tokenizer).generate([[5, 6, 7]], SamplingParams(max_tokens=9))[0]
    after = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert before.tolist() == after.tolist() == [[5, 6, 7, *out.token_ids]]
    assert LLM(model).generate([[5, 6]], SamplingParams(max_tokens=2))[0].text == ""
    with pytest.raises(PromptError, match="no tokenizer"):
        LLM(model).generate("text")


def test_text_is_taken_as_it_stands_and_ids_are_accepted_too(llm):
    params = SamplingParams(max_tokens=5)
    ids = llm.tokenizer("hello")["input_ids"]
    outputs = llm.generate(["hello", ids, tuple(ids)], params)
    assert len({tuple(out.token_ids) for out in outputs}) == 1
    assert [out.token_ids for out in llm.generate(ids, params)] == [outputs[0].token_ids]
    assert llm.generate([]) == []


def test_streams_equal_outputs_and_tell_who_guessed(llm):
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=2, ignore_eos=True)
    out = llm.generate("abcabcabc", params)[0]
    chunks = list(llm.stream("abcabcabc", params))
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [token for chunk in chunks for token in chunk.token_ids] == out.token_ids
    guessed = [name for chunk in chunks for name in chunk.drafters]
    assert {name: guessed.count(name) for name in set(guessed) - {None}} == dict(+out.stats.accepted)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_streams_may_be_read_in_turns_and_left(llm):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = [out.token_ids for out in llm.generate(["one", "two two two"], params)]
    one, two, left = llm.stream("one", params), llm.stream("two two two", params), llm.stream("three", params)
    next(left)
    left.close()
    got = [[], []]
    for pair in itertools.zip_longest(one, two):
        for tokens, chunk in zip(got, pair, strict=True):
            tokens += chunk.token_ids if chunk else []
    assert got == expected
    assert llm.engine.idle


def test_a_stream_that_was_never_read_ends_when_it_is_closed_or_dropped(llm):
    stream = llm.stream("abc", SamplingParams(max_tokens=200))
    stream.close()
    assert llm.engine.idle
    assert list(stream) == []
    stream = llm.stream("abc", SamplingParams(max_tokens=200))
    del stream
    assert llm.engine.idle


def test_chat_applies_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.encode_chat(messages)
    assert llm.tokenizer.decode(ids) == "user: hi\nassistant:"
    params = SamplingParams(max_tokens=6)
    assert llm.chat(messages, params).token_ids == llm.generate([ids], params)[0].token_ids
    streamed = [token for chunk in llm.stream_chat(messages, params) for token in chunk.token_ids]
    assert streamed == llm.chat(messages, params).token_ids


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda llm: llm.generate(["fine", ""]), "prompt is empty"),
        (lambda llm: llm.generate([[]]), "prompt is empty"),
        (lambda llm: llm.generate("x" * 300), "shorten it to 255"),
        (lambda llm: llm.generate([[5, 999]]), "token id 999"),
        (lambda llm: llm.chat([]), "conversation is empty"),
        (lambda llm: llm.chat([{"content": "x"}]), "needs 'role' and 'content'"),
        (lambda llm: llm.chat(["hi"]), "needs 'role' and 'content'"),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "1 sampling parameters for 2 prompts"),
    ],
)
def test_bad_prompts_generate_nothing(llm, act, says):
    with pytest.raises((PromptError, ConfigError), match=says):
        act(llm)
    assert llm.engine.idle


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"policy": "off", "draft": ["ngram"]}, ConfigError, "never drafts"),
        ({"policy": "adaptiv"}, ConfigError, "no policy 'adaptiv'"),
        ({"draft": ["ngram:k=99"]}, ConfigError, "out of range"),
        ({"draft": ["ngram:min=5,max=2"]}, ConfigError, "min=5"),
        ({"draft": ["model:/no/such/folder"]}, ModelError, "no model '/no/such/folder'"),
        ({"max_batch": 0}, ConfigError, "at least 1"),
        ({"max_batch": 400}, ConfigError, "use at least 800"),
        ({"draft": ["ngram:k=2,k=3"]}, ConfigError, "k is given twice"),
        ({"dtype": "float8"}, ConfigError, "bfloat16"),
        ({"device": "gpu"}, ConfigError, "use auto, cpu"),
        ({"quantize": "int4"}, ConfigError, "quantize 'int4': use int8"),
        ({"compile": True}, ModelError, "in bfloat16, on a CPU with AVX-512"),  # the folder has float32
    ],
)
def test_bad_options_are_refused_in_one_line(folders, options, error, says):
    with pytest.raises(error) as caught:
        LLM(folders["target"], **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_options_are_refused(folders):
    with pytest.raises(TypeError, match="drafts"):
        LLM(folders["target"], drafts=["ngram"])
    for option in ({"dtype": "float32"}, {"device": "cpu"}, {"quantize": "int8"}, {"compile": True}):
        with pytest.raises(
            ConfigError, match="a loaded model stays as it is: drop dtype=, device=, quantize= and comp"
        ):
            LLM(tiny("llama"), **option)
    with pytest.raises(ConfigError, match="comes with a named model"):
        LLM(folders["target"], tokenizer=object())


@pytest.mark.parametrize(
    ("works", "says"),
    [(False, "needs a processor with VNNI or AMX"), (True, "use dtype bfloat16")],  # the folder has float32
)
def test_int8_that_cannot_be_had_is_refused_in_one_line(folders, monkeypatch, works, says):
    monkeypatch.setattr(packing, "int8_works", lambda: works)
    with pytest.raises(ModelError, match=says) as caught:
        LLM(folders["target"], device="cpu", quantize="int8")
    assert "\n" not in str(caught.value)


MANY = ["ngram:k=3", "recycling:k=4", "eagle:{head},k=6,width=3", "mtp:{modules},k=4,width=2", "model:{shallow},k=3"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("drafts", "invariant"), [(MANY, False), (MANY[-1:], True)])
@pytest.mark.parametrize(
    ("quantize", "compiled"),
    [
        (None, False),
        pytest.param("int8", False, marks=needs_int8),
        pytest.param("int8", True, marks=[needs_int8, needs_compiler]),
    ],
)
def test_packed_and_quantized_models_say_the_same_with_drafts(
    folders, quantize, compiled, drafts, invariant, temperature
):
    options = {"dtype": "bfloat16", "device": "cpu", "quantize": quantize, "compile": compiled, "invariant": invariant}
    llm = LLM(folders["target"], policy="fixed", draft=[text.format_map(folders) for text in drafts], **options)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
    prompts = token_prompts(10)
    alone = [llm.with_policy("off").generate([prompt], params)[0] for prompt in prompts]
    outs = llm.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.logprobs for out in outs] == [out.logprobs for out in alone]
    assert sum(out.stats.accepted.get("model", 0) for out in outs) > 5
    assert set(outs[0].stats.draft_seconds) == {text.partition(":")[0] for text in drafts}


@needs_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_the_layers_of_target_and_draft_model_are_compiled_where_that_is_asked_for(folders, compiled):
    options = {"dtype": "bfloat16", "device": "cpu", "compile": compiled}
    llm = LLM(folders["target"], policy="fixed", draft=[f"model:{folders['shallow']}"], **options)
    drafter = llm.engine._drafters["model"]
    for model in (llm.model, drafter._model._model):
        replaced = [isinstance(layer.forward, CompiledForward) for layer in model.model.layers]
        assert replaced == [compiled] * len(replaced)
    assert llm.compiled == llm.with_policy("off").compiled == compiled


@needs_packing
def test_a_packed_model_says_what_the_loaded_one_says(folders):
    packed = LLM(folders["target"], policy="off", dtype="bfloat16", device="cpu", invariant=True)
    plain = LLM(load(folders["target"], "bfloat16", "cpu").model, policy="off", invariant=True)
    assert (packed.weights, plain.weights) == ("packed", "plain")
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
        outs, expected = (each.generate(token_prompts(10), params) for each in (packed, plain))
        assert [out.logprobs for out in outs] == [out.logprobs for out in expected]


@needs_int8
def test_a_quantized_model_is_another_one_and_says_so(folders):
    quantized = LLM(folders["target"], policy="off", dtype="bfloat16", device="cpu", quantize="int8")
    plain = LLM(folders["target"], policy="off", dtype="bfloat16", device="cpu")
    assert quantized.weights == quantized.with_policy("off", max_batch=2).weights == "int8"
    params = SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True)
    outs, others = (each.generate(token_prompts(8), params) for each in (quantized, plain))
    pairs = [(out.logprobs[0].logprob, other.logprobs[0].logprob) for out, other in zip(outs, others, strict=True)]
    assert all(one != other for one, other in pairs)
    assert all(abs(one - other) < 1.5 for one, other in pairs)


def test_twins_share_models_but_not_requests(llm):
    plain = llm.with_policy("off")
    assert plain.runner is llm.runner
    assert plain.engine is not llm.engine
    assert (plain.policy, plain.draft) == ("off", ())
    params = SamplingParams(max_tokens=10)
    assert plain.generate("abc", params)[0].token_ids == llm.generate("abc", params)[0].token_ids
    with pytest.raises(ConfigError, match="not loaded"):
        llm.with_policy("fixed", ["model:elsewhere"])


def test_report_43_requests_do_not_inherit_drafts(llm):
    """The n-gram index of one request is gone with it."""
    llm.generate("abcdefgh" * 4, SamplingParams(max_tokens=4))
    assert not llm.engine._drafters["ngram"]._indices
    assert not llm.engine._drafters["model"]._slots._states


def test_public_names_are_exported_and_sorted():
    assert [name for name in bozza.__all__ if not hasattr(bozza, name)] == []
    assert bozza.__all__ == sorted(bozza.__all__, key=lambda name: (name != name.upper(), name))
    with pytest.raises(AttributeError):
        _ = bozza.nonsense


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("x", {"max_tokens": 5}, "sampling parameters are SamplingParams"),
        (5, None, "a prompt is a text or a list of token ids, this is int"),
        ([[1.5]], None, "a prompt is a text or a list of token ids, this is not one"),
        ([None], None, "a prompt is a text or a list of token ids, this is not one"),
    ],
)
def test_wrong_arguments_are_one_line(folders, prompts, params, says):
    llm = LLM(folders["target"])
    with pytest.raises(BozzaError, match=says):
        llm.generate(prompts, params)
    assert llm.engine.idle
