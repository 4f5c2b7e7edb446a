"""What may be asked, and what is refused: every refusal is one line that names the parameter."""

import dataclasses
import math

import pytest

from bozza import LLM, ConfigError, SamplingParams
from bozza.params import MOST_LOGPROBS, Structured


def same(ids, scores):
    return scores


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: use 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5: use a whole number"),
        ({"max_tokens": None}, "max_tokens is None: use a whole number"),
        ({"min_tokens": -1}, "min_tokens is -1: use 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5 and max_tokens 4"),
        ({"top_k": -1}, "top_k is -1: use 0 or more"),
        ({"top_k": 1.0}, "top_k is 1.0: use a whole number"),
        ({"n": 0}, "n is 0: use 1 or more"),
        ({"n": 3}, "n is 3 at temperature 0"),
        ({"logprobs": -1}, "logprobs is -1: use 0 or more"),
        ({"logprobs": "5"}, "logprobs is '5': use a whole number"),
        ({"logprobs": MOST_LOGPROBS + 1}, f"logprobs is {MOST_LOGPROBS + 1}: use at most {MOST_LOGPROBS}"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: use 0 or more"),
        ({"prompt_logprobs": MOST_LOGPROBS + 1}, f"use at most {MOST_LOGPROBS}"),
        ({"seed": 1.5}, "seed is 1.5: use a whole number"),
        ({"seed": "7"}, "seed is '7': use a whole number"),
        ({"temperature": -0.5}, "temperature is -0.5: use 0 (greedy) or at least 0.001"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0: use a number above 0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"typical_p": 0.0}, "typical_p is 0.0: use a number above 0"),
        ({"typical_p": 2}, "typical_p is 2"),
        ({"min_p": -0.1}, "min_p is -0.1: use a number from 0"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": -1.3}, "repetition_penalty is -1.3"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf: use a finite number"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan: use a finite number"),
        ({"logit_bias": {7: -math.inf}}, "logit_bias of token 7 is not a finite number: to ban a token use bad_words"),
        ({"logit_bias": {3: 1.0, 9: math.nan}}, "logit_bias of token 9"),
        ({"logit_bias": {3: 1e39}}, "logit_bias of token 3"),  # infinite in single precision
        ({"temperature": 10**400}, "temperature is 1"),
        ({"stop": ""}, "an empty stop string"),
        ({"stop": ["fine", ""]}, "an empty stop string"),
        ({"bad_words": [""]}, "an empty bad word"),
        ({"bad_words": [[5], []]}, "an empty bad word"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [5], "structured": Structured(regex="a")}, "allowed_token_ids and structured both"),
        ({"logits_processors": [same, "top"]}, "logits_processors: str cannot be called with (ids, scores)"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(given, says):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**given)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_report_75_a_repetition_penalty_of_zero_is_refused():
    """It would divide by zero."""
    with pytest.raises(ConfigError, match="repetition_penalty is 0"):
        SamplingParams(repetition_penalty=0.0)


@pytest.mark.parametrize("given", [{}, {"json_schema": {}, "regex": "a"}, {"regex": "a", "grammar": "start: A"}])
def test_structured_output_is_exactly_one_language(given):
    with pytest.raises(ConfigError, match="exactly one of json_schema, regex and grammar"):
        Structured(**given)
    with pytest.raises(ConfigError, match="exactly one"):
        Structured(**given, after="!")


def test_report_130_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1.0)
    with pytest.raises(TypeError, match="schema"):
        Structured(schema={})
    with pytest.raises(TypeError):
        SamplingParams(16)  # by name only: an order of two dozen numbers is nobody's memory


def test_the_least_and_the_largest_values_are_accepted():
    edges = SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=1e-3,
        top_p=1e-9,
        min_p=1.0,
        typical_p=1e-9,
        repetition_penalty=1e-3,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        logit_bias={0: -9e29},
        logprobs=MOST_LOGPROBS,
        prompt_logprobs=0,
        seed=-(2**70),
        n=3,
    )
    assert edges.adjusts
    assert edges.penalises


