"""Any file system over both bindings to the kernel: what the protocol can express arrives."""
# ruff: noqa: PTH115, PTH208, PTH211 -- the calls of the operating system are what is tested

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest

from fusefs.bridge.device.wire import STRUCTS
from fusefs.bridge.process.launch import start_daemon
from fusefs.mounts.lifecycle import umount
from omniload.base.errors import ConfigError
from tests.support.fusefs.bridge import example
from tests.support.fusefs.model import fast_directory
from tests.support.programs import finished

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
BRIDGES = ["pyfuse3", "device"]


@contextlib.contextmanager
def shown(place, **settings):
    place.mkdir(exist_ok=True)
    told = orjson.dumps({"mountpoint": str(place), **settings})
    daemon = start_daemon("tests.support.fusefs.bridge.example", told, str(place))
    try:
        yield place
    finally:
        umount(str(place))
        assert daemon.wait(timeout=60) == 0


@pytest.fixture(scope="module", params=BRIDGES)
def root(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("bridge")
    os.mkfifo(base / "pipe")
    os.environ["EXAMPLE_PIPE"] = str(base / "pipe")
    with shown(base / "m", bridge=request.param, trusted=os.getuid() == 0) as place:
        yield place
    del os.environ["EXAMPLE_PIPE"]


def counts(root):
    return orjson.loads((root / "counts").read_bytes())


def test_attributes_arrive_whole(root):
    found = (root / "folder/file").stat()

    assert stat.S_IMODE(found.st_mode) == 0o4755
    assert (found.st_ino, found.st_nlink, found.st_uid, found.st_gid) == (
        example.FILE,
        2,
        1000,
        100,
    )
    assert (found.st_size, found.st_blocks) == (len(example.BLOB), len(example.BLOB) // 512)
    assert (found.st_mtime_ns, found.st_atime_ns, found.st_ctime_ns) == (example.MTIME_NS, 5, 7)


def test_a_device_node_keeps_its_number(root):
    found = (root / "folder/null").stat()

    assert stat.S_ISCHR(found.st_mode)
    assert found.st_rdev == example.DEVICE


def test_a_directory_is_listed_once_each_over_many_requests(root):
    assert sorted(os.listdir(root / "folder")) == sorted(
        map(os.fsdecode, example.FOLDERS[example.FOLDER])
    )
    with os.scandir(root) as entries:
        assert {e.name: e.is_dir(follow_symlinks=False) for e in entries}["folder"]


def test_what_never_changes_is_read_from_the_page_cache_when_it_is_opened_again(root):
    (root / "folder/file").read_bytes()
    before = counts(root)["read"]

    assert (root / "folder/file").read_bytes() == example.BLOB

    assert counts(root)["read"] <= before + 2  # of the counts themselves


def test_links_and_attributes_are_read(root):
    assert os.readlink(root / "link") == "folder/file"
    assert os.getxattr(root / "folder/file", "user.note") == b"value"
    assert set(os.listxattr(root / "folder/file")) >= {"user.note"}
    with pytest.raises(OSError, match="No data") as caught:
        os.getxattr(root / "folder/file", "user.none")
    assert caught.value.errno == errno.ENODATA


def test_space_is_told(root):
    found = os.statvfs(root)

    assert (found.f_blocks, found.f_bfree, found.f_files) == (1000, 10, 50)


def test_bytes_are_read_whole_and_anywhere(root):
    blob = example.BLOB
    assert (root / "folder/file").read_bytes() == blob
    with (root / "folder/file").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 5000, 123_457) == blob[123_457:128_457]
        assert os.pread(file.fileno(), 5000, len(blob) - 10) == blob[-10:]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as huge_page_buffer:
            assert huge_page_buffer[1 << 20 : (1 << 20) + 99] == blob[1 << 20 : (1 << 20) + 99]


def test_the_kernel_remembers_a_name_that_is_not_there_for_as_long_as_it_was_told(root):
    for _ in range(3):
        assert not (root / "folder" / "nothing").exists()
    before = counts(root)["lookup"]
    for _ in range(10):
        assert not (root / "folder" / "nothing").exists()

    assert counts(root)["lookup"] == before


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "new").write_bytes(b""),
        lambda root: (root / "new").mkdir(),
        lambda root: (root / "folder/file").unlink(),
        lambda root: (root / "folder/file").rename(root / "other"),
        lambda root: (root / "folder/file").chmod(0o600),
        lambda root: os.symlink("x", root / "new"),
        lambda root: os.link(root / "folder/file", root / "new"),
        lambda root: os.setxattr(root / "folder/file", "user.x", b"1"),
    ],
)
def test_a_file_system_without_changes_refuses_them_as_read_only(root, change):
    with pytest.raises(OSError, match="Read-only") as caught:
        change(root)

    assert caught.value.errno == errno.EROFS


def test_a_read_that_waits_does_not_hold_up_others_and_a_defect_is_an_errno(root):
    found = []

    def read_slowly():
        with (root / "slow").open("rb", buffering=0) as file:
            found.append(os.preadv(file.fileno(), [bytearray(10)], 0))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    with open(os.environ["EXAMPLE_PIPE"], "wb") as pipe:  # noqa: PTH123 -- opens when the read waits
        assert (root / "folder/file").read_bytes()[:4] == example.BLOB[:4]
        pipe.write(b"1" * 100)
    reader.join(timeout=60)

    assert found == [10]
    file = os.open(root / "slow", os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(OSError, match="Invalid"):
        os.preadv(file, [mmap.mmap(-1, 4096)], 1 << 19)
    os.close(file)


def test_a_mount_point_that_is_a_file_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigError, match="is a file"):
        start_daemon("tests.support.fusefs.bridge.example", b"", str(tmp_path / "file"))


