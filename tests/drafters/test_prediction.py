from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bozza.core import Request
from bozza.drafters.prediction import PredictionDrafter
from bozza.params import SamplingParams


def request(prediction, prompt=(1,), id_=0):
    params = SamplingParams(prediction=prediction)
    return Request(id_, list(prompt), len(prompt), params, 0, frozenset(), 10_000, prediction=tuple(prediction))


def follow(prediction, output, k=4):
    """Decode `output` with drafts of k; returns how many passes it took."""
    drafter, asked = PredictionDrafter(), request(prediction)
    drafter.start(asked)
    done = passes = 0
    while done < len(output):
        drafted = drafter.draft([asked], [k])[0].tokens
        right = 0
        while right < len(drafted) and done + right < len(output) and drafted[right] == output[done + right]:
            right += 1
        tokens = output[done : done + right + 1]
        asked.tokens += tokens
        drafter.observe(asked, tokens)
        done += len(tokens)
        passes += 1
    return passes


TEXT = list(range(10, 50))


def test_what_comes_as_expected_takes_a_pass_for_each_block():
    assert follow(TEXT, TEXT) == 8


def test_after_a_difference_it_finds_back():
    replaced = [*TEXT[:12], 99, 98, *TEXT[14:]]
    inserted = [*TEXT[:12], 99, 98, 97, *TEXT[12:]]
    deleted = [*TEXT[:12], *TEXT[20:]]
    for output in (replaced, inserted, deleted):
        assert follow(TEXT, output) <= len(output) // 5 + 7


def test_of_equal_places_the_nearest_is_taken():
    """A phrase that stands in the expectation twice, and the output left it near the second."""
    expected = [1, 2, 3, *TEXT[:10], 7, 1, 2, 4, 5, 6, 8]
    drafter, asked = PredictionDrafter(), request(expected)
    drafter.start(asked)
    asked.tokens += [*expected[:14], 70, 1, 2]
    drafter.observe(asked, asked.tokens[1:])
    assert drafter.draft([asked], [2])[0].tokens == (4, 5)


def test_nothing_is_drafted_past_the_end_nor_without_a_prediction():
    drafter, asked, other = PredictionDrafter(), request([5, 6]), request([], id_=1)
    drafter.start(asked)
    drafter.start(other)
    drafts = drafter.draft([asked, other], [9, 9])
    assert (drafts[0].tokens, drafts[1].tokens) == ((5, 6), ())
    asked.tokens += [5, 6]
    drafter.observe(asked, [5, 6])
    drafter.observe(other, [5])
    assert len(drafter.draft([asked], [9])[0]) == 0
    drafter.stop(asked)
    drafter.stop(other)
    assert drafter._states == {}


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_any_output_can_be_followed(prediction, output):
    assert follow(prediction, output) <= len(output)


def test_the_same_parameters_but_for_the_prediction_are_another_request():
    params = SamplingParams(prediction=[5, 6])
    assert params.prediction == (5, 6)
    assert replace(params, prediction="text").prediction == "text"
