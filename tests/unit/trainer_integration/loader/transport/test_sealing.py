"""How a worker's messages reach the trainer."""

import multiprocessing

import hypothesis.strategies as st
from hypothesis import given, settings
from torch.utils.data import IterableDataset

from tests.support.trainer.loaders import came_from
from trainer_integration import DataLoader

SHORT, LONG = 10, 100_000
WAIT_S = 60


@given(sizes=st.lists(st.sampled_from([0, SHORT, 5_000, LONG]), max_size=30))
@settings(max_examples=8)
def test_messages_come_in_the_order_they_were_put_in_whatever_their_sizes(sizes):
    # A short one behind a long one overtakes it while the thread writes.
    sizes = [LONG, SHORT, *sizes, LONG, SHORT]

    assert came_from(multiprocessing.get_context("fork"), sizes) == list(enumerate(sizes))


class Texts(IterableDataset):
    """Batches that a pipe does not hold, and the word that there are no more."""

    def __init__(self, over):
        self._over = over

    def __iter__(self):
        yield from ("t" * 1_200_000 for _ in range(6))
        self._over.set()


def test_the_last_batches_of_an_iterable_dataset_are_not_lost_behind_the_word_that_it_ended():
    over = multiprocessing.get_context("fork").Event()
    loader = DataLoader(
        Texts(over),
        batch_size=None,
        num_workers=1,
        prefetch_factor=8,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    assert over.wait(WAIT_S)

    assert len(list(batches)) == 6
