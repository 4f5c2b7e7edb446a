"""What equal bits rest on, whatever the kernels of a machine: a token is laid out without regard to its neighbours."""

import random

import pytest
import torch

from bozza.core import Draft
from bozza.models.attention import LEAST, SHORT, TILE, Group, Segment, _calls, _calls_with_equal_bits
from bozza.models.kvstore import padded_length
from bozza.models.runner import RaggedRunner, Row
from bozza.models.spans import Span
from tiny import tiny

CPU = torch.device("cpu")


def spans(seed):
    """Rows of a pass at random places, decoding ones and prompt chunks."""
    rng, made, first = random.Random(seed), [], 0
    for slot in rng.sample(range(12), 8):
        count = rng.choice([1, 2, 9, SHORT, SHORT + 1, 300])
        made.append(Span(slot, rng.randrange(1200), first, count, count, (), ()))
        first += count
    return made


@pytest.mark.parametrize("seed", range(20))
def test_a_token_attends_over_a_length_that_its_own_place_decides(seed):
    rows = spans(seed)
    seen = {}
    for length, segments in _calls_with_equal_bits(rows):
        for segment in segments:
            for token in segment.tokens:
                seen[token] = length
    places = {span.first + i: span.start + i for span in rows for i in range(span.count)}
    assert seen == {token: padded_length(place + 1) for token, place in places.items()}


@pytest.mark.parametrize("calls", [_calls, _calls_with_equal_bits])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_one_call_that_is_long_enough(calls, seed):
    rows = spans(seed)
    served = []
    for length, segments in calls(rows):
        assert all(segment.span.start + segment.high <= length for segment in segments)
        served += [token for segment in segments for token in segment.tokens]
    assert sorted(served) == list(range(sum(span.count for span in rows)))


@pytest.mark.parametrize("rows", range(1, 3 * TILE))
def test_no_tile_has_too_few_query_rows(rows):
    group = Group([Segment(Span(0, 0, 0, 1, 1, (), ()), 0, 1)], 128, CPU, equal_bits=True)
    padded = rows + group.padding(rows)
    assert padded % TILE == 0 or padded % TILE >= LEAST
    assert padded - rows < LEAST
    assert Group(group.segments, 128, CPU, equal_bits=False).padding(rows) == 0


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_a_lone_token_has_a_twin_in_16_bits_and_leaves_no_trace(dtype, least):
    model = tiny("llama", dtype=dtype)
    runner, counts, head = RaggedRunner(model), [], []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[1]))
    model.lm_head.register_forward_hook(lambda module, args, out: head.append(args[0].shape[1]))
    slot = runner.alloc()
    assert runner.forward([Row(slot, [5])]).logits.shape == (1, 211)
    assert runner.store.length(slot) == 1
    runner.forward([Row(slot, [6, 7])])
    assert runner.store.length(slot) == 3
    assert counts == [least, 2]
    assert head == [least, least]
    runner.forward([Row(slot, [8], Draft.chain([9], "x"))])
    assert counts[-1] == 2
