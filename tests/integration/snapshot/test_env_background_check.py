"""The check in the background: started once, for what is due; it finds rot, and nobody waits for it."""

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from snapshot.env.format.entries import Kind
from snapshot.env.node import background_check
from snapshot.env.node.background_check import (
    LOCK,
    LOG,
    OFF_VARIABLE,
    compare,
    recheck,
    recheck_later,
)
from snapshot.env.node.last_check import is_due, note_check
from snapshot.env.node.locks import exclusively
from tests.support.snapshot.env_builders import a_restorer, contents, remake, saved


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A restorer whose tree was last checked long ago, its key, and what the environment holds."""
    monkeypatch.delenv(OFF_VARIABLE, raising=False)
    environment, manifest, held = saved(tmp_path)
    restorer, key = a_restorer(environment, tmp_path), manifest.head.key
    restorer.restore(key, "link")
    note_check(restorer.cache.folder / "trees" / key, 0)
    return restorer, key, held


def rot(restorer, key):
    """Change a byte as a disk does: size and time stay."""
    tree = restorer.cache.tree(key)
    entry = next(e for e in tree.manifest.entries if e.kind is Kind.FILE and e.size_bytes)
    path = tree.layer(entry.target) / entry.path
    seen, data = path.stat(), bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def ours(cache):
    """Return the processes that print into the log of a node cache.

    A descriptor stays through fork and exec; a command line is empty for a moment.
    """
    log, found = cache.folder.absolute() / LOG, []
    for each in psutil.process_iter():
        with suppress(OSError):
            if Path(f"/proc/{each.pid}/fd/1").readlink() == log:
                found.append(each)
    return found


def ended(cache):
    """Wait until no process works for a node cache; a day's check of a few files is over at once."""
    found = ours(cache)
    for process in found:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            # What works when nobody else does would wait for the tests beside this one.
            os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))
            process.nice(0)
    _, alive = psutil.wait_procs(found, timeout=120)
    assert alive == []
    assert ours(cache) == []


def test_a_sound_tree_is_checked_and_the_next_restore_starts_nothing(place):
    restorer, key, _ = place

    assert recheck_later(restorer.cache, key)
    ended(restorer.cache)

    assert f"{key} is sound" in (restorer.cache.folder / LOG).read_text()
    assert not recheck_later(restorer.cache, key)


def test_a_tree_that_rotted_is_removed_and_fetched_again(place, tmp_path):
    restorer, key, held = place
    rot(restorer, key)

    assert recheck_later(restorer.cache, key)
    ended(restorer.cache)

    assert restorer.cache.tree(key) is None
    assert "1 damaged" in (restorer.cache.folder / LOG).read_text()
    remake(restorer.environment, tmp_path)
    restorer.restore(key, "link")
    assert contents(restorer.environment) == held
    assert not recheck_later(restorer.cache, key)


def test_two_restores_at_once_have_one_check(place):
    restorer, key, _ = place
    both = threading.Barrier(2)

    def start():
        both.wait(60)
        recheck_later(restorer.cache, key)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ended(restorer.cache)

    assert (restorer.cache.folder / LOG).read_text().count("is sound") == 1


def test_the_process_is_of_nobody_idle_and_holds_nothing_of_the_job(place):
    restorer, key, _ = place
    manifest = restorer.cache.folder / "trees" / key / "manifest"
    children = psutil.Process().children()
    # The process waits at its first lock until it was looked at.
    read, write = os.pipe()
    os.set_inheritable(write, True)
    with exclusively(restorer.cache.lock(key)):
        manifest.write_bytes(b"damaged")  # so that it comes to the lock of the tree
        assert recheck_later(restorer.cache, key)
        os.close(write)
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK)
        while not (found := ours(restorer.cache)):
            pass  # between fork and exec a process has no command; it ends only with the lock
        end_of_file = os.read(read, 1)  # raises where the process holds the other end
        for process in found:
            assert process.nice() == 19
            assert os.getpid() not in [above.pid for above in process.parents()]
            assert os.getsid(process.pid) != os.getsid(0)
            assert process.cwd() == "/"
            assert Path(f"/proc/{process.pid}/fd/1").resolve() == restorer.cache.folder / LOG
    os.close(read)
    ended(restorer.cache)

    assert found
    assert end_of_file == b""
    assert set(psutil.Process().children()) <= set(children)


@pytest.mark.parametrize("reason", ["variable", "young", "held", "gone", "first process"])
def test_nothing_is_started(place, monkeypatch, reason):
    restorer, key, _ = place
    folder = restorer.cache.folder / "trees" / key
    monkeypatch.setattr(background_check, "_start", lambda *_: pytest.fail("started"))
    if reason == "variable":
        monkeypatch.setenv(OFF_VARIABLE, "1")
    elif reason == "young":
        note_check(folder, background_check.time.time())
    elif reason == "gone":
        restorer.cache.drop(key)
    elif reason == "first process":
        monkeypatch.setattr(background_check.os, "getpid", lambda: 1)
    if reason == "held":
        with exclusively(restorer.cache.lock(LOCK)):
            assert not recheck_later(restorer.cache, key)
            assert recheck(restorer.cache, key) is None
        return

    assert not recheck_later(restorer.cache, key)


def test_a_process_that_cannot_be_started_costs_a_warning(place, monkeypatch, caplog):
    restorer, key, _ = place
    monkeypatch.setattr(background_check.sys, "executable", "/nowhere/python")

    assert not recheck_later(restorer.cache, key)
    assert "is not checked in the background" in caplog.text
    assert is_due(restorer.cache.folder / "trees" / key, background_check.time.time())


def test_files_are_read_no_faster_than_the_rate(tmp_path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "f").write_bytes(bytes(1000))
    digest = "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53"
    slept = []

    assert compare(tmp_path, [("f", digest)] * 3, rate=100, clock=lambda: 0, sleep=slept.append)
    assert slept == [10, 20, 30]
    assert not compare(tmp_path, [("f", "0" * 64)])
