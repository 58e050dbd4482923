"""Digests: the same for the same samples wherever they are, another for any other token."""

from dataclasses import fields, replace

import numpy as np
import pytest

from omniload.base.ragged import Ragged
from omniload.batch.digest import DIGEST_MODULUS, batch_digest, combined, microbatch_digest
from omniload.batch.microbatch import Batch
from omniload.batch.slices import slice_for_cp
from omniload.mix.columns import name_inside
from tests.support.plane.builders import a_microbatch

A, B, C = [0, 1, 0, 0, 5, 5], [1, 5, 0, 0, 9, 12], [0, 2, 0, 0, 16, 16]
ROWS = [[A, B], [C], [], [B]]


def a_batch(*microbatches):
    return Batch(step=0, microbatches=microbatches, loss_tokens=1, imbalance=1.0, bound=1.0)


def test_rows_may_lie_in_any_order_and_any_microbatch():
    together = microbatch_digest(a_microbatch(ROWS, length=16))

    apart = [microbatch_digest(a_microbatch([row], length=16)) for row in reversed(ROWS)]

    assert combined(apart) == together
    assert 0 <= together < DIGEST_MODULUS


def test_ranks_shares_add_up_to_the_digest_of_the_step():
    first, second = a_microbatch(ROWS[:1], length=16), a_microbatch(ROWS[1:], length=16)

    assert combined([batch_digest(a_batch(first)), batch_digest(a_batch(second))]) == batch_digest(
        a_batch(a_microbatch(ROWS, length=16))
    )


@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("column", [0, 4, 8])
def test_any_other_token_gives_another_digest(row, column):
    whole = a_microbatch(ROWS, length=16)
    changed = whole.tokens_RT.copy()
    changed[row, column] += 1

    assert microbatch_digest(replace(whole, tokens_RT=changed)) != microbatch_digest(whole)


@pytest.mark.parametrize("column", [0, 3, 8])
def test_a_label_that_is_left_out_gives_another_digest(column):
    whole = a_microbatch(ROWS, length=16)
    trained = np.ones((4, 16), np.bool_)
    every = microbatch_digest(replace(whole, trained_RT=trained))
    trained[0, column] = False

    assert every == microbatch_digest(whole)
    assert microbatch_digest(replace(whole, trained_RT=trained)) != every


def test_another_token_behind_a_cut_gives_another_digest():
    whole = a_microbatch([[[1, 5, 0, 0, 9, 12]]], length=16)
    behind = whole.next_D + np.array([1, 0], np.int32)

    assert microbatch_digest(replace(whole, next_D=behind)) != microbatch_digest(whole)


@pytest.mark.parametrize("place", range(4))
def test_any_other_key_gives_another_digest(place):
    whole = a_microbatch(ROWS, length=16)
    keys = whole.keys_K4.copy()
    keys[-1, place] += 1

    assert microbatch_digest(replace(whole, keys_K4=keys)) != microbatch_digest(whole)


def test_documents_joined_or_cut_elsewhere_give_another_digest():
    whole = a_microbatch(ROWS, length=16)
    bounds = whole.cu_seqlens.copy()
    bounds[1] += 1

    assert microbatch_digest(replace(whole, cu_seqlens=bounds)) != microbatch_digest(whole)


def test_two_equal_rows_count_twice():
    assert microbatch_digest(a_microbatch([[A], [A]], length=16)) == combined(
        [microbatch_digest(a_microbatch([[A]], length=16))] * 2
    )


def test_the_layout_in_memory_does_not_matter():
    whole = a_microbatch(ROWS, length=16)
    turned = {
        f.name: np.asfortranarray(getattr(whole, f.name))
        for f in fields(whole)
        if getattr(getattr(whole, f.name), "ndim", 0) == 2
    }

    assert microbatch_digest(replace(whole, **turned)) == microbatch_digest(whole)


def test_slices_have_no_digest():
    part = slice_for_cp(a_microbatch(ROWS, length=16), 0, 2)

    with pytest.raises(ValueError, match="step 0 holds context-parallel slices"):
        batch_digest(a_batch(part))


def test_any_other_value_of_a_column_gives_another_digest_and_no_column_the_one_of_before():
    name = name_inside("weight", "float32", None)
    plain, whole = a_microbatch(ROWS, length=16), a_microbatch(ROWS, length=16, own=[name])
    changed = whole.aligned_RT["weight"].copy()
    changed[1, 3] += 0.5
    others = (
        replace(whole, aligned_RT={"weight": changed}),
        replace(whole, aligned_RT={"weights": whole.aligned_RT["weight"]}),
        plain,
    )

    assert microbatch_digest(replace(whole, aligned_RT={})) == microbatch_digest(plain)
    assert microbatch_digest(whole) not in {microbatch_digest(each) for each in others}


def test_the_digest_covers_values_of_whole_records_and_whose_they_are():
    plain = a_microbatch(ROWS, length=16)
    texts = [b"en", b"", b"de"]

    def tagged(values, name="lang"):
        column = Ragged.of([np.frombuffer(value, np.uint8) for value in values], np.uint8)
        return microbatch_digest(replace(plain, columns_K={name: column}))

    others = [tagged([b"e", b"n", b"de"]), tagged([b"en", b"de", b""]), tagged(texts, "language")]
    assert tagged(texts) == tagged(texts)
    assert len({tagged(texts), microbatch_digest(plain), *others}) == 5
    assert tagged(texts, "text") == microbatch_digest(plain)
