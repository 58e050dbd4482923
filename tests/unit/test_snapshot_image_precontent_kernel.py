"""Questions of the kernel read from bytes, answers written as bytes, and the guard's part of both."""

import errno
import fcntl
import os
import signal
import struct
from contextlib import suppress

import pytest

from omniload.base.errors import StateError
from snapshot.image import precontent_guard, precontent_kernel
from snapshot.image.precontent_kernel import PreContent, answer, is_unused, open_erofs, unmount

HEAD = struct.Struct("=IBBHQii")
ALLOW, DENY_EIO = 1, 2 | 5 << 24


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        with suppress(OSError):  # a test may have closed it
            os.close(descriptor)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    return path


def an_event(descriptor, *infos):
    body = b"".join(infos)
    return HEAD.pack(24 + len(body), 3, 0, 24, 0x100000, descriptor, 77) + body


def a_range(offset, count):
    return struct.pack("=BBHIQQ", 6, 0, 24, 0, offset, count)


def another_info(size=12):
    return struct.pack("=BBH", 1, 0, size) + bytes(size - 4)


def a_group(descriptor):
    group = object.__new__(PreContent)
    group.descriptor = descriptor
    return group


def test_a_question_names_the_file_and_the_range(pipe, file):
    reading, writing = pipe
    asked = os.open(file, os.O_RDONLY)
    os.write(writing, an_event(asked, a_range(8192, 4096)))

    (access,) = a_group(reading).accesses()

    found = file.stat()
    assert access.descriptor == asked
    assert access.file == (found.st_dev, found.st_ino)
    assert (access.offset, access.size_bytes) == (8192, 4096)
    os.close(asked)


def test_several_questions_are_read_at_once_and_other_words_passed_over(pipe, file):
    reading, writing = pipe
    asked = os.open(file, os.O_RDONLY)
    os.write(
        writing,
        an_event(asked, another_info(), a_range(1, 2)) + an_event(asked, a_range(3, 4)),
    )

    found = list(a_group(reading).accesses())

    assert [(access.offset, access.size_bytes) for access in found] == [(1, 2), (3, 4)]
    os.close(asked)


def test_a_question_without_a_range_means_the_whole_file(pipe, file):
    reading, writing = pipe
    asked = os.open(file, os.O_RDONLY)
    os.write(writing, an_event(asked))

    (access,) = a_group(reading).accesses()

    assert access.offset == 0
    assert access.size_bytes > 1 << 60
    os.close(asked)


def test_a_question_whose_file_could_not_be_opened_is_not_ours_to_answer(pipe, file):
    reading, writing = pipe
    asked = os.open(file, os.O_RDONLY)
    os.write(writing, an_event(-24, a_range(0, 1)) + an_event(asked, a_range(5, 1)))

    assert [access.offset for access in a_group(reading).accesses()] == [5]
    os.close(asked)


@pytest.mark.parametrize(("allow", "verdict"), [(True, ALLOW), (False, DENY_EIO)])
def test_an_answer_is_a_name_and_a_verdict(pipe, allow, verdict):
    reading, writing = pipe

    assert answer(writing, 9, allow=allow)

    assert struct.unpack("=iI", os.read(reading, 100)) == (9, verdict)


def test_an_answer_to_nobody_is_told(monkeypatch):
    def nobody(*_):
        raise OSError(errno.ENOENT, "no such event")

    monkeypatch.setattr(precontent_kernel.os, "write", nobody)

    assert not answer(5, 9, allow=True)


def test_an_answer_that_cannot_be_given_is_an_error(pipe):
    reading, _ = pipe

    with pytest.raises(OSError, match="Bad file descriptor"):
        answer(reading, 9, allow=True)


