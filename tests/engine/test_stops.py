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
