"""Places in an epoch's order where batches overtook each other, or none was handed out yet."""

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from trainer_integration.loader.resuming.order import Epoch, Order, Place
from trainer_integration.loader.samplers import Anatomy


def test_late_batches_that_are_handed_out_do_not_move_the_place_on():
    anatomy = Anatomy(BatchSampler(SequentialSampler(range(10)), 1, False), None)
    epoch = Epoch(anatomy, Place(batches=4, late=(1, 2)))
    for index in ([1], [2], [4]):
        epoch.drew(index)

    places = []
    for tasks in (1, 2, 3):
        epoch.gave(tasks)
        places.append((epoch.place().batches, epoch.place().late))

    assert places == [(4, (2,)), (4, ()), (5, ())]


def test_an_epoch_that_is_resumed_before_its_first_batch_draws_nothing_from_the_global_generator():
    anatomy = Anatomy(BatchSampler(RandomSampler(range(10)), 2, False), None)
    torch.manual_seed(3)
    order = Order(anatomy)
    expected = list(order)
    begun = Place(drawn=order.epoch.drawn, epochs=order.epoch.epochs)

    torch.manual_seed(99)
    before = torch.get_rng_state()
    found = list(Order(anatomy, begun))

    assert found == expected
    assert torch.equal(torch.get_rng_state(), before)
