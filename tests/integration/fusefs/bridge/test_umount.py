"""An unmount returns when the daemon is gone, and tells what could not be published; a watch is handed over."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import click.testing
import psutil
import pytest

from fusefs.bridge.process import handover, launch
from fusefs.bridge.process.unmount_notice import UnmountClient, UnmountNotifier, _address
from fusefs.bridge.process.unmount_notice import umount as unmount
from fusefs.cli import command
from fusefs.mounts.lifecycle import is_watched, start, umount
from omniload.base.errors import (
    IntegrityError,
    StateError,
    UnavailableError,
)
from tests.support.fusefs.bridge import places
from tests.support.fusefs.model import TINY
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.mount_table import once_mounts_allow

mounts = [pytest.mark.fuse, pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)]
BRIDGES = ["pyfuse3", "device"]


def marked(test):
    for mark in mounts:
        test = mark(test)
    return test


config_of = partial(places.config_of, bridge="device")


@pytest.fixture
def place():
    with places.a_place("umount", "cache") as base:
        yield base


def cli(*words):
    return click.testing.CliRunner().invoke(command, [str(word) for word in words])


# With real daemons


@marked
def test_who_holds_a_copy_of_the_mount_is_named(place):
    daemon = start(config_of(place), log_path=os.devnull)
    words = ["unshare", "--mount", "sh", "-c", "echo there; read _"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        assert container.stdout.readline() == b"there\n"

        with pytest.raises(UnavailableError, match=rf"namespaces of sh \({container.pid}\); end"):
            umount(str(place / "mount"), within_s=0.5)

    assert daemon.wait(timeout=60) == 0


@marked
@pytest.mark.parametrize("bridge", BRIDGES)
def test_when_umount_returns_the_disk_cache_is_free_and_everything_is_there(place, bridge):
    cached = TINY | {"disk_cache": {"directory": str(place / "cache"), "capacity": 64 << 20}}
    for turn in range(3):
        daemon = start(config_of(place, files=cached, bridge=bridge), log_path=os.devnull)
        with (place / "cache/omnifs-disk-cache.json").open("rb") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (place / "mount/f").write_bytes(bytes([turn]) * 100_000)

            umount(str(place / "mount"))

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert daemon.wait(timeout=60) == 0
    assert cli("verify", place / "store", "--read-data").exit_code == 0


def stop(daemon):
    """Stop a daemon, and return when each of its threads has stopped: until then one of them may answer yet."""
    daemon.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.pid, os.WSTOPPED)


@marked
def test_a_mount_whose_daemon_is_stopped_is_taken_away_and_nobody_waits_for_ever(place):
    daemon = start(config_of(place), log_path=os.devnull)
    stop(daemon)
    try:
        with pytest.raises(UnavailableError, match=r"does not answer within 0\.2 s; let that go"):
            launch.clear_dead_mount(str(place / "mount"), within_s=0.2)
        # What still asks keeps the mount in use.
        daemon.send_signal(signal.SIGCONT)
        for thread in threading.enumerate():
            if thread.name.startswith("omniload-within"):
                thread.join(timeout=60)
        stop(daemon)
        with pytest.raises(StateError, match="is unmounted, but whether everything is published"):
            umount(str(place / "mount"), within_s=20)

        assert not os.path.ismount(place / "mount")
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert daemon.wait(timeout=60) == 0


def test_an_unmount_names_a_place_of_any_bytes(tmp_path):
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")

    with pytest.raises(StateError, match="is not mounted through FUSE"):
        launch.umount(place)


@marked
def test_umount_by_the_command_waits_and_ends_with_0(place):
    daemon = start(config_of(place), log_path=os.devnull)

    done = cli("umount", place / "mount")

    assert (done.exit_code, done.output) == (0, "")
    assert daemon.wait(timeout=60) == 0


@marked
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_mount_in_use_stays_and_its_daemon_goes_on(place, bridge):
    daemon = start(config_of(place, bridge=bridge), log_path=os.devnull)
    with (place / "mount/f").open("wb", buffering=0) as file:
        with pytest.raises(StateError, match=r"stays mounted: .*fuser -vm names the processes"):
            umount(str(place / "mount"))

        file.write(b"goes on")
    assert (place / "mount/f").read_bytes() == b"goes on"
    umount(str(place / "mount"))
    assert daemon.wait(timeout=60) == 0


@marked
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_daemon_that_is_told_to_end_and_cannot_publish_ends_with_5_and_names_the_file(
    place, bridge
):
    daemon = start(config_of(place, bridge=bridge), log_path=str(place / "log"))
    file = (place / "mount/lost").open("wb", buffering=0)
    file.write(b"x" * 100)
    shutil.rmtree(place / "store")
    (place / "store").touch()  # nothing can be published below a file
    with contextlib.closing(UnmountClient.of(str(place / "mount"))) as waiter:
        daemon.send_signal(signal.SIGTERM)

        lost = waiter.wait(60, lambda _: None)

    assert list(lost) == ["lost"]
    assert daemon.wait(timeout=60) == IntegrityError.exit_code
    assert "['lost']" in (place / "log").read_text()
    with contextlib.suppress(OSError):
        file.close()
    (place / "store").unlink()


@marked
def test_a_daemon_that_was_killed_is_not_taken_for_one_that_published(place):
    daemon = start(config_of(place), log_path=os.devnull)
    with contextlib.closing(UnmountClient.of(str(place / "mount"))) as waiter:
        daemon.kill()

        assert waiter.wait(60, lambda _: None) is None
    daemon.wait()


@marked
@pytest.mark.parametrize("bridge", BRIDGES)
def test_what_takes_a_mount_over_says_how_it_ends_and_who_it_is(place, bridge):
    first = start(config_of(place, bridge=bridge), log_path=os.devnull)
    taking = config_of(place, bridge=bridge, take_over=True)
    second = start(taking, log_path=os.devnull)
    assert first.wait(timeout=60) == 0
    about = about_of(place / "mount")
    assert (about["process"], about["bridge"]) == (second.pid, "device")

    umount(str(place / "mount"))

    assert second.wait(timeout=60) == 0


# Watch and take-over


@marked
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_take_over_takes_the_watch_too(place, bridge):
    watcher = start(config_of(place, bridge=bridge), log_path=os.devnull, watched=True)
    assert is_watched(str(place / "mount"))

    done = cli("mount", "--take-over", "--bridge", bridge, place / "store", place / "mount")

    assert done.exit_code == 0, done.output
    assert done.output.endswith(", watched\n")
    assert watcher.wait(timeout=60) == 0
    (new,) = watchers_of(place / "mount")
    (child,) = new.children()
    child.kill()
    psutil.wait_procs([child], timeout=60)
    umount_when_back(place / "mount")
    psutil.wait_procs([new], timeout=60)
    assert not new.is_running()


def about_of(mountpoint):
    end_s = time.monotonic() + 60
    while (waiter := UnmountClient.of(str(mountpoint))) is None:  # it claims the name in a while
        assert time.monotonic() < end_s, "no daemon answers"
    with contextlib.closing(waiter):
        return waiter.about


def watchers_of(mountpoint):
    return [psutil.Process(about_of(mountpoint)["process"]).parent()]


def umount_when_back(mountpoint):
    once_mounts_allow(lambda: UnmountClient.of(str(mountpoint))).close()
    umount(str(mountpoint))


@marked
def test_a_take_over_of_what_nobody_watches_is_not_watched(place):
    first = start(config_of(place), log_path=os.devnull)

    done = cli("mount", "--take-over", "--bridge", "device", place / "store", place / "mount")

    assert done.exit_code == 0, done.output
    assert "watched" not in done.output
    assert first.wait(timeout=60) == 0
    umount(str(place / "mount"))


# Without a mount: what is said, by a daemon that is a thread


class Daemon:
    """The daemon's side at a folder, and a kernel that unmounts whatever it is told to."""

    def __init__(self, folder, monkeypatch):
        self.folder = str(folder)
        self.unmounted = threading.Event()
        self.notifier = UnmountNotifier(self.folder, bridge="device", watched=True)
        monkeypatch.setattr(launch, "umount", lambda _: self.unmounted.set())

    def dies(self):
        # Whoever has heard who answers is among those that wait a moment later.
        while not (waiting := self.notifier._waiting):
            threading.Event().wait(0.001)
        for peer in waiting:
            peer.shutdown(socket.SHUT_RDWR)

    def once_unmounted(self, *calls):
        def run():
            assert self.unmounted.wait(60)
            for call in calls:
                call()

        threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    return Daemon(tmp_path, monkeypatch)


