"""Long lists as bytes."""

import pickle

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainer_integration.loader.shared.dataset import PackedList, SharedDataset, pack_lists


class Rows(Dataset):
    def __init__(self, rows):
        self.rows, self.names = rows, ["a", "b"]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


ITEMS = [{"id": n, "text": "é" * (n % 7)} for n in range(50)]


def test_a_packed_list_reads_as_the_list():
    packed = PackedList(ITEMS)

    assert list(packed) == ITEMS
    assert (len(packed), packed[-1], packed[3:40:9]) == (50, ITEMS[-1], ITEMS[3:40:9])
    assert ITEMS[7] in packed
    assert packed[2] is not packed[2]


@pytest.mark.parametrize("index", [50, -51])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        PackedList(ITEMS)[index]


def test_an_empty_list_can_be_packed():
    assert list(PackedList([])) == []


def test_a_packed_list_does_not_change():
    with pytest.raises(AttributeError, match="append"):
        PackedList(ITEMS).append(1)


def test_long_lists_of_datasets_within_datasets_are_packed_and_short_ones_left():
    rows = Rows([*range(10_000)])
    whole = Subset(ConcatDataset([rows, Rows([1])]), [*range(10_001)])

    assert pack_lists(whole) == 2
    assert (type(rows.rows), type(rows.names)) == (PackedList, list)
    assert [whole[0], whole[9_999], whole[10_000]] == [0, 9_999, 1]


def test_a_list_that_cannot_be_pickled_stays():
    rows = Rows([lambda: 1] * 10_000)

    assert pack_lists(rows) == 0
    assert rows[5]() == 1


def test_a_shared_dataset_is_made_when_it_is_read_and_does_not_travel():
    calls = []

    def make():
        calls.append(1)
        return Rows([4, 5])

    shared = SharedDataset(make, 2)
    assert (len(shared), calls) == (2, [])
    assert [shared[1], shared.__getitems__([0, 1])] == [5, [4, 5]]
    assert len(calls) == 1
    assert pickle.loads(pickle.dumps(SharedDataset(len, 3))).length == 3
    assert shared.__getstate__()["_made"] is None
