"""Files that another mount replaces while they are read: an open shows one version whole, or ESTALE."""

import errno
import json
import os
import shutil

import pytest

from fusefs.mounts.lifecycle import mount
from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.fusefs.versions import race_over_mounts, wrong_in

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
STRIPED = {"striping": {"unit": "8KiB", "count": 2}, "plain_limit": "4KiB"}
READS = (200, pytest.param(3000, marks=pytest.mark.soak))


LEFT_TO_SOAKS = {("pyfuse3", "striped"), ("pyfuse3", "copied")}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (bridge, kind), marks=[pytest.mark.soak] if (bridge, kind) in LEFT_TO_SOAKS else []
        )
        for bridge in ("device", "pyfuse3")
        for kind in ("plain", "striped", "copied")
    ],
    ids="-".join,
)
def mounts(request):
    """Three mounts of one store; ``copied``: they keep copies on the disk, and pass them through where they can."""
    base = fast_directory("fusefs-versions-")
    bridge, kind = request.param
    files = {} if kind == "plain" else dict(STRIPED)
    (base / "store").mkdir()
    shown = []
    try:
        for name in ("first", "second", "third"):
            (base / name).mkdir()
            settings = {"bridge": bridge, "files": files}
            if kind == "copied":
                disk = {"directory": str(base / f"{name}.disk"), "capacity": "64MiB"}
                settings |= {"files": {**files, "disk_cache": disk}, "passthrough": True}
            shown.append(mount(str(base / "store"), base / name, settings))
        with shown[0] as first, shown[1] as second, shown[2] as third:
            yield first, second, third
    finally:
        shutil.rmtree(base)


def test_the_rest_of_an_open_file_is_of_the_version_it_began_with(mounts):
    here, there, _ = mounts
    (there / "f").write_bytes(b"a" * 30_000)
    with (here / "f").open("rb", buffering=0) as old:
        found = old.read(4096)
        (there / "new").write_bytes(b"b" * 20_000)
        (there / "new").rename(there / "f")
        with (here / "f").open("rb") as newer:
            assert newer.read() == b"b" * 20_000
            assert os.fstat(newer.fileno()).st_ino != os.fstat(old.fileno()).st_ino

        try:
            while more := old.read(4096):
                found += more
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            assert set(found) == {ord("a")}
        else:
            assert found == b"a" * 30_000
        assert os.fstat(old.fileno()).st_size == 30_000


def test_the_close_of_a_reader_bears_no_error_of_a_writer(mounts):
    here, there, _ = mounts
    (there / "g").write_bytes(b"a" * 30_000)
    writer = os.open(here / "g", os.O_RDWR)
    try:
        with (here / "g").open("rb", buffering=0):
            builds_on_it = json.loads(os.getxattr(here / "g", "user.omnifs.layout"))["stored"]
            os.pwrite(writer, b"b", 10_000)
            (there / "newer").write_bytes(b"c" * 20_000)
            (there / "newer").rename(there / "g")
    finally:
        answers = []
        for close in (lambda: os.close(os.dup(writer)), lambda: os.close(writer)):
            try:
                close()
            except OSError as error:
                answers.append(error.errno)

    assert answers == ([errno.ESTALE] * 2 if builds_on_it == "manifest" else [])


@pytest.mark.parametrize("reads", READS)
def test_no_read_of_many_is_of_two_versions(mounts, reads):
    found = race_over_mounts(mounts, reads=reads, readers=2, rest_s=0.002, within_s=50)

    assert wrong_in(found) == {}
    assert found["whole"] > reads // 4
    assert found["versions"] > 3
