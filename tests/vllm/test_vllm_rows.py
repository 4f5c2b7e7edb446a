"""Which request a row belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bozza.vllm.rows import AHEAD, PATIENCE, SPARE, Rows, Seen

CONTEXT = 8192


def shown(rows: Rows, texts: Sequence[Sequence[int]], sampled: Sequence[int]) -> list[Seen | None]:
    """A call with these texts, of which the last so many tokens are new."""
    table = np.full((len(texts), CONTEXT), 9, dtype=np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts])
    new = [list(text[len(text) - count :]) for text, count in zip(texts, sampled, strict=True)]
    return rows.follow(new, lengths, table)


def ids(seen: Sequence[Seen | None]) -> list[int]:
    return [entry.request.id for entry in seen if entry is not None]


def test_a_new_row_is_a_request_whose_prompt_is_what_stood_before() -> None:
    rows = Rows(CONTEXT)
    (seen,) = shown(rows, [[1, 2, 3, 4]], [1])
    assert seen is not None
    assert seen.new
    assert (seen.request.tokens, seen.request.prompt_len, seen.request.cached) == ([1, 2, 3, 4], 3, 3)
    assert seen.request.limit == 4 + AHEAD


def test_the_limit_is_no_more_than_the_context() -> None:
    (seen,) = shown(Rows(100), [[1, 2, 3, 4]], [1])
    assert seen is not None
    assert seen.request.limit == 100


def test_a_row_goes_on() -> None:
    rows = Rows(CONTEXT)
    first = shown(rows, [[1, 2, 3]], [1])
    (seen,) = shown(rows, [[1, 2, 3, 4, 5]], [2])
    assert seen is not None
    assert (seen.new, seen.tokens, seen.request.tokens) == (False, [4, 5], [1, 2, 3, 4, 5])
    assert seen.request.cached == 4
    assert ids([seen]) == ids(first)


def test_rows_change_places() -> None:
    rows = Rows(CONTEXT)
    first = ids(shown(rows, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [1, 1, 1]))
    second = ids(shown(rows, [[7, 8, 9, 1], [1, 2, 3, 1], [4, 5, 6, 1]], [1, 1, 1]))
    assert second == [first[2], first[0], first[1]]


def test_same_length_and_end_are_not_enough() -> None:
    rows = Rows(CONTEXT)
    first = ids(shown(rows, [[1, 2, 3, 9, 9, 9]], [1]))
    (seen,) = shown(rows, [[1, 5, 3, 9, 9, 9, 4]], [1])
    assert seen is not None
    assert seen.new
    assert ids([seen]) != first


def test_a_row_that_grew_by_more_than_it_says_is_new() -> None:
    rows = Rows(CONTEXT)
    shown(rows, [[1, 2, 3]], [1])
    (seen,) = shown(rows, [[1, 2, 3, 4, 5]], [1])
    assert seen is not None
    assert seen.new
    assert seen.request.prompt_len == 4


def test_what_went_further_than_the_row_is_another_request() -> None:
    rows = Rows(CONTEXT)
    shown(rows, [[1, 2, 3, 4, 5]], [1])
    (seen,) = shown(rows, [[1, 2, 3, 9]], [1])
    assert seen is not None
    assert seen.new


def test_a_row_that_begins_like_another_one_of_this_step_is_its_own_request() -> None:
    rows = Rows(CONTEXT)
    shown(rows, [[1, 2], [9, 9]], [1, 1])
    seen = shown(rows, [[1, 2, 3], [1, 2, 3, 4]], [1, 1])
    assert len(set(ids(seen))) == 2
    assert [entry.request.tokens for entry in seen if entry is not None] == [[1, 2, 3], [1, 2, 3, 4]]


def test_equal_texts_are_two_requests() -> None:
    rows = Rows(CONTEXT)
    first = ids(shown(rows, [[1, 2, 3], [1, 2, 3]], [1, 1]))
    second = ids(shown(rows, [[1, 2, 3, 4], [1, 2, 3, 5]], [1, 1]))
    assert len(set(first)) == 2
    assert second == first


def test_rows_without_tokens_are_nobody() -> None:
    rows = Rows(CONTEXT)
    assert shown(rows, [[1, 2, 3]], [0]) == [None]
    assert len(rows) == 0


def test_who_is_not_seen_is_dropped_after_a_while() -> None:
    rows = Rows(CONTEXT)
    (gone,) = ids(shown(rows, [[1, 2, 3]], [1]))
    for turn in range(PATIENCE):
        shown(rows, [[4] * (turn + 2)], [1])
        assert rows.drop() == []
    shown(rows, [[4] * (PATIENCE + 2)], [1])
    assert [request.id for request in rows.drop()] == [gone]
    assert len(rows) == 1


def test_who_is_seen_again_counts_anew() -> None:
    rows = Rows(CONTEXT)
    shown(rows, [[1], [500]], [1, 1])
    for length in range(3, 40):
        shown(rows, [[1, *range(2, length)], [500] * (length // 2 + 1)][: 1 + length % 2], [1] * (1 + length % 2))
        assert rows.drop() == []


def test_a_long_output_is_compared_as_a_whole() -> None:
    rows = Rows(CONTEXT)
    text = list(range(10))
    shown(rows, [text], [1])
    for _ in range(4 * SPARE // 16):
        text += range(len(text), len(text) + 16)
        (seen,) = shown(rows, [text], [16])
        assert seen is not None
        assert not seen.new
    changed = [*text[:5], 0, *text[6:], 1]
    (seen,) = shown(rows, [changed], [1])
    assert seen is not None
    assert seen.new
