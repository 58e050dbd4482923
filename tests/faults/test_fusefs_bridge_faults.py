"""A mount outlives its daemon: handed to a new process under load, and brought back after kill -9."""

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from fusefs.bridge.process.handover import take
from fusefs.mounts.lifecycle import start, umount
from fusefs.stores.url import open_store
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import ConfigError, StateError
from tests.support.fusefs.bridge import places
from tests.support.mount_table import once_mounts_allow

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
DATA = os.urandom(3 << 20)
SPAN = 64 << 10
BRIDGES = ["pyfuse3", "device"]


config_of = partial(places.config_of, bridge="device")


@pytest.fixture
def place():
    with places.a_place("bridge") as base:
        yield base


class Reader(threading.Thread):
    """Reads one open file with O_DIRECT, again and again, and compares every byte."""

    def __init__(self, path):
        super().__init__()
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._ended = threading.Event()
        self._whole = threading.Semaphore(0)
        self.wrong = []

    def run(self):
        buffer = mmap.mmap(-1, SPAN)
        try:
            while not self._ended.is_set():
                for at in range(0, len(DATA), SPAN):
                    size = os.preadv(self._file, [buffer], at)
                    if size != SPAN or buffer[:] != DATA[at : at + SPAN]:
                        self.wrong.append(at)
                self._whole.release()
        except OSError as error:
            self.wrong.append(error)
        finally:
            os.close(self._file)

    def reads_on(self):
        """Wait until the file was read whole once more, begun after this call."""
        while self._whole.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._whole.acquire(timeout=60), self.wrong

    def end(self):
        self._ended.set()
        self.join(timeout=60)


@contextlib.contextmanager
def reading(path):
    reader = Reader(path)
    reader.start()
    try:
        yield reader
    finally:
        reader.end()


@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_mount_goes_to_a_new_process_while_files_are_read_written_and_listed(place, bridge):
    root, first = place / "mount", start(config_of(place, bridge=bridge), log_path=os.devnull)
    (root / "f").write_bytes(DATA)
    (root / "many").mkdir()
    for i in range(50):
        (root / "many" / f"{i}").touch()
    with reading(root / "f") as reader, os.scandir(root / "many") as listing:
        log = (root / "log").open("ab", buffering=0)
        random = (root / "random").open("w+b", buffering=0)
        listed = [next(listing).name]
        log.write(b"one ")
        random.write(b"0123456789")
        os.pwrite(random.fileno(), b"XX", 3)

        second = start(config_of(place, take_over=True), log_path=os.devnull)

        assert first.wait(timeout=60) == 0
        log.write(b"two")
        os.pwrite(random.fileno(), b"YY", 6)
        assert os.pread(random.fileno(), 10, 0) == b"012XX5YY89"
        log.close()
        random.close()
        listed += [entry.name for entry in listing]
        assert sorted(listed) == sorted(map(str, range(50)))
        assert (root / "log").read_bytes() == b"one two"
        (root / "new").write_bytes(b"of the new process")
        reader.reads_on()
    assert reader.wrong == []
    assert (root / "random").read_bytes() == b"012XX5YY89"
    assert os.path.ismount(root)
    umount(str(root))
    assert second.wait(timeout=60) == 0


@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_file_that_only_the_old_process_can_read_is_named_and_the_mount_stays_with_it(
    place, bridge
):
    root, first = place / "mount", start(config_of(place, bridge=bridge), log_path=os.devnull)
    (root / "f").write_bytes(DATA)
    with (root / "f").open("rb", buffering=0) as file:
        (root / "f").unlink()

        with pytest.raises(StateError, match="'f' is open and was removed"):
            start(config_of(place, take_over=True), log_path=os.devnull)

        assert first.poll() is None
        assert file.read(100) == DATA[:100]
    second = start(config_of(place, take_over=True), log_path=os.devnull)
    assert first.wait(timeout=60) == 0
    umount(str(root))
    assert second.wait(timeout=60) == 0


@pytest.mark.parametrize("bridge", BRIDGES)
def test_one_who_asks_for_a_mount_and_changes_its_mind_leaves_it_where_it_was(place, bridge):
    root, first = place / "mount", start(config_of(place, bridge=bridge), log_path=os.devnull)
    (root / "f").write_bytes(DATA)
    with reading(root / "f") as reader:
        for _ in range(3):
            taken = take(os.path.realpath(root))
            assert taken.state["filesystem"]["handles"]
            taken.decline()
            reader.reads_on()
    assert reader.wrong == []
    umount(str(root))
    assert first.wait(timeout=60) == 0


