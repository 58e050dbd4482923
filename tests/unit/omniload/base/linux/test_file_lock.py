"""Locks of files and folders: which may be held together, and which files remain."""

import errno
import fcntl
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError
from omniload.base.linux.file_lock import FileLock, is_held_here, is_locked, locked


@pytest.mark.parametrize(("shared", "is_free"), [(True, True), (False, False)])
def test_those_that_share_are_let_in_beside_each_other(tmp_path, shared, is_free):
    with locked(tmp_path / "lock", shared=True):
        if is_free:
            with locked(tmp_path / "lock", shared=shared, waits=False):
                pass
        else:
            with pytest.raises(BlockingIOError), locked(tmp_path / "lock", waits=False):
                pass


def test_a_folder_is_held_alone_and_free_again_after_an_error(tmp_path):
    def fail():
        with locked(tmp_path):
            with pytest.raises(BlockingIOError), locked(tmp_path, shared=True, waits=False):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    with locked(tmp_path, waits=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_free_again_though_a_process_that_was_forked_still_has_it_open(tmp_path):
    with locked(tmp_path / "lock") as file:
        kept = os.dup(file)  # as a fork does

    with locked(tmp_path / "lock", waits=False):
        pass
    os.close(kept)


def test_a_holder_may_write_where_it_asked_for_that(tmp_path):
    with locked(tmp_path / "lock", writable=True) as file:
        os.pwrite(file, b"12", 0)

    with locked(tmp_path / "lock") as file, pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file, b"3", 0)
    assert (tmp_path / "lock").read_bytes() == b"12"


def test_a_file_is_held_by_one_who_is_named_until_he_lets_go(tmp_path):
    held = FileLock(tmp_path / "lock")
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "):
        FileLock(tmp_path / "lock")

    held.close()

    FileLock(tmp_path / "lock").close()


def test_a_file_is_free_once_its_holder_is_killed_though_one_that_it_forked_lives(tmp_path):
    until_closed, lives = os.pipe()
    is_there, says = os.pipe()
    if (holder := os.fork()) == 0:
        FileLock(tmp_path / "lock")
        if os.fork() == 0:
            os.close(lives)
            os.write(says, b".")
            os.read(until_closed, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(is_there, 1)
    os.waitpid(holder, 0)

    try:
        assert not is_locked(tmp_path / "lock")
    finally:
        for end in (until_closed, lives, is_there, says):
            os.close(end)


def test_one_that_was_forked_neither_holds_a_file_nor_lets_go_of_it(tmp_path):
    held = FileLock(tmp_path / "lock")
    if (forked := os.fork()) == 0:
        held.close()
        os._exit(0)
    os.waitpid(forked, 0)

    assert is_locked(tmp_path / "lock")
    held.close()
    assert not is_locked(tmp_path / "lock")


def test_a_process_knows_the_locks_that_it_holds_itself(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    other.touch()
    held = FileLock(mine)

    assert (is_held_here(mine), is_held_here(other)) == (True, False)
    held.close()
    assert not is_held_here(mine)


@pytest.mark.parametrize("hold", [locked, lambda path: closing(FileLock(path))])
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_as_that_and_nothing_stays_open(
    tmp_path, monkeypatch, hold, code
):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"/lock cannot be locked \(.*its file system gives no locks; mount it with them"
    with pytest.raises(ConfigError, match=said), hold(tmp_path / "lock"):
        pass
    opened = {each.resolve() for each in Path("/proc/self/fd").iterdir()}
    assert tmp_path / "lock" not in opened
