"""The mount as programs meet it, over a local store: POSIX, two mounts at once, real applications."""
# ruff: noqa: PTH208 -- the calls of the operating system are what is tested

import errno
import mmap
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import click.testing
import orjson
import pytest

from fusefs.cli import command
from fusefs.mounts.lifecycle import MountConfig, mount, start, umount
from fusefs.mounts.options import mount_config
from omniload.base.errors import ConfigError, IntegrityError, StateError
from tests.support.fusefs.model import TINY, Pair, fast_directory, mounted_pair, run

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
DATA = os.urandom(100_000)


@pytest.fixture(scope="module")
def place():
    base = fast_directory("fusefs-mount-")
    for name in ("store", "one", "two"):
        (base / name).mkdir()
    yield base
    shutil.rmtree(base)


@pytest.fixture(scope="module", params=["pyfuse3", "device"])
def mounted(place, request):
    settings = {"files": TINY, "bridge": request.param}
    with mount(str(place / "store"), place / "one", settings) as root:
        yield root


@pytest.fixture
def root(mounted, request):
    folder = mounted / re.sub(r"\W", "-", request.node.name)[-60:]
    folder.mkdir()
    return folder


def objects(place):
    return sorted(p for p in (place / "store/.omnifs/objects").rglob("*") if p.is_file())


def test_what_is_written_is_striped_in_the_store_and_reads_back(root, place):
    (root / "f").write_bytes(DATA)

    assert (root / "f").read_bytes() == DATA
    assert (place / "store" / root.name / "f").stat().st_size != len(DATA)
    layout = orjson.loads(os.getxattr(root / "f", "user.omnifs.layout"))
    assert layout["segments"][0]["stripe_count"] == 3


def test_a_file_is_not_in_the_store_before_it_is_closed_and_whole_afterwards(root, place):
    stored = place / "store" / root.name / "f"
    with (root / "f").open("wb", buffering=0) as file:
        file.write(DATA)
        assert not stored.exists()
        assert (root / "f").stat().st_size == len(DATA)
        assert os.listdir(root) == ["f"]

    assert stored.exists()


def test_fsync_puts_what_is_written_so_far_where_another_mount_sees_it(root, place):
    with mount(str(place / "store"), place / "two", {"files": TINY}) as other:
        with (root / "f").open("wb", buffering=0) as file:
            file.write(DATA[:50_001])
            os.fsync(file.fileno())
            assert (other / root.name / "f").read_bytes() == DATA[:50_001]
            file.write(DATA[50_001:])

        os.close(os.open(other / root.name / "f", os.O_RDONLY))
        assert (other / root.name / "f").read_bytes() == DATA


def test_what_one_mount_closed_the_other_opens(root, place):
    with mount(str(place / "store"), place / "two", {"files": TINY}) as other:
        for version in (DATA, DATA[::-1], b"short", DATA[:4096]):
            (root / "f").write_bytes(version)
            assert (other / root.name / "f").read_bytes() == version
            (other / root.name / "g").write_bytes(version)
            assert (root / "g").read_bytes() == version


def test_mmap_reads_shared_and_private_and_at_random(root):
    (root / "f").write_bytes(DATA)

    with (root / "f").open("rb") as file:
        for access in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(file.fileno(), 0, flags=access, prot=mmap.PROT_READ) as huge_page_buffer:
                assert huge_page_buffer[70_000:70_010] == DATA[70_000:70_010]
                assert huge_page_buffer[:] == DATA


def test_a_renamed_temporary_replaces_its_target_and_readers_keep_the_old_one(root):
    (root / "f").write_bytes(DATA)
    with (root / "f").open("rb", buffering=0) as old:
        (root / "f.tmp").write_bytes(DATA[::-1])
        (root / "f.tmp").replace(root / "f")

        assert (root / "f").read_bytes() == DATA[::-1]
        assert os.pread(old.fileno(), 100, 50_000) == DATA[50_000:50_100]


