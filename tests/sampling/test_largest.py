import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bozza.sampling.largest import BLOCK, largest


@given(st.integers(1, 5), st.integers(1, 8 * BLOCK), st.integers(1, 12), st.integers(0, 2**32))
def test_the_largest_are_those_of_topk_in_their_order(rows, size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.stack([torch.randperm(size, generator=generator) for _ in range(rows)]).float()
    count = min(count, size)
    values, places = largest(numbers, count)
    expected = numbers.topk(count, dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 9 * BLOCK + 37])
@pytest.mark.parametrize("count", [1, 4, 5, 8])
def test_sizes_that_are_no_multiple_of_the_block(size, count):
    numbers = -torch.rand(3, size) - 1.0  # all below zero: what fills up a block must not win
    numbers[:, -1] = 0.0
    values, places = largest(numbers, count)
    assert torch.equal(values, numbers.topk(count, dim=1).values)
    assert places[:, 0].tolist() == [size - 1] * 3
    assert torch.equal(numbers.gather(1, places), values)


@given(st.integers(1, 6 * BLOCK), st.integers(0, 2**32))
def test_of_equal_numbers_any_are_taken_but_none_twice(size, seed):
    numbers = torch.randint(0, 3, (2, size), generator=torch.Generator().manual_seed(seed)).float()
    values, places = largest(numbers, min(6, size))
    assert torch.equal(values, numbers.topk(min(6, size), dim=1).values)
    assert torch.equal(numbers.gather(1, places), values)
    assert all(len(set(line)) == len(line) for line in places.tolist())


def test_removed_tokens_come_last():
    numbers = torch.full((2, 7 * BLOCK), -math.inf)
    numbers[:, [3, 200, 201, 447]] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    assert largest(numbers, 4)[1].tolist() == [[200, 201, 447, 3]] * 2