def test_what_could_not_be_published_is_an_integrity_error_that_names_it(daemon):
    daemon.notifier.listen()
    lost = [f"ckpt/{number}" for number in range(7)]
    daemon.once_unmounted(lambda: daemon.notifier.notify(lost), daemon.dies)

    with pytest.raises(IntegrityError, match=r"to 7 files is lost: ckpt/0, .*ckpt/4, \.\.\.;"):
        unmount(daemon.folder)


def num_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_those_who_asked_and_went_leave_nothing_open_in_the_daemon(daemon):
    daemon.notifier.listen()
    before = num_descriptors()
    for _ in range(5):
        UnmountClient.of(daemon.folder).close()

    last = UnmountClient.of(daemon.folder)

    # Both ends of the last one: the daemon is a thread here.
    assert num_descriptors() - before == 2
    last.close()


def test_an_end_without_a_word_is_said(daemon):
    daemon.notifier.listen()
    daemon.once_unmounted(daemon.dies)

    with pytest.raises(StateError, match="ended before it said that everything is published"):
        unmount(daemon.folder)


def test_the_command_says_that_it_waits_and_gives_up_after_its_time(daemon):
    daemon.notifier.listen()

    done = cli("umount", "--within", "1200ms", daemon.folder)

    assert isinstance(done.exception, UnavailableError)
    assert f"its process {os.getpid()} still works after 1.2 s" in str(done.exception)
    assert done.output.count("its process publishes what was written") == 1