TAKE_AND_WAIT = """
import sys
from fusefs.bridge.process.handover import take
taken = take(sys.argv[1])
print(taken.state["request_bytes"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("bridge", BRIDGES)
def test_one_who_is_killed_while_it_takes_a_mount_leaves_it_where_it_was(place, bridge):
    root, first = place / "mount", start(config_of(place, bridge=bridge), log_path=os.devnull)
    (root / "f").write_bytes(DATA)
    log = (root / "log").open("ab", buffering=0)
    log.write(b"one ")
    with reading(root / "f") as reader:
        with subprocess.Popen(
            [sys.executable, "-c", TAKE_AND_WAIT, os.path.realpath(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as taking:
            assert int(taking.stdout.readline()) >= (1 << 20) + 4096  # it has the descriptor now

            taking.kill()
        assert first.poll() is None
        log.write(b"two ")
        reader.reads_on()
        second = start(config_of(place, take_over=True), log_path=os.devnull)
        assert first.wait(timeout=60) == 0
        log.write(b"three")
        reader.reads_on()
    assert reader.wrong == []
    log.close()
    assert (root / "log").read_bytes() == b"one two three"
    umount(str(root))
    assert second.wait(timeout=60) == 0


@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_daemon_that_is_told_to_end_while_it_is_asked_for_its_mount_unmounts(place, bridge):
    root, first = place / "mount", start(config_of(place, bridge=bridge), log_path=os.devnull)
    file = os.open(root / "f", os.O_WRONLY | os.O_CREAT)
    os.write(file, DATA)
    taken = take(os.path.realpath(root))

    first.terminate()
    taken.decline()

    assert first.wait(timeout=60) == 0
    assert not os.path.ismount(root)
    with contextlib.suppress(OSError):
        os.close(file)
    files = StripedFiles(open_store(str(place / "store")))
    with contextlib.closing(files), files.open("f") as found:
        assert bytes(found.reader.read(0, len(DATA))) == DATA


class Busy(threading.Thread):
    """Makes, renames, lists and removes files of its own folder; whatever does not add up is kept."""

    def __init__(self, folder, ended):
        super().__init__()
        folder.mkdir()
        self._folder, self._ended = folder, ended
        self.done = threading.Semaphore(0)
        self.wrong = []

    def run(self):
        number = 0
        try:
            while not self._ended.is_set():
                number += 1
                line = b"%d\n" % number
                made = self._folder / f"{number}.part"
                made.write_bytes(line * 100)
                made.rename(self._folder / f"{number}")
                with (self._folder / "log").open("ab", buffering=0) as log:
                    log.write(line)
                    os.fsync(log.fileno())
                if (self._folder / f"{number}").read_bytes() != line * 100:
                    self.wrong.append(number)
                if number > 5:
                    (self._folder / f"{number - 5}").unlink()
                there = {f"{n}" for n in range(max(1, number - 4), number + 1)} | {"log"}
                if (found := {path.name for path in self._folder.iterdir()}) != there:
                    self.wrong.append((number, found))
                self.done.release()
            logged = (self._folder / "log").read_bytes()
            if logged != b"".join(b"%d\n" % n for n in range(1, number + 1)):
                self.wrong.append(logged)
        except OSError as error:
            self.wrong.append(error)

    def goes_on(self):
        while self.done.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.done.acquire(timeout=60), self.wrong


def test_under_load_a_mount_goes_from_process_to_process_and_nobody_notices(place):
    root = place / "mount"
    daemon = start(config_of(place, bridge="pyfuse3"), log_path=os.devnull)
    (root / "f").write_bytes(DATA)
    ended = threading.Event()
    busy = [Busy(root / f"busy-{number}", ended) for number in range(3)]
    with reading(root / "f") as one, reading(root / "f") as other:
        for thread in busy:
            thread.start()
        try:
            for _ in range(2):
                for thread in busy:
                    thread.goes_on()
                following = start(config_of(place, take_over=True), log_path=os.devnull)
                assert daemon.wait(timeout=60) == 0
                daemon = following
                one.reads_on()
                other.reads_on()
            for thread in busy:
                thread.goes_on()
        finally:
            ended.set()
            for thread in busy:
                thread.join(timeout=60)
    assert [*one.wrong, *other.wrong] == []
    assert [thread.wrong for thread in busy] == [[], [], []]
    umount(str(root))
    assert daemon.wait(timeout=60) == 0


def test_there_must_be_a_mount_to_take_over(place):
    with pytest.raises(StateError, match="no mount of ours answers there"):
        start(config_of(place, take_over=True), log_path=os.devnull)


def daemon_of(watcher):
    (child,) = psutil.Process(watcher.pid).children()
    return child


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_a_watched_mount_is_back_after_its_daemon_was_killed(place, bridge):
    root = place / "mount"
    watcher = start(config_of(place, bridge=bridge), log_path=os.devnull, watched=True)
    (root / "f").write_bytes(DATA)
    for _ in range(2):
        killed = daemon_of(watcher)

        killed.send_signal(signal.SIGKILL)

        psutil.wait_procs([killed], timeout=60)
        assert content_when_back(root / "f") == DATA
    umount(str(root))
    assert watcher.wait(timeout=60) == 0


def content_when_back(path):
    def content():
        with contextlib.suppress(OSError):
            return path.read_bytes()
        return None

    return once_mounts_allow(content)


def test_a_watcher_that_is_told_to_end_unmounts(place):
    watcher = start(config_of(place), log_path=os.devnull, watched=True)
    daemon = daemon_of(watcher)

    watcher.terminate()

    assert watcher.wait(timeout=60) == 0
    assert not daemon.is_running()
    assert not os.path.ismount(place / "mount")


def test_a_watcher_whose_first_start_fails_says_so_and_ends(place):
    shutil.rmtree(place / "store")

    with pytest.raises(Exception, match="not a directory"):
        start(config_of(place), log_path=os.devnull, watched=True)


def test_the_daemon_needs_neither_pyfuse3_nor_trio(place, tmp_path):
    for name in ("pyfuse3", "trio"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    code = (
        "import sys; from fusefs.mounts.lifecycle import MountConfig, start, umount\n"
        "config = MountConfig(store=sys.argv[1], mountpoint=sys.argv[2], bridge='device')\n"
        "process = start(config); umount(sys.argv[2]); sys.exit(process.wait())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, place / "store", place / "mount"],
        env=environment,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0


@pytest.mark.parametrize("bridge", ["device", "pyfuse3"])
def test_further_signals_do_not_cut_off_what_the_first_one_publishes(place, bridge):
    daemon = start(config_of(place, bridge=bridge), log_path=os.devnull)
    file = os.open(place / "mount/f", os.O_WRONLY | os.O_CREAT)
    assert os.write(file, DATA) == len(DATA)
    while daemon.poll() is None:
        daemon.send_signal(signal.SIGHUP)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=0.005)
    with contextlib.suppress(OSError):  # nobody answers any more
        os.close(file)

    files = StripedFiles(open_store(str(place / "store")))
    with contextlib.closing(files), files.open("f") as found:
        assert bytes(found.reader.read(0, len(DATA))) == DATA


@pytest.mark.parametrize("bridge", ["device", "pyfuse3"])
def test_an_open_reads_all_of_a_longer_version_of_another_process_at_once(place, bridge):
    daemon = start(config_of(place, bridge=bridge), log_path=os.devnull)
    (place / "mount/f").write_bytes(DATA)
    files = StripedFiles(open_store(str(place / "store")))
    with contextlib.closing(files):
        for times in (2, 3, 4):
            assert (place / "mount/f").stat().st_size == (times - 1) * len(DATA)
            files.write_file("f", DATA * times)
            assert (place / "mount/f").read_bytes() == DATA * times
    umount(str(place / "mount"))
    assert daemon.wait(timeout=60) == 0


def test_who_reads_what_the_command_says_does_not_wait_for_the_daemon(place):
    words = [
        Path(sys.executable).with_name("omniload"),
        "fs",
        "mount",
        place / "store",
        place / "mount",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)

    assert str(place / "mount") in done.stdout
    second = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == StateError.exit_code
    assert "is a mount already" in second.stderr
    umount(str(place / "mount"))


def test_a_spool_that_cannot_be_written_is_said_before_anything_is_mounted(place):
    with pytest.raises(ConfigError, match=r"spool_directory '.*none' is not there"):
        start(config_of(place, spool_directory=str(place / "none")), log_path=os.devnull)

    assert not (place / "mount").is_mount()