def test_an_unlinked_file_stays_with_those_who_have_it_open(root):
    (root / "f").write_bytes(DATA)
    with (root / "f").open("r+b", buffering=0) as file:
        (root / "f").unlink()
        os.pwrite(file.fileno(), b"XY", 10)

        assert os.pread(file.fileno(), 4, 9) == DATA[9:10] + b"XY" + DATA[12:13]
        assert os.fstat(file.fileno()).st_nlink == 0
    assert os.listdir(root) == []


def test_a_directory_renamed_while_a_file_in_it_is_written_takes_the_file_along(root):
    (root / "step.tmp").mkdir()
    with (root / "step.tmp/f").open("wb", buffering=0) as file:
        file.write(DATA[:5000])
        (root / "step.tmp").rename(root / "step")
        file.write(DATA[5000:])

    assert (root / "step/f").read_bytes() == DATA
    assert os.listdir(root) == ["step"]


def test_attributes_are_kept(root):
    (root / "f").write_bytes(b"1")
    (root / "f").chmod(0o750)
    os.utime(root / "f", ns=(5, 1_234_567_891_234_567_890))
    os.setxattr(root / "f", "user.note", b"value")

    found = (root / "f").stat()
    assert (found.st_mode & 0o7777, found.st_mtime_ns) == (0o750, 1_234_567_891_234_567_890)
    assert os.listxattr(root / "f") == ["user.note"]
    assert os.getxattr(root / "f", "user.note") == b"value"
    os.removexattr(root / "f", "user.note")
    with pytest.raises(OSError, match="No data"):
        os.getxattr(root / "f", "user.note")


@pytest.mark.parametrize(
    ("what", "number"),
    [
        (lambda root: os.link(root / "f", root / "g"), errno.EPERM),
        (lambda root: os.mkfifo(root / "pipe"), errno.EPERM),
        (lambda root: os.chown(root / "f", 12345, 12345), errno.EPERM),
        (lambda root: (root / ("n" * 256)).write_bytes(b""), errno.ENAMETOOLONG),
        (lambda root: os.setxattr(root / "f", "user.big", bytes(9000)), errno.ENOSPC),
        (lambda root: os.setxattr(root / "f", "trusted.x", b"1"), errno.EOPNOTSUPP),
        (lambda root: (root.parent / ".omnifs").rmdir(), errno.EPERM),
        (lambda root: os.lseek(os.open(root / "none", os.O_RDONLY), 0, 0), errno.ENOENT),
    ],
)
def test_what_is_not_supported_says_so_with_the_right_errno(
    mounted, tmp_path_factory, what, number
):
    root = mounted / tmp_path_factory.mktemp("refused").name
    root.mkdir(exist_ok=True)
    (root / "f").write_bytes(b"1")

    with pytest.raises(OSError, match=r".") as caught:
        what(root)

    assert caught.value.errno == number


def test_a_flipped_bit_is_eio_and_the_file_beside_it_reads_on(root, place):
    before = set(objects(place))
    (root / "bad").write_bytes(DATA)
    damaged = min(set(objects(place)) - before)
    (root / "good").write_bytes(DATA)
    with damaged.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 4]))

    with pytest.raises(OSError, match="Input/output error") as caught:
        (root / "bad").read_bytes()

    assert caught.value.errno == errno.EIO
    assert (root / "good").read_bytes() == DATA


def test_the_mount_tells_its_numbers(mounted):
    numbers = orjson.loads((mounted / ".omnifs/stats.json").read_bytes())

    assert numbers["version"] == 1
    assert numbers["cache"]["used_bytes"] <= numbers["cache"]["capacity_bytes"]
    assert numbers["store_calls"]["stat"] > 0
    assert ".omnifs" not in os.listdir(mounted)


def test_space_is_that_of_the_store(mounted, place):
    assert os.statvfs(mounted).f_blocks > 0
    assert shutil.disk_usage(mounted).total == shutil.disk_usage(place / "store").total


