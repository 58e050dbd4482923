"""A planner that ends at any call to the store of its journal: what was told is there, byte for byte, and goes on."""

import errno
import itertools
import os
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from fusefs.stores.memory import MemoryStore
from omniload.mix.journal import journal, object_storage, segments
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.object_storage import ObjectStorage
from omniload.mix.journal.reading import read_journal, read_tail
from omniload.mix.journal.segments import Life, Listed, Mark, Merging, Segment, moved_aside
from omniload.mix.journal.storage import Since
from tests.support.plane.journals import NAMES, PRINT, opened, records_between, states

FEW = 3
FOUND = states(15)
KEPT, EVERY = 4, 2
"""Steps that are kept at least, and steps between two bases."""


class EndedError(BaseException):
    """The process has ended: nothing of it goes on."""


class EndingStore(MemoryStore):
    """A store whose caller ends behind so many changes, before or after the last one is done."""

    changes, ends_at, is_done = 0, None, True

    def _change(self, call):
        self.changes += 1
        if self.ends_at is not None and self.changes >= self.ends_at:
            if self.changes == self.ends_at and self.is_done:
                call()
            raise EndedError
        return call()

    def publish(self, path, data, before=None, mode=None):
        return self._change(lambda: MemoryStore.publish(self, path, data, before, mode))

    def remove(self, path):
        return self._change(lambda: MemoryStore.remove(self, path))

    def rename(self, source, target):
        return self._change(lambda: MemoryStore.rename(self, source, target))


class AtOnce:
    """Tidies in the thread that asks, so that an end is one of all of it."""

    def __init__(self, *_):
        pass

    def submit(self, call):
        call()
        done = Future()
        done.set_result(None)
        return done

    def close(self, _):
        pass


@pytest.fixture(autouse=True)
def _all_in_one_thread(monkeypatch):
    monkeypatch.setattr(object_storage, "DaemonPool", AtOnce)


@pytest.fixture
def few_are_merged(monkeypatch):
    """Merge so few that merges are merged, and those again, within some lines."""
    monkeypatch.setattr(segments, "FAN_IN", FEW)


def read(store):
    with ObjectStorage(store).opened() as file:
        return file.read()


def written(store, told):
    """Write lines until the store ends; note each once it was told."""
    storage = ObjectStorage(store)
    storage.claim()
    storage.begin(b"base\n")
    told.append(b"base\n")
    for number in range(FEW**3 + 3):
        line = b"line %d\n" % number
        storage.append(line)
        told.append(line)


@pytest.mark.parametrize("is_done", [False, True])
def test_what_was_told_is_read_wherever_a_planner_ends_as_segments_are_merged(
    few_are_merged, is_done
):
    whole_store = EndingStore()
    written(whole_store, [])
    for end in range(2, whole_store.changes + 1):
        store, told = EndingStore(), []
        store.ends_at, store.is_done = end, is_done
        with pytest.raises(EndedError):
            written(store, told)
        store.ends_at = None
        whole = b"".join(told)

        found = read(store) if told else b""
        assert found.startswith(whole), end
        if told:
            following = ObjectStorage(store)
            following.claim()
            following.go_on(len(found))
            following.append(b"more\n")
            assert read(store) == found + b"more\n", end


