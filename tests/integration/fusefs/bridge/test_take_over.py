"""What holds when a new process goes on with a mount, whichever binding the old one served it by."""

import contextlib
import mmap
import os
import threading

import orjson
import pytest

from fusefs.bridge.process.handover import take
from fusefs.bridge.process.launch import start_daemon
from fusefs.mounts.lifecycle import start, umount
from fusefs.stores.local.store import LocalStore
from fusefs.tools.fsck import verify
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import StateError
from tests.support.fusefs.bridge import example
from tests.support.fusefs.bridge.places import a_place, config_of
from tests.support.fusefs.model import Pair, run
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.fusefs.unprivileged import NOBODY, run_unprivileged

pytestmark = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
BRIDGES = ["pyfuse3", "device"]
NOBODY_ID = 65534


@pytest.fixture
def place():
    with a_place("take", "model") as base:
        base.chmod(0o755)
        if os.getuid() == 0:
            for folder in base.iterdir():
                os.chown(folder, NOBODY_ID, NOBODY_ID)
        yield base


@contextlib.contextmanager
def mounted(place, **settings):
    """Mount, and yield a call that puts a new process behind it; unmounts at the end.

    From the second call on it goes from our own binding to our own.
    """
    daemons = [start(config_of(place, **settings), log_path=str(place / "log"))]

    def take_over():
        new = start(config_of(place, take_over=True), log_path=str(place / "log"))
        assert daemons[-1].wait(timeout=60) == 0
        daemons.append(new)

    yield take_over
    umount(str(place / "mount"))
    assert daemons[-1].wait(timeout=60) == 0
    assert "defect" not in (place / "log").read_text()
    files = StripedFiles(LocalStore(place / "store"))
    with contextlib.closing(files):
        assert verify(files, read_data=True, grace_s=0).faults == []


def test_random_operations_are_answered_as_by_a_directory_over_several_processes(place):
    refused = 0
    with mounted(place, bridge="pyfuse3") as take_over:
        pair = Pair(place / "mount", place / "model")
        for seed in range(3):
            run(pair, 150, seed)
            if (refusal := refusal_of(take_over)) is not None:
                assert "is open and was re" in refusal  # removed, or replaced: said by name
                refused += 1
                run(pair, 50, seed + 100)
                for slot in range(4):
                    pair.do("close", slot)
                take_over()
            run(pair, 50, seed + 200)
            pair.check()
        pair.empty()
    assert refused < 3, "no file was open over a hand-over"


def refusal_of(take_over):
    try:
        take_over()
    except StateError as error:
        return str(error)
    return None


def test_a_listing_that_is_half_read_goes_on_where_it_stood(place):
    root = place / "mount"
    with mounted(place, bridge="pyfuse3") as take_over:
        (root / "many").mkdir()
        names = [f"{number:04}-{'x' * 60}" for number in range(500)]
        for name in names:
            (root / "many" / name).touch()
        with os.scandir(root / "many") as listing:
            listed = [next(listing).name for _ in range(10)]
            take_over()
            listed += [next(listing).name for _ in range(200)]
            take_over()
            listed += [entry.name for entry in listing]
    assert sorted(listed) == names


def test_the_largest_requests_of_the_connection_go_through_the_new_process(place):
    path, data = place / "mount/f", os.urandom(8 << 20)
    with mounted(place, bridge="pyfuse3") as take_over, mmap.mmap(-1, len(data)) as buffer:
        buffer.write(data)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        take_over()
        assert os.pwritev(file, [buffer], 0) == len(data)
        os.fsync(file)
        take_over()
        buffer[:] = bytes(len(data))
        assert os.preadv(file, [buffer], 0) == len(data)
        os.close(file)
        assert buffer[:] == data
        assert path.read_bytes() == data


def test_inodes_and_the_numbers_of_the_mount_are_those_of_the_session(place):
    root = place / "mount"

    def known():
        paths = [root, root / "d", root / "d/f", root / ".omnifs/stats.json"]
        return [path.stat().st_ino for path in paths]

    with mounted(place, bridge="pyfuse3") as take_over:
        (root / "d").mkdir()
        (root / "d/f").write_bytes(b"content")
        before = known()
        with (root / "d/f").open("rb") as file, (root / ".omnifs/stats.json").open("rb") as stats:
            take_over()
            assert known() == before
            assert os.fstat(file.fileno()).st_ino == before[2]
            assert orjson.loads(stats.read())["version"] == 1
            take_over()
            assert known() == before
        assert orjson.loads((root / ".omnifs/stats.json").read_bytes())["version"] == 1


