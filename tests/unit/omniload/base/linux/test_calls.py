"""Failed kernel calls report the reason and the place."""

import errno
import os

import pytest

from omniload.base.linux import calls


def test_a_refused_call_bears_the_number_and_the_path(tmp_path):
    missing = str(tmp_path / "none")
    for call in (
        lambda: calls.umount(missing),
        lambda: calls.mount("none", missing, "tmpfs", calls.MS_RDONLY, "size=4k"),
    ):
        with pytest.raises(OSError, match=missing) as refused:
            call()
        # A user without rights is refused before the path is looked at.
        assert refused.value.errno in {errno.ENOENT, errno.EPERM}


def test_nothing_above_a_directory_and_no_link_is_opened_from_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(b"x")
    (tmp_path / "in" / "link").symlink_to("file")
    folder = os.open(tmp_path / "in", os.O_PATH | os.O_DIRECTORY)
    try:
        file = calls.openat2(folder, b"file", os.O_RDONLY)
        assert os.read(file, 9) == b"x"
        os.close(file)
        for path, number in ((b"link", errno.ELOOP), (b"../in/file", errno.EXDEV)):
            with pytest.raises(OSError, match=os.fsdecode(path)) as refused:
                calls.openat2(folder, path, os.O_RDONLY)
            assert refused.value.errno == number
    finally:
        os.close(folder)


def test_what_is_no_file_cannot_be_made_durable():
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.syncfs(-1)


def test_a_c_library_that_is_told_nothing_of_freed_memory_is_a_refused_call(monkeypatch):
    monkeypatch.setattr(calls, "_libc", object)

    with pytest.raises(OSError, match="not implemented"):
        calls.mallopt(calls.M_TRIM_THRESHOLD, 1 << 20)
