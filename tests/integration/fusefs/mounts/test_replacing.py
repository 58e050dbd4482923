"""A small file that is replaced over and over while others open it: each read is one version, whole."""

import errno
import os
import shutil
import threading
import time

import pytest

from fusefs.mounts.lifecycle import mount
from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
BRIDGES = ["pyfuse3", "device"]
READS = (100, pytest.param(3000, marks=pytest.mark.soak))
VERSIONS = 60
LONG_S = 60.0


def version(number):
    """Return bytes of which each tells how many there must be."""
    letter = number % 26
    return bytes([65 + letter]) * (1000 + 7 * letter)


@pytest.fixture(scope="module")
def place():
    base = fast_directory("fusefs-replacing-")
    for name in ("store", *BRIDGES, "other"):
        (base / name).mkdir()
    yield base
    shutil.rmtree(base)


@pytest.fixture(scope="module", params=BRIDGES)
def mounted(place, request):
    with mount(str(place / "store"), place / request.param, {"bridge": request.param}) as root:
        yield root


@pytest.fixture(scope="module")
def other(place):
    """A second mount of the same store."""
    with mount(str(place / "store"), place / "other") as root:
        yield root


def opened_again(call, *arguments):
    """Call until the name does not lead elsewhere twice while it is opened: the kernel tries no third time."""
    while True:
        try:
            return call(*arguments)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise


def replace(path, number):
    new = path.with_suffix(".new")
    new.write_bytes(version(number))
    if number % 3 == 0:
        new.chmod(0o600)
    new.replace(path)


def rewrite(path, number):
    path.write_bytes(version(number))


@pytest.mark.parametrize("reads_wanted", READS)
@pytest.mark.parametrize(
    ("writes", "change"),
    [("here", replace), ("there", replace), pytest.param("there", rewrite, marks=pytest.mark.soak)],
)
def test_a_read_is_one_version_whole_and_the_name_is_never_missing(
    mounted, other, writes, change, reads_wanted
):
    name = f"{mounted.name}-{writes}-{change.__name__}-{reads_wanted}"
    written, read = (mounted if writes == "here" else other) / name, mounted / name
    change(written, 0)
    is_over, failed = threading.Event(), []

    def write():
        number = 0
        try:
            while not (is_over.is_set() and number >= VERSIONS):
                number += 1
                opened_again(change, written, number)
        except OSError as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        # Reads on until a second version shows: a quick reader is through before the other mount looks anew.
        seen, reads, until = set(), 0, time.monotonic() + LONG_S
        while reads < reads_wanted or (len(seen) == 1 and time.monotonic() < until):
            data = opened_again(read.read_bytes)
            assert data == version(data[0] - 65)
            os.close(opened_again(os.open, read, os.O_RDONLY))
            seen.add(data)
            reads += 1
    finally:
        is_over.set()
        writer.join()

    assert failed == []
    assert len(seen) > 1, "something was replaced meanwhile"


def test_what_another_mount_removed_a_moment_ago_can_be_made_again(mounted, other):
    for number in range(3):
        here, there = (root / f"{mounted.name}-again-{number}" for root in (mounted, other))
        there.write_bytes(b"old")
        assert here.read_bytes() == b"old"
        there.unlink()

        here.write_bytes(b"newer")
        assert there.read_bytes() == b"newer"
        there.unlink()

        with here.open("ab") as file:
            file.write(b"newest")
        assert there.read_bytes() == b"newest"
