import pytest
from hypothesis import given
from hypothesis import strategies as st

from bozza.core import Request
from bozza.drafters.ngram import NgramDrafter, NgramIndex
from bozza.errors import ConfigError
from bozza.params import SamplingParams

texts = st.lists(st.integers(0, 3), max_size=60)


def scan(text, min_n, max_n, length):
    """What the index must answer, by looking at everything."""
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == text[-n:]:
                copied = list(text)
                for i in range(length):
                    copied.append(copied[start + i])
                return copied[len(text) :]
    return []


@given(texts, st.integers(1, 3), st.integers(0, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_index_equals_a_scan_however_the_text_arrives(text, min_n, more, length, random):
    index = NgramIndex(min_n, min_n + more)
    rest = list(text)
    while rest:
        cut = random.randint(1, len(rest))
        index.extend(rest[:cut])
        rest = rest[cut:]
    assert index.continuation(length) == scan(text, min_n, min_n + more, length)


def test_colliding_hashes_are_not_trusted(monkeypatch):
    index = NgramIndex(2, 3)
    monkeypatch.setattr(index, "_keys", lambda: [0] * max(0, min(len(index._tokens), 3) - 1))
    index.extend([1, 2, 3, 4, 5, 6])
    assert index.continuation(3) == []


def test_entries_per_token_are_bounded():
    index = NgramIndex(1, 4)
    index.extend(list(range(1000)))
    before = len(index._next)
    index.extend(list(range(1000, 2000)))
    assert len(index._next) - before == 4 * 1000


def test_no_match_is_no_draft_and_requests_do_not_mix():
    drafter = NgramDrafter(min_n=2)
    requests = [
        Request(i, list(prompt), len(prompt), SamplingParams(), 0, frozenset(), 99)
        for i, prompt in enumerate([[1, 2, 3, 1, 2], [5, 6, 7, 8], [2, 3, 9, 1, 2]])
    ]
    for request in requests:
        drafter.start(request)
    drafts = drafter.draft(requests, [4, 4, 4])
    assert drafts[0].tokens == (3, 1, 2, 3)
    assert len(drafts[1]) == len(drafts[2]) == 0
    drafter.stop(requests[0])
    assert len(drafter._indices) == 2


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3), (1, 65)])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(ConfigError, match="min="):
        NgramDrafter(*sizes)