def test_passed_through_reads_never_reach_the_daemon(tmp_path):
    if os.getuid() != 0:
        pytest.skip("PASSTHROUGH NOT TESTED: needs root")
    with shown(tmp_path / "m", bridge="device", passed_through=True) as root:
        first = (root / "folder/file").open("rb", buffering=0)
        second = (root / "folder/again").open("rb", buffering=0)
        with first, second:
            assert first.read(len(example.BLOB)) == example.BLOB
            assert os.pread(second.fileno(), 1000, 1 << 20) == example.BLOB[1 << 20 :][:1000]
            with mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ) as huge_page_buffer:
                assert huge_page_buffer[-5:] == example.BLOB[-5:]
            if counts(root)["read"] > 10:
                pytest.skip("PASSTHROUGH NOT TESTED: the kernel has none")
        before = counts(root)
        for _ in range(3):
            assert (root / "folder/file").read_bytes() == example.BLOB

        after = counts(root)
    assert after["open"] == before["open"] + 4
    assert after["read"] <= before["read"] + 2  # of the counts themselves


AS_A_USER = """
import os, signal, sys, threading
from fusefs.bridge import server
from fusefs.bridge.api.blocking import Threaded
from fusefs.bridge.api.options import BridgeOptions
from tests.support.fusefs.bridge.example import Example

if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
shown = Threaded(Example())
server.serve(shown, sys.argv[1], BridgeOptions(bridge="device"), ready=lambda: print("ready", flush=True))
shown.close()
"""


def test_a_user_without_rights_mounts_through_fusermount3():
    base = fast_directory("fusefs-user-")
    base.chmod(0o755)
    (base / "m").mkdir()
    if os.getuid() == 0:
        os.chown(base / "m", 65534, 65534)
    daemon = subprocess.Popen(
        [sys.executable, "-c", AS_A_USER, base / "m"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout.readline() == "ready\n"
        (line,) = [
            m for m in Path("/proc/self/mountinfo").read_text().splitlines() if str(base) in m
        ]
        assert "fuse.omnifs" in line
        assert "nosuid,nodev" in line
        assert "user_id=0" not in line or (os.getuid() == 0 and "user_id=65534" in line)
    finally:
        daemon.terminate()
        daemon.stdout.close()
    assert daemon.wait(timeout=60) == 0
    assert str(base) not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(base)


ENDED_AT_THE_START = """
import os, signal, sys, threading
from fusefs.bridge import server
from fusefs.bridge.api.blocking import Threaded
from fusefs.bridge.api.options import BridgeOptions
from tests.support.fusefs.bridge.example import Example

def never_answered(_):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

os.statvfs = never_answered
shown = Threaded(Example())
server.serve(shown, sys.argv[1], BridgeOptions(bridge="pyfuse3"), ready=lambda: print("ready"))
shown.close()
"""


def test_a_signal_ends_a_mount_whose_own_first_question_is_not_answered(tmp_path):
    try:
        done = finished([sys.executable, "-c", ENDED_AT_THE_START, tmp_path], limit_s=60)
        assert not os.path.ismount(tmp_path)
    finally:
        subprocess.run(["fusermount3", "-uzq", tmp_path], check=False)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


READ_AND_BE_KILLED = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print("reads", flush=True)
os.read(file, 10)
"""


def test_a_reader_that_is_killed_while_its_read_waits_is_let_go(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("EXAMPLE_PIPE", str(tmp_path / "pipe"))
    with shown(tmp_path / "m", bridge="device") as root:
        reader = subprocess.Popen(
            [sys.executable, "-c", READ_AND_BE_KILLED, root / "slow"], stdout=subprocess.PIPE
        )
        assert reader.stdout.readline() == b"reads\n"
        # Opens when the daemon's worker waits at the other end, so the read is under way.
        with (tmp_path / "pipe").open("wb") as pipe:
            reader.kill()
            assert reader.wait(timeout=60) < 0
            assert (root / "folder/file").read_bytes() == example.BLOB
            pipe.write(b"1" * 100)
        reader.stdout.close()


def test_the_structs_have_the_sizes_of_the_kernels_header(tmp_path):
    if shutil.which("gcc") is None or not Path("/usr/include/linux/fuse.h").exists():
        pytest.skip("HEADER NOT TESTED: no gcc or linux/fuse.h")
    lines = "".join(f'printf("{name} %zu\\n", sizeof(struct {name}));' for name in STRUCTS)
    source = tmp_path / "sizes.c"
    source.write_text(f"#include <stdio.h>\n#include <linux/fuse.h>\nint main() {{ {lines} }}\n")
    subprocess.run(["gcc", "-o", tmp_path / "sizes", source], check=True)

    printed = subprocess.run(
        [tmp_path / "sizes"], check=True, capture_output=True, text=True
    ).stdout

    sizes = {name: int(size) for name, size in (line.split() for line in printed.splitlines())}
    wanted = {**STRUCTS, "fuse_dirent": STRUCTS["fuse_dirent"]}
    assert sizes == wanted
    assert ctypes.sizeof(ctypes.c_void_p) == 8