def test_a_wrong_time_is_named_before_anything_is_unmounted(daemon):
    done = cli("umount", "--within", "soon", daemon.folder)

    assert done.exit_code == 2
    assert "'soon' is not a quantity" in done.output
    assert not daemon.unmounted.is_set()


def test_where_nobody_tells_it_is_unmounted_all_the_same(daemon):
    unmount(daemon.folder)

    assert daemon.unmounted.is_set()


@pytest.mark.parametrize("what", ["file", "folder", "nothing"])
def test_unmounting_what_is_no_mount_says_so(tmp_path, what):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    assert "is not mounted through FUSE" in str(cli("umount", tmp_path / what).exception)


class Exhausted:
    """A listening socket whose first accepts fail, as where no descriptor is left."""

    def __init__(self, listener, fails):
        self._listener, self._fails = listener, fails

    def accept(self):
        if self._fails:
            self._fails -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def fileno(self):
        return self._listener.fileno()


def test_a_daemon_that_lacks_descriptors_for_a_while_answers_afterwards(daemon, caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(os.path.realpath(daemon.folder), os.getuid()))
        listener.listen(1)
        answering = Exhausted(listener, fails=2)
        thread = threading.Thread(target=daemon.notifier._answer, args=(answering,), daemon=True)
        thread.start()

        waiter = UnmountClient.of(daemon.folder)

        assert waiter is not None
        assert waiter.about["process"] == os.getpid()
        waiter.close()
        assert caplog.text.count("cannot be answered") == 2
        # Wakes the thread, which a close alone would leave waiting.
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert not thread.is_alive()


def test_who_asks_once_a_process_has_let_the_mount_go_reaches_the_next_one(daemon):
    daemon.notifier.listen()
    after = UnmountNotifier(daemon.folder, bridge="the next one")

    daemon.notifier.let_go()
    daemon.notifier.listen()  # as a thread would that still waits for the address
    after.listen()

    with contextlib.closing(UnmountClient.of(daemon.folder)) as waiter:
        assert waiter.about["bridge"] == "the next one"


def test_one_address_has_one_process(daemon):
    daemon.notifier.listen()

    with pytest.raises(StateError, match="cannot be reported"):
        UnmountNotifier(daemon.folder).listen()


def test_a_daemon_that_hands_nothing_over_is_named(daemon):
    daemon.notifier.listen()

    with pytest.raises(StateError, match=f"process {os.getpid()} serves it .* hands nothing over"):
        handover.take(os.path.realpath(daemon.folder))


