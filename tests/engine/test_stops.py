import pytest

from bozza.core import Request
from bozza.engine.stops import cut
from bozza.params import SamplingParams


def request(limit, ends=(9,), prompt=(1, 2)):
    return Request(0, list(prompt), len(prompt), SamplingParams(), 0, frozenset(ends), len(prompt) + limit)


@pytest.mark.parametrize(
    ("tokens", "limit", "kept", "reason"),
    [
        ([3, 4], 5, [3, 4], None),
        ([3, 9, 4], 5, [3, 9], "stop"),  # report 2: what follows the end token is dropped
        ([9], 5, [9], "stop"),  # report 10: an end token as the first one
        ([3, 4, 5, 6], 3, [3, 4, 5], "length"),
        ([3, 4, 9, 5], 3, [3, 4, 9], "stop"),  # report 4: on the last allowed token, stop wins
        ([3, 4, 5, 9], 3, [3, 4, 5], "length"),  # report 4: a stop beyond the cap does not count
        ([3], 1, [3], "length"),  # report 11
    ],
)
def test_blocks_end_where_single_tokens_would(tokens, limit, kept, reason):
    assert cut(request(limit), tokens) == (kept, reason)
    # The same tokens, one at a time.
    asked = request(limit)
    single, why = [], None
    for token in tokens:
        taken, why = cut(asked, [token])
        asked.tokens += taken
        single += taken
        if why:
            break
    assert (single, why) == (kept, reason)


def test_report_3_without_end_tokens_only_the_limit_stops():
    assert cut(request(9, ends=()), [9, 9]) == ([9, 9], None)


class Counts:
    """A watch that ends the request at the nth token it hears."""

    def __init__(self, n):
        self.left = n
        self.heard = []

    def push(self, token):
        self.heard.append(token)
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("n", range(1, 6))
def test_report_5_watches_hear_each_token_that_is_taken_and_no_other(n):
    asked = request(9, ends=(7,))
    early, late = Counts(n), Counts(3)
    asked.watches = (early, late)
    kept, reason = cut(asked, [3, 4, 5, 6])
    end = min(n, 3)
    assert (kept, reason) == ([3, 4, 5, 6][:end], "stop")
    assert early.heard == late.heard == kept


def test_a_watch_hears_the_end_token_too():
    asked = request(9)
    asked.watches = (Counts(100),)
    assert cut(asked, [3, 9, 4]) == ([3, 9], "stop")
    assert asked.watches[0].heard == [3, 9]
