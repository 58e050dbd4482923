"""Ranks join and leave a running data plane, of threads and of Ray actors: the steps of a run with constant ranks."""

import os
import signal
import time

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, StateError
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.machine.messages import ResizeAsked
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_worlds
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")
STEPS = 16


def a_spec(folder, mix, *, dp=1, elastic=True, **changes):
    runtime = mix.runtime.model_copy(update={"elastic": elastic})
    mix = mix.model_copy(update={"runtime": runtime})
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp), **changes)


def digest_of(batches):
    return combined(map(batch_digest, batches))


def next_step_of(clients):
    return digest_of([client.next_batch() for client in clients])


def unbroken(folder, mix, count=STEPS):
    with LocalPlane(a_spec(folder, mix)) as plane, Client(plane.handle(0)) as client:
        return [next_step_of([client]) for _ in range(count)]


def resized(clients, dp, plane=None, **changes):
    """Let the first ranks stay, as many as possible, and others join; return the clients of all."""
    step = changes.pop("step", clients[0].next_step)
    stay = clients[:dp]
    for rank, client in enumerate(stay):
        client.resize(rank, dp, step=step, **changes)
    asked = ResizeAsked(dp=dp, step=step)
    return stay + [Client(plane.handle(rank, 0, asked)) for rank in range(len(stay), dp)]


def test_threads_serve_four_ranks_then_three_then_four_the_steps_of_one(tmp_path):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    whole = unbroken(tmp_path, mix)

    run_dir, steps = tmp_path / "run", []
    with LocalPlane(a_spec(tmp_path, mix, dp=4, run_dir=run_dir)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(4)]
        steps += [next_step_of(clients) for _ in range(5)]
        gone = clients[3]
        clients = resized(clients, 3)
        steps += [next_step_of(clients) for _ in range(5)]
        with pytest.raises(
            StateError, match=r"generation 0, but the ranks are now of generation 1"
        ):
            gone.next_batch()
        clients = resized(clients, 4, plane)
        steps += [next_step_of(clients) for _ in range(STEPS - 10)]
        state = clients[3].state_dict()

    assert steps == whole
    assert state["step"] == STEPS
    worlds = read_worlds(run_dir / JOURNAL_NAME)
    assert [(world["step"], world["sizes"]["dp"]) for world in worlds] == [(5, 3), (10, 4)]


def test_a_step_that_came_to_nothing_is_taken_again_by_those_who_are_left(tmp_path):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    whole = unbroken(tmp_path, mix, 8)

    with LocalPlane(a_spec(tmp_path, mix, dp=4)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(4)]
        steps = [next_step_of(clients) for _ in range(4)]
        for client in clients[:3]:  # the fourth one dies in step 4
            client.next_batch()
        clients = resized(clients, 3, step=4)
        steps += [next_step_of(clients) for _ in range(4)]

    assert steps == whole


@pytest.mark.parametrize("comes", ["first", "last"])
def test_a_rank_that_takes_the_place_of_a_lost_one_needs_no_number_of_the_change(tmp_path, comes):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    whole = unbroken(tmp_path, mix, 8)

    with LocalPlane(a_spec(tmp_path, mix, dp=4)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(4)]
        clients[0].next_batch()
        clients.pop().close()  # the fourth one dies in the first step of these ranks
        again = ResizeAsked(dp=4, step=0)
        new = [Client(plane.handle(3, 0, again))] if comes == "first" else []
        for rank, client in enumerate(clients):
            client.resize(rank, 4, step=0)
        clients += new or [Client(plane.handle(3, 0, again))]
        steps = [next_step_of(clients) for _ in range(8)]
        assert plane.planner.world().generation == 1

    assert steps == whole


def test_a_batch_that_was_looked_at_for_ranks_of_before_is_not_handed_out(tmp_path):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    whole = unbroken(tmp_path, mix, 6)

    with LocalPlane(a_spec(tmp_path, mix, dp=4)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(4)]
        steps = [next_step_of(clients) for _ in range(3)]
        assert plane.constructor.wait(3, 60.0)
        assert all(client.peek() is not None for client in clients)
        clients = resized(clients, 2)
        steps += [next_step_of(clients) for _ in range(3)]

    assert steps == whole