def test_who_listens_there_and_speaks_another_language_is_not_waited_for(daemon):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(os.path.realpath(daemon.folder), os.getuid()))
        listener.listen(1)

        def answer():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b'{"version": 2}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        assert UnmountClient.of(daemon.folder) is None
        thread.join()


def test_another_user_hears_nothing(daemon):
    if os.getuid() != 0:
        pytest.skip("OTHER USER NOT TESTED: needs root")
    code = """
import os, sys, socket
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect(bytes.fromhex(sys.argv[1]))
sys.exit(len(peer.recv(100)))
"""
    as_user = UnmountNotifier(daemon.folder)
    as_user.listen()
    # The listener runs as root here, so it is asked to speak to its own user alone.
    address = _address(os.path.realpath(daemon.folder), os.getuid()).hex()
    done = subprocess.run([sys.executable, "-c", code, address], check=False, timeout=60)

    assert done.returncode == 0
    assert as_user._waiting == []


ANOTHER = """
import os, sys, socket
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(bytes.fromhex(sys.argv[1]))
listener.listen(1)
print("ready", flush=True)
peer, _ = listener.accept()
peer.settimeout(60)  # whoever believes it would wait for its end for minutes
try:
    peer.sendall(b'{"version":1,"process":1,"bridge":"device"}\\n{"ended":true,"lost":[]}\\n')
    sys.exit(len(peer.recv(100)))
except ConnectionError:  # hung up on
    pass
"""


@pytest.mark.parametrize("asked", ["farewell", "handover"])
def test_another_user_who_took_the_name_first_is_not_believed(daemon, asked):
    if os.getuid() != 0:
        pytest.skip("OTHER USER NOT TESTED: needs root")
    target = os.path.realpath(daemon.folder)
    notifier = _address(target, os.getuid())
    address = notifier if asked == "farewell" else handover.socket_address(target)
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER, address.hex()], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()

        if asked == "farewell":
            with pytest.raises(StateError, match="of user 65534 has the name"):
                UnmountClient.of(daemon.folder)
        else:
            with pytest.raises(StateError, match="another user, answers"):
                handover.take(target)

    assert process.returncode == 0  # it was told nothing


@pytest.mark.parametrize("holder", ["another user", "another user, deaf", "silent"])
def test_an_unmount_that_cannot_ask_its_daemon_says_so_and_does_not_end_with_0(
    daemon, monkeypatch, holder
):
    if os.getuid() != 0 and holder != "silent":
        pytest.skip("OTHER USER NOT TESTED: needs root")
    daemon.once_unmounted(lambda: None)
    monkeypatch.setattr("fusefs.bridge.process.unmount_notice._ANSWER_WITHIN_S", 0.2)
    address = _address(os.path.realpath(daemon.folder), os.getuid())
    with contextlib.ExitStack() as held:
        if holder == "another user":
            code = [sys.executable, "-c", ANOTHER, address.hex()]
            process = held.enter_context(subprocess.Popen(code, stdout=subprocess.PIPE))
            process.stdout.readline()
        else:
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(address)
            if holder == "silent":
                listener.listen(1)

        ended = cli("umount", daemon.folder)

    assert "is unmounted, but whether everything is published is not known" in str(ended.exception)
    assert ended.exception.exit_code == 4


def is_waited_for_behind_requests(mountpoint):
    """Tell whether one who asks for a mount and says nothing is waited for still when five requests were answered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(handover.socket_address(os.path.realpath(mountpoint)))
        for number in range(5):
            (mountpoint / f"f{number}").write_bytes(b"x")
        try:
            return bool(silent.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True


@pytest.mark.parametrize("bridge", BRIDGES)
@marked
def test_a_silent_client_of_the_take_over_socket_delays_no_request(place, bridge):
    """It was waited for in the loop of requests, for 5 seconds."""
    process = start(config_of(place, bridge=bridge))
    mountpoint = place / "mount"
    # Where requests had waited too, it would be closed by then; a busy machine may take as long over one itself.
    assert any(is_waited_for_behind_requests(mountpoint) for _ in range(5))
    umount(str(mountpoint))
    assert process.wait(timeout=60) == 0
