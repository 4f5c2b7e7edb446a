"""The drafters of a replay."""

from __future__ import annotations

import pytest

from bozza.core import Draft
from bozza.errors import ConfigError
from bozza.study.guesses import Recorded, make_drafters, parse_guessers, request_of, standing
from bozza.study.traces import Trace

TRACE = Trace(
    (1, 2), (3, 4, 5, 6), {"eagle": (2, 0, 9, 1)}, {"eagle": 9}, None, {"eagle": ((0.5, 0.25, 0.125), (), (0.5,), ())}
)


def test_without_names_suffix_runs_beside_all_that_were_recorded() -> None:
    traces = [TRACE, Trace((1,), (2,), {"eagle": (0,), "suffix": (0,)}, {"eagle": 11, "suffix": 4})]
    guessers = parse_guessers(None, traces)
    assert [(guesser.name, guesser.tokens, guesser.spec is None) for guesser in guessers] == [
        ("suffix", 12, False),
        ("eagle", 11, True),
    ]


def test_options_are_read() -> None:
    guessers = parse_guessers(["recorded:eagle,k=4", "ngram:max=3,k=7", "ngram:k=2", "suffix"], [TRACE])
    assert [(guesser.name, guesser.tokens) for guesser in guessers] == [
        ("eagle", 4), ("ngram", 7), ("ngram2", 2), ("suffix", 12)
    ]  # fmt: skip
    assert list(make_drafters(guessers, [TRACE])) == ["eagle", "ngram", "ngram2", "suffix"]


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (["eagle"], "draft 'eagle' cannot run on a trace"),
        (["grammar"], "draft 'grammar' cannot run on a trace"),
        (["nonsense:k=3"], "draft 'nonsense:k=3' cannot run on a trace"),
        (["suffix:k=0"], "k=0 is out of range"),
        (["recorded:medusa"], "the traces have eagle"),
        (["recorded:eagle,k=0"], "'k=0' is no option"),
        (["recorded:eagle,width=2"], "'width=2' is no option"),
        (["suffix", "suffix"], "two drafters are called suffix"),
        (["recorded:eagle", "recorded:eagle,k=2"], "two drafters are called eagle"),
    ],
)
def test_mistakes_are_refused(draft: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_guessers(draft, [TRACE])


def test_a_recorded_drafter_must_be_in_every_trace() -> None:
    with pytest.raises(ConfigError, match="trace 2 of the file says nothing of eagle"):
        parse_guessers(["recorded:eagle"], [TRACE, Trace((1,), (2,), {}, {})])


def test_a_recorded_drafter_is_right_as_long_as_the_trace_says() -> None:
    drafter = Recorded("eagle", [TRACE], wrong=-3)
    request = request_of(TRACE, 0)
    (draft,) = drafter.draft([request], [3])
    assert draft == Draft((3, 4, -3), (-1, 0, 1), ("eagle",) * 3)
    assert draft.confidences == (0.5, 0.25, 0.125)
    assert drafter.draft([request], [2])[0].tokens == (3, 4)
    assert drafter.draft([request], [4])[0].tokens == (3, 4, -3), "it would have stopped here"
    request.tokens.append(3)
    assert not drafter.draft([request], [4])[0]
    request.tokens.append(4)
    (draft,) = drafter.draft([request], [99])
    assert draft.tokens == (5, 6, *[-3] * 7)
    assert draft.confidences == (0.5,) * 9


def test_a_recorded_drafter_without_confidences_drafts_what_it_is_asked_for() -> None:
    trace = Trace((1,), (2, 3), {"eagle": (0, 1)}, {"eagle": 4})
    (draft,) = Recorded("eagle", [trace]).draft([request_of(trace, 0)], [9])
    assert (draft.tokens, draft.confidences) == ((-1,) * 4, ())


def test_a_drafter_whose_cap_is_nothing_drafts_nothing() -> None:
    trace = Trace((1,), (2, 3), {"eagle": (0, 0)}, {"eagle": 0})
    assert len(Recorded("eagle", [trace]).draft([request_of(trace, 0)], [4])[0]) == 0


def test_a_request_begins_with_one_token_to_read() -> None:
    request = request_of(TRACE, 5)
    assert request.decoding
    assert (request.id, request.cached, request.remaining, request.output_len) == (5, 1, 4, 0)


@pytest.mark.parametrize(
    ("tokens", "parents", "path"),
    [
        ((), (), ()),
        ((9,), (-1,), ()),
        ((3, 4, 5), (-1, 0, 1), (0, 1, 2)),
        ((3, 9, 5), (-1, 0, 1), (0,)),
        ((9, 3, 4, 4), (-1, -1, 0, 1), (1, 3)),
        ((3, 3, 4), (-1, -1, 1), (1, 2)),
        ((3, 4, 3), (-1, 0, -1), (0, 1)),
        ((3, 4, 5, 6, 7), (-1, 0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_the_longest_path_that_agrees_stands(
    tokens: tuple[int, ...], parents: tuple[int, ...], path: tuple[int, ...]
) -> None:
    assert standing(Draft(tokens, parents, ("x",) * len(tokens)), (3, 4, 5, 6), 0) == path