def test_a_file_is_in_use_while_somebody_else_has_it_open(file):
    own = os.open(file, os.O_RDWR)
    assert is_unused(own)
    with file.open("rb"):
        assert not is_unused(own)
    assert is_unused(own)
    assert fcntl.fcntl(own, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(own)


def test_what_cannot_be_asked_about_is_an_error(pipe):
    reading, _ = pipe

    with pytest.raises(OSError, match="Invalid argument"):
        is_unused(reading)


def test_what_is_no_mount_cannot_be_unmounted(tmp_path):
    with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
        unmount(str(tmp_path), lazily=False)


def test_a_file_that_is_no_image_is_refused(file):
    with pytest.raises(StateError, match=r"cannot be mounted as EROFS: .+; mount the"):
        open_erofs(str(file), (), trusted=False)


def test_the_guard_denies_what_waits_and_closes_what_it_was_given(monkeypatch, file):
    asked = os.open(file, os.O_RDONLY)
    said = []
    monkeypatch.setattr(
        precontent_guard.os,
        "read",
        lambda *_: an_event(-24, a_range(0, 1)) + an_event(asked, a_range(0, 1)),
    )
    monkeypatch.setattr(precontent_guard.os, "write", lambda _, data: said.append(data))

    precontent_guard._deny_waiting(3)

    assert said == [struct.pack("=iI", asked, DENY_EIO)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(asked)


def test_the_guard_minds_no_event_that_is_gone(monkeypatch):
    def nobody(*_):
        raise OSError(errno.ENOENT, "no such event")

    monkeypatch.setattr(precontent_guard.os, "write", nobody)

    precontent_guard._deny(3, 9)


def test_the_guard_does_not_pass_over_any_other_error(monkeypatch):
    def broken(*_):
        raise OSError(errno.EBADF, "gone")

    monkeypatch.setattr(precontent_guard.os, "write", broken)

    with pytest.raises(OSError, match="gone"):
        precontent_guard._deny(3, 9)


def test_the_guard_waits_for_nothing_where_no_read_waits(pipe):
    reading, writing = pipe
    os.set_blocking(reading, False)

    precontent_guard._deny_waiting(reading)

    os.write(writing, b"")


def test_the_guard_goes_when_it_is_told_and_denies_nothing(monkeypatch, pipe):
    reading, writing = pipe
    said = []
    monkeypatch.setattr(precontent_guard.sys, "argv", ["guard", "99", str(reading)])
    monkeypatch.setattr(precontent_guard.signal, "signal", lambda *_: None)
    monkeypatch.setattr(precontent_guard, "_deny", lambda *told: said.append(told))
    os.write(writing, b".")

    precontent_guard.main()

    assert said == []


def test_the_guard_denies_every_number_and_goes_when_no_blob_is_open(monkeypatch, pipe, file):
    reading, writing = pipe
    group, _ = os.pipe()
    denied = []
    unused, whole = os.open(file, os.O_RDWR), os.open(file, os.O_RDWR | os.O_CREAT)
    other = file.with_name("whole")
    other.write_bytes(b"y")
    os.dup2(held := os.open(other, os.O_RDWR), whole)
    other.chmod(0o400)
    words = ["guard", str(group), str(reading), str(unused), str(whole)]
    monkeypatch.setattr(precontent_guard.sys, "argv", words)
    monkeypatch.setattr(precontent_guard.signal, "signal", lambda *_: None)
    monkeypatch.setattr(precontent_guard, "_deny", lambda _, number: denied.append(number))
    os.close(writing)

    precontent_guard.main()

    assert denied == list(range(1 << 16))
    for descriptor in (group, _, unused, whole, held):
        os.close(descriptor)


def test_the_guard_stays_for_a_blob_that_is_in_use_though_its_name_is_gone(monkeypatch, pipe, file):
    reading, writing = pipe
    group, _ = os.pipe()
    blob, reader = os.open(file, os.O_RDWR), os.open(file, os.O_RDONLY)
    file.unlink()
    looks = []

    def wait(*_):
        looks.append(1)
        if len(looks) == 3:
            os.close(reader)

    monkeypatch.setattr(precontent_guard.sys, "argv", ["guard", *map(str, (group, reading, blob))])
    monkeypatch.setattr(precontent_guard.signal, "signal", lambda *_: None)
    monkeypatch.setattr(precontent_guard, "_deny", lambda *_: None)
    monkeypatch.setattr(precontent_guard.select, "select", wait)
    os.close(writing)

    precontent_guard.main()

    assert len(looks) == 3
    for descriptor in (group, _, blob):
        os.close(descriptor)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_the_guard_does_not_leave_because_one_read_could_not_be_told(monkeypatch, code):
    def scarce(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(precontent_guard.os, "read", scarce)

    precontent_guard._deny_waiting(3)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_a_descriptor_to_spare_goes_on_answering(pipe, monkeypatch, caplog, code):
    def scarce(*_):
        raise OSError(code, os.strerror(code))

    group = a_group(pipe[0])
    with monkeypatch.context() as short:
        short.setattr(precontent_kernel.os, "read", scarce)
        assert list(group.accesses()) == []

    assert "raise the limit of open files" in caplog.text


@pytest.mark.parametrize("looks", [is_unused, precontent_guard._is_unused])
def test_who_opens_a_file_while_it_is_looked_at_kills_nobody(file, looks, monkeypatch):
    own, told = os.open(file, os.O_RDWR), []
    ask = fcntl.fcntl

    def opened_before_the_lease_ends(descriptor, command, word):
        if (command, word) == (fcntl.F_SETLEASE, fcntl.F_UNLCK):
            with pytest.raises(BlockingIOError):
                os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        return ask(descriptor, command, word)

    monkeypatch.setattr(fcntl, "fcntl", opened_before_the_lease_ends)
    before = signal.signal(signal.SIGIO, lambda *_: told.append("SIGIO, which kills"))
    try:
        assert looks(own)
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(own)

    assert told == []