@pytest.mark.parametrize("record_bytes", [512, 2560])
@pytest.mark.parametrize("window", [1, 8])
def test_ten_thousand_steps_never_lie_in_more_than_fifty_objects(record_bytes, window):
    merging, life, objects, end, most = Merging(), Life(1, "00000000"), set(), 0, 0
    for _ in range(10_000 // window):
        content = b"x" * (record_bytes * window)
        merging.added(segment := Segment(end, end + len(content), life), content)
        objects.add(segment)
        end = segment.stop
        while (due := merging.due()) is not None:
            merged, whole, small = due
            assert len(whole) == merged.stop - merged.start
            objects = objects - {*small} | {merged}
        most = max(most, len(objects))

    assert most <= 50
    assert sum(each.stop - each.start for each in objects) == end


def aside(store, name, count):
    with_lines = ObjectStorage(store)
    with_lines.claim()
    with_lines.begin(b"base of %s\t%s\n" % (name, b"0" * 16))
    for number in range(count):
        with_lines.append(b"line %d\t%016x\n" % (number, number))


def journals_aside(store):
    found = {}
    for entry in store.listing(""):
        if entry.name.startswith("aside"):
            parts = sorted(store.listing(entry.name), key=lambda each: each.name)
            found[entry.name] = sum(part.size_bytes for part in parts)
    return found


@pytest.mark.parametrize("is_done", [False, True])
def test_wherever_a_start_ends_as_it_moves_a_journal_aside_the_longest_stays_whole(is_done):
    for end in range(1, 60):
        store = EndingStore()
        for count in (3, 9):
            aside(store, b"one", count)
            if count == 3:
                moved_aside(store, "lines")
        whole = read(store)
        before = store.changes
        store.ends_at, store.is_done = before + end, is_done
        try:
            moved_aside(store, "lines")
        except EndedError:
            store.ends_at = None
            if any(entry.name == "lines" for entry in store.listing("")):
                assert read(store) == whole
                continue
        assert journals_aside(store)["aside-2"] == len(whole), end
        if store.changes < before + end:
            assert set(journals_aside(store)) == {"aside-2"}
            return
    raise AssertionError("it has no end")


@pytest.mark.parametrize("is_done", [False, True])
def test_a_journal_that_begins_at_a_mark_can_be_read_wherever_its_removal_ends(is_done):
    """What is left of it must be known as the beginning of the other one, so that the next start removes it."""
    for end in itertools.count(1):
        store = EndingStore()
        for count, folder in ((3, "aside-1"), (9, "aside-2")):
            aside(store, b"one", count)
            first, *_ = ObjectStorage(store).extents()
            mark = Mark(Since(first.stop, b"0" * 16), first.segment.life)
            store.publish(f"lines/{mark.name}", b"")
            store.remove(f"lines/{first.segment.name}")
            if folder == "aside-1":
                store.rename("lines", folder)
        store.ends_at, store.is_done = store.changes + 1 + end, is_done  # behind the rename
        try:
            assert moved_aside(store, "lines") == "aside-2"
        except EndedError:
            Listed.of(store.listing("aside-1")).extents()
        else:
            break
    assert end > 3


def appended(log, first, told):
    """Append every step from ``first`` on with a base now and then; note each step once its record was told."""
    for record, after in zip(records_between(FOUND[first:]), FOUND[first + 1 :], strict=True):
        # In one window, as a planner writes them.
        with log.together():
            log.append(record.to_json(NAMES))
            if after.step % EVERY == 0:
                log.append_base(after.to_json(NAMES, PRINT), after.digest())
        told.append(after.step)


def require_all_and_go_on(place, told):
    """Require every step that was told, of those that are kept, and let another planner append the others."""
    tail = read_tail(place, EVERY)
    assert tail.next_step in {told[-1], told[-1] + 1}
    base, records = read_journal(place)
    assert tail.next_step - base["step"] >= min(KEPT, tail.next_step)
    with Journal.taken_over(place, tail, tail.next_step, keep_steps=KEPT) as log:
        appended(log, tail.next_step, [])
    base, records = read_journal(place)
    assert base["step"] > 0
    assert base == FOUND[base["step"]].to_json(NAMES, PRINT)
    expected = records_between(FOUND)[base["step"] :]
    assert records == [record.to_json(NAMES) for record in expected]


@pytest.mark.parametrize("fan_in", [FEW, segments.FAN_IN])
@pytest.mark.parametrize("is_done", [False, True])
def test_what_was_told_is_read_wherever_a_planner_ends_as_old_steps_are_dropped(
    monkeypatch, is_done, fan_in
):
    monkeypatch.setattr(segments, "FAN_IN", fan_in)

    def planned(store, told):
        place = ObjectStorage(store)
        place.claim()
        with opened(place, FOUND[0], keep_steps=KEPT) as log:
            told.append(0)
            appended(log, 0, told)

    whole = EndingStore()
    planned(whole, [])
    assert ObjectStorage(whole).since().offset
    for end in range(1, whole.changes + 1):
        store, told = EndingStore(), []
        store.ends_at, store.is_done = end, is_done
        with pytest.raises(EndedError):
            planned(store, told)
        store.ends_at = None
        if told:
            following = ObjectStorage(store)
            following.claim()
            require_all_and_go_on(following, told)


class FullOfMarks(MemoryStore):
    """A store that has no room for one more object, if that is a mark, as long as ``is_full``."""

    is_full = True

    def publish(self, path, data, before=None, mode=None):
        if self.is_full and "/from-" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return MemoryStore.publish(self, path, data, before, mode)


def test_a_journal_that_cannot_be_marked_stays_long_and_is_cut_at_a_later_base(caplog):
    store = FullOfMarks()
    place = ObjectStorage(store)
    place.claim()
    begins, room_from = {}, len(FOUND) - 2 * EVERY

    def tell(step):
        begins[step] = place.since().offset
        store.is_full = step < room_from

    with opened(place, FOUND[0], keep_steps=KEPT) as log:
        appended(log, 0, SimpleNamespace(append=tell))

    assert "stays long: [Errno 28] No space left on device" in caplog.text
    assert {at for step, at in begins.items() if step <= room_from} == {0}
    assert begins[FOUND[-1].step] > 0
    base, records = read_journal(place)
    assert len(records) == FOUND[-1].step - base["step"]


class Points:
    """Counts what a planner does to its file, and kills its process before or after one of these points."""

    def __init__(self, kills_at, *, is_done):
        self.count, self.kills_at, self.is_done = 0, kills_at, is_done

    def of(self, call):
        def counted(*args, **named):
            self.count += 1
            if self.count == self.kills_at and not self.is_done:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **named)
            if self.count == self.kills_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    def lines(self, restarted):
        """A file that is written anew may end after any of its lines."""
        for line in restarted:
            self.of(bool)()
            yield line


def killed_at(path, points):
    """Write a journal in a process that is killed at a point; return what it told, and whether it was killed."""
    reads, tells = os.pipe()
    if not (child := os.fork()):
        # Nothing is put back, because the process has no other purpose.
        os.fsync = points.of(os.fsync)
        os.pwrite = points.of(os.pwrite)
        type(path).replace = points.of(type(path).replace)
        restarted = journal.restarted
        journal.restarted = lambda lines: points.lines(restarted(lines))
        with opened(path, FOUND[0], keep_steps=KEPT) as log:
            appended(log, 0, Told(tells))
        os._exit(0)
    os.close(tells)
    with os.fdopen(reads, "rb") as told:
        steps = list(told.read())
    return steps, os.waitpid(child, 0)[1] == signal.SIGKILL


class Told:
    """Tells steps through a pipe, a byte each."""

    def __init__(self, pipe):
        self.pipe = pipe

    def append(self, step):
        os.write(self.pipe, bytes([step]))


@pytest.mark.parametrize("is_done", [False, True])
def test_a_planner_may_be_killed_at_any_point_as_its_file_is_written_anew(tmp_path, is_done):
    for point in itertools.count(1):
        path = tmp_path / str(point)
        told, is_killed = killed_at(path, Points(point, is_done=is_done))
        if not is_killed:
            break
        if told:
            require_all_and_go_on(path, told)
    assert told[-1] == len(FOUND) - 1
    assert point > 3 * len(FOUND)