def test_hundreds_of_files_in_a_directory_are_listed_once_each(root):
    names = [f"file-{i:04d}" for i in range(400)]
    for name in names:
        (root / name).touch()

    assert sorted(os.listdir(root)) == names


def test_sqlite_keeps_its_data_and_its_transactions(root):
    with sqlite3.connect(root / "db") as db:
        db.execute("create table t (k integer primary key, v text)")
        db.executemany("insert into t values (?, ?)", [(i, "v" * i) for i in range(200)])
    db.close()
    again = sqlite3.connect(root / "db")
    with pytest.raises(sqlite3.IntegrityError), again:
        again.execute("insert into t values (1, 'twice')")

    assert again.execute("select sum(length(v)) from t").fetchone() == (sum(range(200)),)
    assert again.execute("pragma integrity_check").fetchone() == ("ok",)
    again.close()


def test_tar_and_git_find_what_they_put_there(root):
    (root / "in").mkdir()
    for i in range(20):
        (root / "in" / f"f{i}").write_bytes(DATA[: i * 997])
    with tarfile.open(root / "a.tar", "w") as tar:
        tar.add(root / "in", "in")
    (root / "out").mkdir()
    with tarfile.open(root / "a.tar") as tar:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
        tar.extractall(root / "out", **safely)
    assert (root / "out/in/f19").read_bytes() == DATA[: 19 * 997]

    who = ["-c", "user.name=n", "-c", "user.email=e"]
    git = ["git", "-C", root / "in", *who]
    subprocess.run([*git, "init", "-q", "."], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "all"], check=True)
    subprocess.run(["git", "clone", "-q", root / "in", root / "clone"], check=True)
    assert (root / "clone/f19").read_bytes() == DATA[: 19 * 997]
    assert subprocess.run([*git, "fsck"], check=True, capture_output=True).returncode == 0


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_random_operations_answer_as_a_plain_directory_does(bridge):
    with mounted_pair({"bridge": bridge}) as pair:
        run(pair, 1000, seed=11)
        pair.check()


def test_a_read_only_mount_refuses_changes(place):
    (place / "store/plain.txt").write_bytes(b"as it was")

    with mount(str(place / "store"), place / "two", {"read_only": True}) as other:
        assert (other / "plain.txt").read_bytes() == b"as it was"
        with pytest.raises(OSError, match="Read-only"):
            (other / "new").write_bytes(b"1")


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_cleanly(place, number, bridge):
    config = MountConfig(store=str(place / "store"), mountpoint=str(place / "two"), bridge=bridge)
    process = start(config, log_path=os.devnull)
    assert os.path.ismount(place / "two")

    process.send_signal(number)

    assert process.wait(timeout=60) == 0
    assert not os.path.ismount(place / "two")


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_umount_ends_the_daemon(place, bridge):
    config = MountConfig(store=str(place / "store"), mountpoint=str(place / "two"), bridge=bridge)
    process = start(config, log_path=os.devnull)

    umount(str(place / "two"))

    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_a_mount_whose_daemon_was_killed_is_replaced_by_the_next(place, bridge):
    config = MountConfig(store=str(place / "store"), mountpoint=str(place / "two"), bridge=bridge)
    process = start(config, log_path=os.devnull)
    process.kill()
    process.wait()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(place / "two")

    with mount(str(place / "store"), place / "two") as other:
        assert other.is_dir()
    assert os.listdir(place / "two") == []


def test_a_store_that_is_not_there_is_said_before_anything_is_mounted(place):
    with (
        pytest.raises(ConfigError, match="not a directory"),
        mount(str(place / "none"), place / "two"),
    ):
        pass
    assert not os.path.ismount(place / "two")


def test_a_mount_point_that_is_not_there_is_said(place):
    with pytest.raises(ConfigError, match="make it first"), mount(".", place / "nowhere"):
        pass


