"""The arguments of one call to a data constructor come out as they went in, equal to those through pickle itself."""

import pickle
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from omniload.actors.roles.build_order import BuildOrder
from omniload.base.ragged import Ragged
from omniload.plan.images.table import ImageTable
from omniload.plan.world import Edition, RanksServed
from tests.support.plane.builders import a_plan

A, B, C = [0, 1, 0, 0, 5, 5], [1, 7, 2, 3, 8, 9], [0, 2, 0, 0, 4, 4]
SERVED = RanksServed(
    dp_ranks=(3, 4), generation=2, step=9, edition=Edition(life=1, turn=5, since=8)
)


def content(value):
    """Return values with the types of all arrays, so that two can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if is_dataclass(value):
        return {f.name: content(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [content(each) for each in value]
    return value


def a_part(rows, **changes):
    return a_plan(rows, dp_ranks=[3] * len(rows), **changes)


@pytest.mark.parametrize(
    "plans",
    [
        (),
        [a_part([[A], [B, C]], step=11)],
        [a_part([[A]], step=11), a_part([], step=12)],
        [a_part([[A, B]], step=4, documents=Ragged.of([[2, 3], [5]]), mix_revision=3)],
        [a_part([[C]], step=4, image_table=ImageTable.empty(), imbalance=1.25)],
    ],
    ids=["none", "several rows", "several steps", "documents", "images"],
)
@pytest.mark.parametrize("heard", [None, 0, 17])
def test_an_order_comes_out_as_pickle_itself_would_have_it(plans, heard):
    order = BuildOrder(plans=plans, served=SERVED, released_to=6, heard=heard)

    found = BuildOrder.unpacked(order.packed())

    assert content(found) == content(pickle.loads(pickle.dumps(order)))


def test_columns_that_lie_otherwise_in_memory_are_the_same_columns():
    plan = a_part([[A], [B, C]])
    cut = a_part([[A], [B, C]], dp_ranks_R=np.asarray([3, 9, 4, 9], np.int32)[::2])
    turned = type(plan.pieces)(np.asfortranarray(plan.pieces.columns_CP))
    order = BuildOrder(
        plans=[a_part([[A], [B, C]], pieces=turned), cut], served=SERVED, released_to=0, heard=1
    )

    first, second = BuildOrder.unpacked(order.packed()).plans

    assert content(first.pieces) == content(plan.pieces)
    assert second.dp_ranks_R.tolist() == [3, 4]
