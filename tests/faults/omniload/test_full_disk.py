"""A real disk that is full for a while: the journal waits for room, and the run goes on with the same samples."""

import os
import threading
from contextlib import suppress
from itertools import islice

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.actors.planning import make_successor
from omniload.actors.roles import planner, sources
from omniload.base.errors import StateError
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.machine.messages import ChangeAsked
from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.edits_file import read_history
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_journal
from omniload.mix.journal.room import Room
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.block_memory import BlockMemory
from tests.support.disks import a_tmpfs
from tests.support.plane.corpora import a_corpus
from tests.support.plane.journals import NAMES, a_journal, opened, records_between, states

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def fill(folder):
    """Leave no page free; return what gives the room back."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


class Full:
    """A room whose folder has some again at the second wait, or never; its clock is moved by waits."""

    def __init__(self, folder, *, mends=True):
        self.folder, self.mends = folder, mends
        self.now_s, self.waits = 0.0, 0
        self.looks = []
        """What ``look`` gave in each wait."""
        self.look = lambda: None

    def room(self):
        return Room(self.pause, lambda: self.now_s)

    def pause(self, wait_s):
        self.now_s += wait_s
        self.waits += 1
        self.looks.append(self.look())
        if self.mends and self.waits == 2:
            (self.folder / "filler").unlink()
        return False


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with a_tmpfs(folder, "2m"):
        yield folder


def a_spec(folder, run_dir, **runtime):
    mix = a_corpus(folder, ("web",), runtime={"prefetch_steps": 1, **runtime})
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=1), run_dir=run_dir)


def digests_of(spec, count, midway=lambda plane: None):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        found = [batch_digest(batch) for batch in islice(client, 3)]
        midway(plane)
        return found + [batch_digest(batch) for batch in islice(client, count - 3)]


def test_a_record_of_which_a_part_fits_is_cut_off_and_written_once_there_is_room(
    disk, tmp_path, monkeypatch
):
    found = states(120)
    unbroken = a_journal(tmp_path / "unbroken", found).read_bytes()
    full, taken, sizes, real = Full(disk), [], [], os.pwrite
    full.look = lambda: (disk / "j").stat().st_size

    def pwrite(fd, rest, at):
        taken.append((real(fd, rest, at), len(rest)))
        return taken[-1][0]

    with opened(disk / "j", found[0]) as journal:
        journal.wait_in(full.room())
        fill(disk)
        monkeypatch.setattr(os, "pwrite", pwrite)
        for record in records_between(found):
            sizes.append((disk / "j").stat().st_size)
            journal.append(record.to_json(NAMES))

    assert full.waits == 2
    assert any(0 < got < wanted for got, wanted in taken), "a part of a record was written"
    assert len(set(full.looks)) == 1
    assert full.looks[0] in sizes, "nothing of it is there in a wait"
    assert (disk / "j").read_bytes() == unbroken


@pytest.mark.parametrize("on_a_store", [False, True])
def test_a_run_whose_disk_is_full_for_a_while_goes_on_with_the_same_samples(
    disk, tmp_path, monkeypatch, caplog, on_a_store
):
    unbroken = digests_of(a_spec(tmp_path, tmp_path / "unbroken"), 40)
    full = Full(disk)
    monkeypatch.setattr(planner, "Room", full.room)
    run_dir = tmp_path / "run" if on_a_store else disk / "run"
    spec = a_spec(tmp_path, run_dir, **({"journal": disk.as_uri()} if on_a_store else {}))

    def midway(plane):
        full.look = lambda: [task.doing for task in plane.board.read()["planner"].tasks]
        fill(disk)

    found = digests_of(spec, 40, midway)

    assert found == unbroken
    assert full.waits >= 2
    (told,) = (m for m in caplog.messages if "waiting up to 60 s for room" in m)
    assert str(disk) in told
    assert "0 bytes (0 B) are free there" in told
    (doing,) = full.looks[0]
    assert doing.startswith("waits for room for ")
    assert doing.endswith("0 bytes (0 B) are free there")


def test_blocks_that_find_no_room_are_decoded_again_and_the_samples_are_the_same(
    disk, tmp_path, monkeypatch, caplog
):
    mix = a_corpus(tmp_path, [f"s{n}" for n in range(6)], runtime={"prefetch_steps": 1})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))
    unbroken, held = digests_of(spec, 40), []

    class Counted(BlockMemory):
        def hold(self, block):
            super().hold(block)
            held.append(len(self._held))
            return block

    monkeypatch.setattr(sources, "BlockMemory", lambda _limit, _: Counted(1, disk))
    fill(disk)

    assert digests_of(spec, 40) == unbroken
    assert max(held) <= 3, "the one that stays, and those of two reads under way"
    (told,) = (m for m in caplog.messages if "over loader.memory" in m)
    assert f"{disk}: " in told
    assert "0 bytes (0 B) are free there" in told


def test_a_plane_that_is_closed_waits_for_room_no_more(disk, tmp_path, monkeypatch, caplog):
    waits, real = threading.Event(), Room._waits
    monkeypatch.setattr(Room, "_waits", lambda room, *told: (waits.set(), real(room, *told))[1])

    with LocalPlane(a_spec(tmp_path, disk / "run")) as plane, Client(plane.handle(0)) as client:
        fill(disk)
        taking = threading.Thread(target=lambda: all(client.next_batch() for _ in range(400)))
        with monkeypatch.context() as patched:
            patched.setattr(threading, "excepthook", lambda _: None)
            taking.start()
            assert waits.wait(timeout=60)
            plane.close()
            taking.join(timeout=60)

    assert not taking.is_alive()
    assert not [m for m in caplog.messages if "did not stop within" in m]


def taken_over_on(disk, tmp_path, full):
    """Have a planner take over on a store that is full; return it, and what it said meanwhile."""
    spec = a_spec(tmp_path, tmp_path / "run", journal=disk.as_uri())
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        for _ in range(3):
            client.next_batch()
        facts = plane.loader.facts()
    fill(disk)
    room, said = full.room(), []
    room.says = said.append
    planner, journal = make_successor(spec, [facts[0]], spec.run_dir, life=1, room=room)
    journal.close()
    return planner, said


def test_a_planner_that_takes_over_on_a_full_store_waits_for_room(disk, tmp_path, caplog):
    full = Full(disk)

    planner, said = taken_over_on(disk, tmp_path, full)

    assert planner.life == 1
    assert full.waits == 2
    (told,) = (m for m in caplog.messages if "waiting up to 60 s for room" in m)
    assert str(disk) in told
    assert said[0].startswith(f"waits for room for {(disk / 'run').as_uri()}: ")


def test_a_planner_that_takes_over_on_a_store_that_stays_full_gives_up_with_the_limit(
    disk, tmp_path
):
    full = Full(disk, mends=False)

    with pytest.raises(StateError, match=r"claimed: .*60 s of the 60 s that room is waited for"):
        taken_over_on(disk, tmp_path, full)

    assert full.now_s == pytest.approx(60.0)


def test_an_edit_that_finds_no_room_waits_for_it_and_holds(disk, tmp_path, monkeypatch):
    full = Full(disk)
    monkeypatch.setattr(planner, "Room", full.room)
    spec = a_spec(tmp_path, disk / "run")
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        client.next_batch()
        fill(disk)
        change = SetWeights(weights={"web": 2.0})

        plane.planner.change(ChangeAsked(change=change)).result(timeout=60)

        assert [edit.change for edit in read_history(disk / "run", spec.mix).edits] == [change]
        assert client.next_batch() is not None
    assert full.waits >= 2


@pytest.mark.parametrize("on_a_store", [False, True])
def test_a_disk_that_stays_full_ends_the_run_with_the_limit(
    disk, tmp_path, monkeypatch, on_a_store
):
    full = Full(disk, mends=False)
    monkeypatch.setattr(planner, "Room", full.room)
    run_dir = tmp_path / "run" if on_a_store else disk / "run"
    spec = a_spec(tmp_path, run_dir, **({"journal": disk.as_uri()} if on_a_store else {}))

    with pytest.raises(
        StateError,
        match=rf"{disk}.*60 s of the 60 s that room is waited for",
    ) as told:
        digests_of(spec, 400, lambda _: fill(disk))

    assert "0 bytes (0 B) are free there" in str(told.value)
    assert "make room" in str(told.value)
    assert full.now_s == pytest.approx(60.0)
    if not on_a_store:
        (disk / "filler").unlink()
        assert len(read_journal(run_dir / JOURNAL_NAME)[1]) >= 3
