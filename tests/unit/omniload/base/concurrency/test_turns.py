"""Threads that share a loop: each batch goes to one of them."""

import threading

from omniload.base.concurrency.turns import EachBatch


def test_of_two_threads_that_share_a_loop_none_loses_the_last_batch_to_the_end_that_the_other_finds():
    last_is_out, end_is_found = threading.Event(), threading.Event()
    found, counts = [], []
    left = iter(["last", None])

    def following():
        batch = next(left)
        if batch is not None:
            last_is_out.set()
            assert end_is_found.wait(60)
        return batch

    loop = EachBatch(following, counts.append)
    one = threading.Thread(target=lambda: found.append(next(loop)))
    one.start()
    assert last_is_out.wait(60)

    assert next(loop, "end") == "end"
    end_is_found.set()
    one.join(60)

    assert found == ["last"]
    assert next(loop, "end") == "end"
    assert len(counts) == 1