def test_ranks_that_stay_are_told_so_and_go_on(tmp_path):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)

    with LocalPlane(a_spec(tmp_path, mix, dp=2, elastic=False)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        next_step_of(clients)
        with pytest.raises(ConfigError, match=r"open it with elastic=True"):
            clients[0].resize(0, 1)
        with pytest.raises(ConfigError, match=r"dp_rank is 3; this plane has dp ranks 0 to 2"):
            clients[0].resize(3, 3)
        assert next_step_of(clients)


@pytest.mark.ray
@pytest.mark.slow
# Actors start one after another, each in up to a minute on a busy machine.
@pytest.mark.timeout(600)
def test_ray_serves_four_ranks_then_three_then_four_though_its_planner_is_killed(tmp_path):
    pytest.importorskip("ray")
    from omniload.actors.opening import open_ray_plane  # noqa: PLC0415 -- an extra

    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    count = 45
    whole = unbroken(tmp_path, mix, count)
    runtime = mix.runtime.model_copy(update={"constructors": 2})
    mix = mix.model_copy(update={"runtime": runtime})

    waits_s = []
    with open_ray_plane(a_spec(tmp_path, mix, dp=4, run_dir=tmp_path / "run")) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(4)]
        steps = [next_step_of(clients) for _ in range(10)]
        for client in clients[:3]:  # the fourth one dies in step 10
            client.next_batch()
        for dp, step in ((3, 10), (4, None)):
            began_s = time.perf_counter()
            clients = resized(clients, dp, plane, step=step or clients[0].next_step)
            steps.append(next_step_of(clients))
            waits_s.append(time.perf_counter() - began_s)
            steps += [next_step_of(clients) for _ in range(9)]
        os.kill(plane.pids()["planner"], signal.SIGKILL)
        # More steps than were built ahead, so the last of them come from the planner that took over, which knows the
        # ranks.
        steps += [next_step_of(clients) for _ in range(10)]
        clients = resized(clients, 2)
        steps += [next_step_of(clients) for _ in range(count - 40)]
        assert clients[1].state_dict()["step"] == count
        with pytest.raises(ConfigError, match=r"dp 8192 .*runtime.constructors"):
            clients[0].resize(0, 8192)
        locks = {lock.stem for lock in plane.address.board.glob("rank*.lock")}

    assert steps == whole
    # Locks of the last two worlds, and of the first world only that of the dead rank, because its handle still holds
    # it here.
    of_worlds = [(rank, number) for number, dp in ((2, 4), (3, 2)) for rank in range(dp)]
    assert locks == {"rank-dp=3", *(f"rank-dp={rank}-of-{number}" for rank, number in of_worlds)}
    worlds = read_worlds(tmp_path / "run" / JOURNAL_NAME)
    assert [(world["step"], world["sizes"]["dp"]) for world in worlds] == [
        (10, 3),
        (20, 4),
        (40, 2),
    ]
    print(f"waited {waits_s} s for the first batches of other ranks")  # noqa: T201 -- a figure for whoever asks


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("elastic", [True, False])
def test_a_rank_that_ends_beside_the_planner_keeps_from_others_no_step_that_it_was_in(
    tmp_path, elastic
):
    pytest.importorskip("ray")
    from omniload.actors.opening import open_ray_plane  # noqa: PLC0415 -- an extra

    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    runtime = mix.runtime.model_copy(update={"batch_timeout": 90.0})
    mix = mix.model_copy(update={"runtime": runtime})
    step = 6 + mix.steps_ahead
    whole = unbroken(tmp_path, mix, step + 6)

    with open_ray_plane(a_spec(tmp_path, mix, dp=3, elastic=elastic)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(3)]
        steps = [next_step_of(clients) for _ in range(6)]
        # The rank takes all planned steps, and ends before the next planner can hear of it.
        dead, planner = clients.pop(), plane.pids()["planner"]
        parts = [dead.next_batch() for _ in range(6, step)]
        os.kill(planner, signal.SIGKILL)
        dead.close()
        steps += [digest_of([part, *(client.next_batch() for client in clients)]) for part in parts]

        waits_s = []
        for client in clients:
            client.next_batch()
            waits_s.append(client.last_wait_s)
        if elastic:
            clients = resized(clients, 2, step=step)
            steps += [next_step_of(clients) for _ in range(6)]

    assert steps == whole[: len(steps)]
    assert len(steps) == step + 6 * elastic
    print(f"waited {waits_s} s for the step in which a rank ended")  # noqa: T201 -- a figure for whoever asks
