"""A file exists whole or unchanged, and no draft remains next to it."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniload.base import writing
from omniload.base.errors import ConfigError
from omniload.base.writing import free_in, open_log, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced(tmp_path, durable):
    for data in (b"one", b"two"):
        write_whole(tmp_path / "file", data, durable=durable)

        assert (tmp_path / "file").read_bytes() == data
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"one")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "file", b"two", durable=True)

    assert caught.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_is_not_there_is_told_by_the_name_that_was_given(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "gone" / "file", b"x")

    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "gone/file"), None)


@pytest.mark.parametrize("name", ["n" * 255, "xü" * 85])
def test_a_name_as_long_as_a_name_may_be_is_written(tmp_path, name, monkeypatch):
    drafts, real = [], os.open
    monkeypatch.setattr(
        writing.os, "open", lambda p, *rest: drafts.append(p.name) or real(p, *rest)
    )
    write_whole(tmp_path / name, b"x")

    assert (tmp_path / name).read_bytes() == b"x"
    assert [draft.encode().decode() for draft in drafts] == drafts  # half a character is no text


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder")])
def test_what_is_no_file_is_never_replaced(tmp_path, make, kind):
    make(tmp_path / "place")

    with pytest.raises(FileExistsError, match=kind):
        write_whole(tmp_path / "place", b"x")

    assert not (tmp_path / "place").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_log_goes_to_a_file_or_to_a_pipe_that_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "file"):
        log = open_log(str(tmp_path / name))
        os.write(log, b"x")
        os.close(log)
    assert (tmp_path / "file").read_bytes() == b"xx"

    with pytest.raises(ConfigError, match="a pipe that nobody reads; name a file"):
        open_log(str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        open_log(str(tmp_path))

    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = open_log(str(tmp_path / "pipe"))
    assert os.get_blocking(log)
    os.write(log, b"y")
    assert os.read(reader, 10) == b"y"
    os.close(log)
    os.close(reader)


def test_a_durable_file_has_its_name_synced_behind_its_bytes(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def noted(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").resolve(), (tmp_path / "file").exists()))
        real(descriptor)

    monkeypatch.setattr(writing.os, "fsync", noted)
    write_whole(tmp_path / "file", b"one", durable=True)

    assert len(synced) == 2
    assert synced[-1] == (tmp_path, True)


@pytest.mark.parametrize(("refusal", "is_told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_system_that_syncs_no_folders_is_no_fault_of_the_disk(
    tmp_path, monkeypatch, refusal, is_told
):
    real = os.fsync

    def refuses_folders(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(refusal, os.strerror(refusal))
        real(descriptor)

    monkeypatch.setattr(writing.os, "fsync", refuses_folders)
    with pytest.raises(OSError, match="Input/output") if is_told else nullcontext():
        write_whole(tmp_path / "file", b"one", durable=True)

    assert (tmp_path / "file").read_bytes() == b"one"


@pytest.mark.parametrize(
    ("files", "more", "said"),
    [
        (8, 0, "4096 bytes (4 KiB) are free there, but all 8 files that fit are there"),
        (8, 1, "4096 bytes (4 KiB) are free there"),
        (0, 0, "4096 bytes (4 KiB) are free there"),
    ],
)
def test_a_disk_that_takes_no_further_file_says_so_beside_its_free_space(
    tmp_path, monkeypatch, files, more, said
):
    room = SimpleNamespace(f_bavail=4, f_frsize=1024, f_files=files, f_favail=more)
    monkeypatch.setattr(writing.os, "statvfs", lambda _: room)

    assert free_in(tmp_path) == said
