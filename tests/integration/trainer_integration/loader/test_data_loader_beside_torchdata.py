"""States beside torchdata's StatefulDataLoader: what its loader hands out after a resume, ours does too."""

import json
from itertools import chain

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.trainer.loaders import (
    Drawing,
    Numbers,
    Remembering,
    StreamWithState,
    Turning,
    plain,
)
from trainer_integration import DataLoader

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:'set_vital'", "ignore:Neither dataset nor iter"
)


def resumed(kind, dataset, *, taken, **keywords):
    """Return the state's batches after ``taken`` ones, of a resumed loader, and those of the epoch after."""
    torch.manual_seed(11)
    loader = kind(dataset(), 4, generator=torch.Generator().manual_seed(2), **keywords)
    batches = iter(loader)
    before = plain([next(batches) for _ in range(taken)])
    state = loader.state_dict()
    del batches
    again = kind(dataset(), 4, generator=torch.Generator().manual_seed(2), **keywords)
    again.load_state_dict(json.loads(json.dumps(state)) if kind is DataLoader else state)
    return before, plain(again), plain(again)


@pytest.mark.parametrize("taken", [0, 1, 5, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_map_dataset_in_order_goes_on_where_torchdatas_does(taken, drop_last):
    form = {"taken": taken, "drop_last": drop_last}

    ours = resumed(DataLoader, lambda: Numbers(43), **form)
    theirs = resumed(StatefulDataLoader, lambda: Numbers(43), **form)

    assert ours == theirs


@pytest.mark.parametrize("taken", [1, 5])
def test_a_shuffled_epoch_goes_on_where_torchdatas_does(taken):
    ours = resumed(DataLoader, lambda: Numbers(43), taken=taken, shuffle=True)
    theirs = resumed(StatefulDataLoader, lambda: Numbers(43), taken=taken, shuffle=True)

    assert (
        sorted(chain(*ours[0], *ours[1])) == sorted(chain(*theirs[0], *theirs[1])) == [*range(43)]
    )
    assert len(ours[1]) == len(theirs[1])


@pytest.mark.parametrize(("workers", "taken"), [(0, 0), (0, 3), (2, 0), (2, 5)])
def test_a_map_dataset_with_a_state_goes_on_where_torchdatas_does(workers, taken):
    def parts(kind):
        form = {"taken": taken, "num_workers": workers, "collate_fn": list}
        return resumed(kind, lambda: Remembering(40), **form)

    before, rest, _ = parts(DataLoader)
    theirs = parts(StatefulDataLoader)

    assert (before, rest) == theirs[:2]


@pytest.mark.parametrize(("workers", "taken"), [(0, 0), (0, 3), (2, 5)])
def test_an_iterable_dataset_with_a_state_goes_on_where_torchdatas_does(workers, taken):
    form = {"taken": taken, "num_workers": workers}

    ours = resumed(DataLoader, lambda: StreamWithState(40), **form)
    theirs = resumed(StatefulDataLoader, lambda: StreamWithState(40), **form)

    assert ours == theirs


@pytest.mark.parametrize(("workers", "taken"), [(0, 0), (0, 3), (0, 10), (2, 5)])
def test_a_dataset_that_is_its_own_iterator_goes_on_where_torchdatas_does(workers, taken):
    form = {"taken": taken, "num_workers": workers}

    before, rest, after = resumed(DataLoader, lambda: Turning(40), **form)
    theirs = resumed(StatefulDataLoader, lambda: Turning(40), **form)

    if taken < 10:
        assert (before, rest, after) == theirs
    else:  # the epoch has no batch left, and ours goes on with the one behind it
        assert before == after == theirs[0]
    assert sorted(chain(*before, *rest)) == [*range(40)]


@pytest.mark.parametrize("taken", [0, 3])
def test_an_iterator_that_knows_the_generator_draws_what_it_would_have_drawn(taken):
    def run(kind):
        torch.manual_seed(5)
        loader = kind(Drawing(20), 4)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
        unbroken = plain(batches)
        torch.manual_seed(77)
        again = kind(Drawing(20), 4)
        again.load_state_dict(state)
        return unbroken, plain(again)

    ours, theirs = run(DataLoader), run(StatefulDataLoader)

    assert ours == theirs
    assert ours[0] == ours[1]


def test_another_worker_count_is_refused_by_torchdata_and_not_by_ours():
    def other(kind):
        loader = kind(Numbers(40), 4, num_workers=2)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        del batches
        again = kind(Numbers(40), 4, num_workers=1)
        again.load_state_dict(state)
        return plain(again)

    with pytest.raises(AssertionError):
        other(StatefulDataLoader)
    assert other(DataLoader) == [[*range(n, n + 4)] for n in range(4, 40, 4)]