@contextlib.contextmanager
def example_shown(place, bridge):
    os.mkfifo(place / "pipe")
    told = orjson.dumps({"mountpoint": str(place / "mount"), "bridge": bridge})
    daemon = start_daemon("tests.support.fusefs.bridge.example", told, str(place / "mount"))
    yield place / "mount"
    umount(str(place / "mount"))
    assert daemon.wait(timeout=60) == 0


@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_request_under_way_is_answered_before_and_one_refusal_changes_nothing(
    place, bridge, monkeypatch
):
    monkeypatch.setenv("EXAMPLE_PIPE", str(place / "pipe"))
    said = []

    def ask(root):
        with pytest.raises(StateError, match="Threaded cannot be handed over") as caught:
            take(os.path.realpath(root))
        said.append(str(caught.value))

    with example_shown(place, bridge) as root:
        for turn in range(1, 3):
            reader = Reading(root / "slow")
            reader.start()
            # Opens when the daemon's worker waits at the other end, so the read is under way.
            with (place / "pipe").open("wb") as pipe:
                asking = threading.Thread(target=ask, args=(root,), daemon=True)
                asking.start()
                pipe.write(b"1")
            reader.join(timeout=60)
            asking.join(timeout=60)
            assert reader.found == bytes(4096)
            assert len(said) == turn
            assert (root / "folder/file").read_bytes() == example.BLOB


class Reading(threading.Thread):
    """Reads once, past the page cache: one request."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self._path = path
        self.found = None

    def run(self):
        file = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as buffer:
            buffer.write(b"x" * 4096)
            if os.preadv(file, [buffer], 0) == 4096:
                self.found = buffer[:]
        os.close(file)


UNPRIVILEGED = """
import os, subprocess, sys
from pathlib import Path
from fusefs.bridge.process.unmount_notice import UnmountClient

base = Path(sys.argv[1])
root, data = base / "mount", os.urandom(3 << 20)
OMNILOAD = [sys.executable, "-c", "from omniload.base.cli import main; main()", "fs"]

def omniload(*words, code=0):
    done = subprocess.run([*OMNILOAD, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == code, (words, done)
    return done.stderr

def bridge():
    while (waiter := UnmountClient.of(str(root))) is None:
        pass  # it claims the name in a while
    waiter.close()
    return waiter.about["bridge"]

omniload("mount", base / "store", root)
assert bridge() == "pyfuse3"
(root / "f").write_bytes(data)
reads = (root / "f").open("rb", buffering=0)
appends = (root / "log").open("ab", buffering=0)
edits = (root / "db").open("w+b", buffering=0)
assert reads.read(1 << 20) == data[:1 << 20]
appends.write(b"one ")
edits.write(b"0123456789")
for turn in (b"two ", b"three "):
    omniload("mount", "--take-over", base / "store", root)
    assert bridge() == "device"
    appends.write(turn)
    assert os.pwrite(edits.fileno(), turn[:2], 4) == 2
    assert os.pread(edits.fileno(), 10, 0) == b"0123" + turn[:2] + b"6789"
assert reads.read() == data[1 << 20:]
os.unlink(root / "db")
refusal = omniload("mount", "--take-over", base / "store", root, code=4)
assert "'db' is open and was removed" in refusal, refusal
assert os.pread(edits.fileno(), 10, 0) == b"0123th6789"
print("up", flush=True)
sys.stdin.readline()
for file in (reads, appends, edits):
    file.close()
waiter = UnmountClient.of(str(root))
subprocess.run(["fusermount3", "-u", root], check=True)
assert list(waiter.wait(60, lambda _: None)) == []
print("down", flush=True)
"""


def test_a_user_without_rights_takes_mounts_over_and_unmounts_and_nobody_else_takes_them(place):
    def nobody_else():
        if NOBODY:  # we are somebody else, and root at that
            with pytest.raises(StateError, match="cannot be taken over"):
                take(os.path.realpath(place / "mount"))

    run_unprivileged(UNPRIVILEGED, place, nobody_else)
