"""Shares of ranks that take the same rows, and ranks by the numbers of their job."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare, counts_by_rank
from omniload.batch.microbatch import Batch, Microbatch
from omniload.batch.wire import from_bytes, to_bytes


def counted(counts):
    return counts_by_rank(np.repeat(np.arange(len(counts)), counts))


def a_share(sends, receives, order=None, others=()):
    """Return a share whose embeddings arrive at places 10, 11, ..."""
    return EncoderShare(
        images_I=Ragged.of([np.zeros(sum(sends), np.uint8)], np.uint8),
        grids_I2=np.array([[1, sum(sends)]], np.int32),
        keys_I4=np.zeros((1, 4), np.int64),
        num_ranks=len(sends),
        sends_C2=counted(sends),
        receives_C2=counted(receives),
        places_E=np.arange(10, 10 + sum(receives)),
        order_M=None if order is None else np.array(order),
        others=tuple(others),
    )


def a_batch(share):
    """Return a batch of one row of padding, and a share."""
    rows = Microbatch(
        tokens_RT=np.zeros((1, 4), np.int32),
        cu_seqlens=np.array([0, 4], np.int32),
        sources_D=np.array([-1], np.int16),
        next_D=np.array([0], np.int32),
        keys_K4=np.empty((0, 4), np.int64),
        encoding=share,
    )
    return Batch(step=0, microbatches=(rows,), loss_tokens=0, imbalance=1.0, bound=1.0)


def test_embeddings_leave_and_come_in_the_order_of_the_jobs_ranks():
    share = a_share(sends=[1, 2, 1], receives=[2, 0, 1]).numbered((0, 2, 1))

    assert share.sends_W.tolist() == [1, 1, 2]
    assert share.order_M.tolist() == [0, 3, 1, 2]
    assert share.receives_W.tolist() == [2, 1, 0]
    assert share.places_E.tolist() == [10, 11, 12]


def test_parts_of_images_that_leave_out_of_order_are_numbered_from_that_order():
    share = a_share(sends=[1, 2, 1], receives=[1, 1, 1], order=[3, 1, 0, 2]).numbered((1, 2, 0))

    assert share.sends_W.tolist() == [1, 1, 2]
    assert share.order_M.tolist() == [2, 3, 1, 0]
    assert share.places_E.tolist() == [12, 10, 11]


def test_an_order_that_numbers_undo_is_none():
    assert a_share([1, 1], [0, 0], order=[1, 0]).numbered((1, 0)).order_M is None


def test_ranks_that_are_numbered_by_place_stay_as_they_are():
    share = a_share([1, 1], [0, 0])

    assert share.numbered(()) is share


def test_shares_survive_the_wire_and_those_of_nothing_take_a_word_each():
    shares = [
        a_share([0, 5, 1], [0, 0, 0]),
        EncoderShare.of_nothing(3, 12),
        a_share([2, 0, 0], [1, 0, 4], order=[1, 0]),
        replace(EncoderShare.of_nothing(3, 12), receives_C2=counted([0, 2]), places_E=np.arange(2)),
    ]
    shares = [replace(share, values_per_patch=12) for share in shares]
    batch = a_batch(replace(shares[0], others=tuple(shares[1:])))

    (part,) = from_bytes(to_bytes(batch)).microbatches

    for share, again in zip(shares, part.encoding.of_ranks, strict=True):
        for name in ("grids_I2", "keys_I4", "sends_C2", "receives_C2", "places_E", "order_M"):
            one, other = getattr(share, name), getattr(again, name)
            assert np.array_equal(one, other), name
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        assert np.array_equal(share.images_I.values_V, again.images_I.values_V)
        assert np.array_equal(share.images_I.offsets, again.images_I.offsets)
        assert (again.num_ranks, again.values_per_patch, again.others) == (3, 12, ())
    idle = EncoderShare.of_nothing(4096, 12)
    many = a_batch(replace(shares[0], num_ranks=4096, others=(idle,) * 1000))
    assert len(to_bytes(many)) - len(to_bytes(a_batch(shares[0]))) < 10 * 1000


@given(st.lists(st.integers(0, 3), max_size=9), st.randoms(use_true_random=False))
def test_counts_by_other_numbers_are_those_of_all_ranks_moved(counts, random):
    numbers = random.sample(range(len(counts)), len(counts))
    share = a_share(counts, counts[::-1])

    moved = share.numbered(numbers)

    assert share.sends_W.tolist() == counts
    assert [moved.sends_W[number] for number in numbers] == counts
    assert [moved.receives_W[number] for number in numbers] == counts[::-1]
    for counted_C2 in (moved.sends_C2, moved.receives_C2):
        assert (np.diff(counted_C2[:, 0]) > 0).all()


def test_a_place_along_cp_has_the_shares_of_its_peers_and_a_peer_its_own():
    shares = [a_share([i], [0]) for i in range(6)]
    whole = a_share([0], [0], others=shares[1:])

    for cp_rank in range(3):
        place = whole.of_place(cp_rank, 3)
        sent = [int(share.sends_W[0]) for share in place.of_ranks]
        assert sent == [2 * cp_rank, 2 * cp_rank + 1]
        for peer in range(2):
            own = place.of_peer(peer)
            assert int(own.sends_W[0]) == sent[peer]
            assert own.others == ()
