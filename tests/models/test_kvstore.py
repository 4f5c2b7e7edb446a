import pytest
import torch

from bozza.models.kvstore import KVStore, padded_length


def fill(store, slot, values):
    start = store.append(slot, len(values))
    index = torch.tensor([store.flat_index(slot) + start + i for i in range(len(values))])
    tensor = torch.tensor(values, dtype=torch.float32).view(1, -1, 1)
    for layer in (0, 1):
        store.write(layer, index, tensor + layer, tensor - layer)


def held(store, slot, layer=0):
    keys, values = store.read(layer, slice(slot, slot + 1), store.length(slot))
    assert torch.equal(keys - layer, values + layer)
    return keys.flatten().sub(layer).tolist()


def test_growth_keeps_what_is_held():
    store = KVStore(torch.device("cpu"))
    slots = [store.alloc() for _ in range(3)]
    assert slots == [0, 1, 2]
    for slot in slots:
        fill(store, slot, [slot * 1000 + i for i in range(100)])
    for slot in slots:
        fill(store, slot, [slot * 1000 + i for i in range(100, 400)])
    late = [store.alloc() for _ in range(4)]
    fill(store, late[-1], [9])
    for slot in slots:
        assert held(store, slot) == [slot * 1000 + i for i in range(400)]
        assert held(store, slot, layer=1) == [slot * 1000 + i for i in range(400)]
    assert store.layers == 2


def test_rollback_is_a_length_and_slots_are_reused_lowest_first():
    store = KVStore(torch.device("cpu"))
    a, b = store.alloc(), store.alloc()
    fill(store, a, [1, 2, 3, 4])
    store.truncate(a, 2)
    fill(store, a, [7])
    assert held(store, a) == [1, 2, 7]
    store.free(a)
    store.free(b)
    assert store.alloc() == a
    assert store.length(a) == 0


@pytest.mark.parametrize(
    ("kept", "expected"), [((), [0, 1]), ((0, 1), [0, 1, 2, 3]), ((1, 3), [0, 1, 3, 5]), ((4,), [0, 1, 6])]
)
def test_keep_moves_a_branch_together(kept, expected):
    store = KVStore(torch.device("cpu"))
    other, slot = store.alloc(), store.alloc()
    fill(store, other, [50, 51, 52])
    fill(store, slot, [0, 1, 2, 3, 4, 5, 6])
    store.keep(slot, 2, kept)
    assert held(store, slot) == expected
    assert held(store, slot, layer=1) == expected
    assert held(store, other) == [50, 51, 52]


def test_running_out_of_memory_leaves_the_store_as_it_was():
    store = KVStore(torch.device("cpu"))
    slots = [store.alloc() for _ in range(2)]
    for slot in slots:
        fill(store, slot, list(range(100)))
    with pytest.raises(RuntimeError):
        store.append(slots[0], 1 << 50)
    fill(store, slots[1], [7])
    assert held(store, slots[0]) == list(range(100))
    assert held(store, slots[1]) == [*range(100), 7]


def test_a_slot_is_clean_for_its_next_request():
    store = KVStore(torch.device("cpu"))
    slot = store.alloc()
    fill(store, slot, [float("nan")] * 20)
    store.free(slot)
    assert store.alloc() == slot
    fill(store, slot, [1.0])
    keys, _ = store.read(0, slice(slot, slot + 1), 128)
    assert not keys.isnan().any()


def test_padded_lengths_cover_and_are_few():
    lengths = {padded_length(n) for n in range(1, 2049)}
    assert all(padded_length(n) >= n for n in range(1, 2049))
    assert lengths == {128, 256, 384, 512, 1024, 1536, 2048}
