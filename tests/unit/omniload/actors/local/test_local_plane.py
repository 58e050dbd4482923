"""A rank in the process of its plane keeps its number if another number is refused."""

from types import SimpleNamespace

import pytest

from omniload.actors.heartbeat_board import Activity, MemoryBoard
from omniload.actors.local.plane import LocalHandle
from omniload.actors.roles.constructor import ConstructorShell
from omniload.base.errors import StateError, UnavailableError
from omniload.base.ragged import Ragged
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ResizeAsked
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import Edition, RanksServed, World, WorldRank
from tests.support.plane.builders import a_plan, tokens_of


class FakePlane:
    """A plane that has whatever ranks are asked for, one of which somebody else holds."""

    first_step = 0

    def __init__(self, held):
        self.keys, self.taken = {held}, []
        self.world = World(tree=ClientPlaceTree.of(dp=2))
        mix = SimpleNamespace(steps_at_once=1)
        self.spec = SimpleNamespace(mix=mix, tree=self.world.tree)
        self.constructor = SimpleNamespace(has=lambda step, generation: False)
        self.planner = SimpleNamespace(taken=lambda *told: self.taken.append(told))

    def activity_of(self, name):
        return Activity(name)

    def resize(self, asked):
        self.world = self.world.followed_by(dp=asked.dp, step=asked.step)
        return self.world

    def claim_rank(self, world, dp_rank, cp_rank):
        key = WorldRank(dp_rank, cp_rank, world.generation)
        if key in self.keys:
            raise StateError(f"rank-{dp_rank} of this data plane has a handle already")
        self.keys.add(key)
        return key

    def release_rank(self, key):
        self.keys.discard(key)


def test_a_resize_to_a_number_that_another_rank_has_leaves_the_rank_as_it_was():
    others = WorldRank(0, 0, 1)
    plane = FakePlane(held=others)
    handle = LocalHandle(plane, 1, 0, None)

    with pytest.raises(StateError, match="has a handle already"):
        handle.resize(ResizeAsked(dp=1, step=5), 0)
    handle.taken(0)

    assert plane.taken == [(0, WorldRank(1))]
    assert handle.first_step == 0
    assert plane.keys == {others, WorldRank(1)}
    handle.close()
    assert plane.keys == {others}


class BuiltForOthers:
    """A constructor that has a step of the previous ranks, and none of the present ones."""

    def has(self, step, generation=0):
        return generation == 0

    def take_built(self, step, rank):
        return object() if self.has(step, rank.generation) else None

    def wait(self, step, timeout_s, generation=0):
        return False

    def take(self, step, rank, timeout_s=None):
        raise AssertionError("it waits without a limit")


def test_a_resized_rank_waits_with_a_limit_for_a_step_that_is_built_for_the_earlier_ranks():
    plane = FakePlane(held=(7, 7, 7))
    plane.constructor, plane.board = BuiltForOthers(), MemoryBoard()
    plane.check = lambda: None
    handle = LocalHandle(plane, 1, 0, None)

    handle.resize(ResizeAsked(dp=1, step=5), 0)

    assert not handle.is_ready(5)
    with pytest.raises(UnavailableError, match="the batch of step 5"):
        handle.take(5, 0.01)


def test_a_resized_rank_frees_its_old_number():
    plane = FakePlane(held=(7, 7, 7))
    handle = LocalHandle(plane, 1, 0, None)

    handle.resize(ResizeAsked(dp=1, step=5), 0)
    handle.taken(5)

    assert plane.taken == [(5, WorldRank(0, 0, 1))]
    assert plane.keys == {(7, 7, 7), WorldRank(0, 0, 1)}


@pytest.fixture
def built():
    """Return a constructor that has step 0, and a rank of its process."""
    slices = ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, 1, 0, 5)]))])
    machine = DataConstructor(dp_ranks=[0], names=["web", "code"], row_length=8)
    plane = FakePlane(held=(7, 7, 7))
    plane.constructor = ConstructorShell(machine, lambda _: slices, Activity("constructor-0"))
    plane.check = lambda: None
    plane.constructor.build([a_plan([[[0, 1, 0, 0, 5, 5]]])])
    return plane.constructor, LocalHandle(plane, 0, 0, None)


def test_a_lent_batch_is_given_when_it_is_taken_if_its_plan_still_holds(built):
    constructor, handle = built

    looked_at = handle.lent(0, 1.0)

    assert constructor.fence((0, 1)) == 0
    constructor.build((), RanksServed(dp_ranks=(0,), edition=Edition(turn=1, since=1)))
    looked_at = handle.lent(0, 1.0)
    assert handle.take(0) is looked_at
    assert constructor.fence((0, 2)) == 1


def test_a_lent_batch_whose_plan_was_taken_back_is_replaced_by_another(built):
    constructor, handle = built
    looked_at = handle.lent(0, 1.0)

    served = RanksServed(dp_ranks=(0,), edition=Edition(turn=1))
    constructor.build([a_plan([[[0, 1, 0, 0, 5, 5]]])], served)

    batch = handle.take(0)
    assert (batch.step, batch is looked_at) == (0, False)


def test_a_withheld_batch_is_not_lent(built):
    constructor, handle = built
    constructor.fence((0, 1))

    assert handle.lent(0, 0.0) is None
