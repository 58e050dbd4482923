"""Shares of ranks that take the same rows, and ranks by the numbers of their job."""

import numpy as np

from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare


def a_share(sends, receives, order=None, others=()):
    """Return a share whose embeddings arrive at places 10, 11, ..."""
    return EncoderShare(
        images_I=Ragged.of([np.zeros(sum(sends), np.uint8)], np.uint8),
        grids_I2=np.array([[1, sum(sends)]], np.int32),
        keys_I4=np.zeros((1, 4), np.int64),
        sends_W=np.array(sends),
        receives_W=np.array(receives),
        places_E=np.arange(10, 10 + sum(receives)),
        order_M=None if order is None else np.array(order),
        others=tuple(others),
    )


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