def test_lists_become_tuples_and_a_lone_text_a_tuple_of_one():
    params = SamplingParams(
        stop="END",
        bad_words=["foo", [5, 6]],
        stop_token_ids=[7, 8],
        allowed_token_ids=[9, 3, 9, 4],
        logits_processors=[same],
        logit_bias={"5": 1},
    )
    assert params.stop == ("END",)
    assert params.bad_words == ("foo", (5, 6))
    assert params.stop_token_ids == (7, 8)
    assert params.allowed_token_ids == (3, 4, 9)
    assert params.logits_processors == (same,)
    assert params.logit_bias == {5: 1.0}  # JSON has no other keys than texts
    assert SamplingParams(bad_words="foo").bad_words == ("foo",)


def test_parameters_stay_what_they_were():
    ids, bias, words = [5, 6], {7: 1.0}, [[8, 9]]
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias, bad_words=words)
    ids.append(1)
    bias[1] = 1.0
    words[0].append(1)
    assert params == SamplingParams(stop_token_ids=(5, 6), logit_bias={7: 1.0}, bad_words=((8, 9),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_equal_parameters_are_equal_however_they_were_written():
    one = SamplingParams(stop=["a"], logit_bias={1: 2, 3: 4}, allowed_token_ids=[2, 1, 2])
    other = SamplingParams(stop="a", logit_bias={3: 4.0, 1: 2.0}, allowed_token_ids=(1, 2))
    assert one == other
    assert one != dataclasses.replace(other, stop="b")
    assert Structured(regex="a") == Structured(regex="a") != Structured(regex="a", after="!")
    assert dataclasses.replace(one) == one  # what is normalised stays as it is


@pytest.mark.parametrize(
    ("given", "adjusts", "penalises", "in_turn"),
    [
        ({}, False, False, False),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9}, False, False, False),
        ({"stop": "x", "stop_token_ids": [3], "logprobs": 2, "ignore_eos": True}, False, False, False),
        ({"repetition_penalty": 1.1}, True, True, False),
        ({"presence_penalty": -0.1}, True, True, False),
        ({"frequency_penalty": 0.1}, True, True, False),
        ({"logit_bias": {3: 1.0}}, True, False, False),
        ({"bad_words": ["x"]}, True, False, False),
        ({"min_tokens": 1}, True, False, False),
        ({"allowed_token_ids": [3]}, True, False, False),
        ({"logits_processors": [same]}, True, False, True),
        ({"structured": Structured(regex="a")}, True, False, True),
    ],
)
def test_parameters_know_what_must_be_done_for_them(given, adjusts, penalises, in_turn):
    params = SamplingParams(**given)
    assert (params.adjusts, params.penalises, params.in_turn) == (adjusts, penalises, in_turn)


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"stop": 5},
        {"stop": [5]},
        {"bad_words": 5},
        {"bad_words": [["a"]]},
        {"allowed_token_ids": 5},
        {"allowed_token_ids": ["a"]},
        {"logits_processors": same},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {5: None}},
        {"logit_bias": [5]},
        {"temperature": "hot"},
        {"top_p": "a"},
        {"min_p": None},
        {"repetition_penalty": "a"},
        {"presence_penalty": None},
        {"structured": {"regex": "a"}},
    ],
)
def test_values_of_a_wrong_kind_are_refused_in_one_line(given):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**given)
    assert next(iter(given)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"])
@pytest.mark.parametrize("token", [-1, 211])
def test_tokens_that_the_model_lacks_are_refused_before_anything_starts(target, name, token):
    """The parameters cannot know: the engine does."""
    llm = LLM(target, policy="off")
    value = {"logit_bias": {3: 1.0, token: 1.0}, "bad_words": [[3, token]]}.get(name, [3, token])
    with pytest.raises(ConfigError, match=f"{name}: there is no token {token}, the model has ids 0 to 210"):
        llm.generate([[5], [6]], [SamplingParams(), SamplingParams(**{name: value})])
    assert llm.engine.idle


def test_iterators_are_taken_once_and_kept():
    params = SamplingParams(
        stop=(text for text in ["a", "b"]),
        stop_token_ids=iter([5]),
        bad_words=map(str, ["x"]),
        logits_processors=iter([same]),
    )
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a", "b"), (5,), ("x",))
    assert params.logits_processors == (same,)