def test_options_as_fstab_writes_them_become_settings():
    config = mount_config("s", "/m", ("rw,_netdev,ro", "cache=64MiB,count=8,allow_other"))

    assert config.read_only
    assert config.allow_other
    assert (config.files.cache, config.files.striping.count) == (64 << 20, 8)
    with pytest.raises(ConfigError, match="nonsense"):
        mount_config("s", "/m", ("nonsense=1",))


def cli(*arguments):
    return click.testing.CliRunner().invoke(command, [str(a) for a in arguments])


def test_the_command_mounts_shows_prefetches_verifies_and_unmounts(place):
    (place / "cli").mkdir()
    (place / "cli-store").mkdir()
    assert (
        cli("mount", place / "cli-store", place / "cli", "-o", "unit=4096,count=2").exit_code == 0
    )
    big = os.urandom(3 << 20)
    (place / "cli/f").write_bytes(big)

    shown = cli("stat", place / "cli/f")
    assert "over 2 objects" in shown.output
    assert "over 2 objects" in cli("stat", "f", "--store", place / "cli-store").output
    assert cli("prefetch", place / "cli/f").exit_code == 0
    assert cli("umount", place / "cli").exit_code == 0

    verified = cli("verify", place / "cli-store", "--read-data", "--json")
    assert orjson.loads(verified.output)["bytes_verified"] == len(big)
    next((place / "cli-store/.omnifs/objects").rglob("*.1")).unlink()
    damaged = cli("verify", place / "cli-store")
    assert isinstance(damaged.exception, IntegrityError)
    assert "missing" in damaged.output
    assert isinstance(cli("umount", place / "cli").exception, StateError)
    assert isinstance(cli("stat", place / "cli").exception, StateError)


def test_two_sides_of_the_model_are_told_apart(tmp_path):
    """The model test can fail: a difference between both sides is seen."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    pair = Pair(tmp_path / "a", tmp_path / "b")
    (Path(tmp_path) / "a/extra").write_bytes(b"")

    with pytest.raises(AssertionError, match="differ"):
        pair.check()


def test_a_change_by_another_user_takes_the_set_uid_bit_away(place):
    if os.getuid() != 0:
        pytest.skip("SET-UID NOT TESTED: needs root and another user")
    place.chmod(0o755)
    settings = {"files": TINY, "bridge": "device", "allow_other": True}
    with mount(str(place / "store"), place / "two", settings) as root:
        for name, change in (
            ("written", "f = os.open(p, os.O_WRONLY); os.write(f, b'x'); os.close(f)"),
            ("cut", "os.truncate(p, 1)"),
            ("emptied", "os.close(os.open(p, os.O_WRONLY | os.O_TRUNC))"),
        ):
            (root / name).write_bytes(DATA)
            (root / name).chmod(0o6777)
            code = f"import os, sys; p = sys.argv[1]; os.setuid(65534); {change}"
            subprocess.run([sys.executable, "-c", code, root / name], check=True)
            assert oct((root / name).stat().st_mode & 0o7777) == oct(0o777), name


def test_a_path_may_be_longer_than_one_call_takes(root):
    (root / "top").mkdir()
    at = os.open(root / "top", os.O_RDONLY)
    for number in range(24):
        os.mkdir(f"{number:03}" + "n" * 240, dir_fd=at)
        below = os.open(f"{number:03}" + "n" * 240, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below

    file = os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=at)
    os.write(file, DATA)
    os.close(file)
    os.rename("f", "g", src_dir_fd=at, dst_dir_fd=at)
    file = os.open("g", os.O_RDONLY, dir_fd=at)
    found = os.read(file, len(DATA) + 1)
    os.close(file)

    assert found == DATA
    again = os.open(".", os.O_RDONLY, dir_fd=at)
    assert os.listdir(again) == ["g"]
    os.close(again)
    os.close(at)
    shutil.rmtree(root / "top")
    assert os.listdir(root) == []
