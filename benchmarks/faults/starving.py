"""A process that gets little of a core for a while, or no more memory.

A process gets less of a core by the kernel's own limit of a group (``cpu.max``, or ``cpu.cfs_quota_us`` of the older
groups), if this process may make a group. Otherwise it is starved as by ``cpulimit``, which stops the process for a
part of each tenth of a second. A process gets less memory by a limit of a group, so that the kernel kills it. If that
is not allowed, it receives the signal that the kernel would send.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.memory_groups import short_of_memory

__all__ = ["SHARE", "Group", "as_cpulimit", "cpu_group", "short_for", "starved_for"]

SHARE = 0.05
"""Share of one core that a starved process gets."""
_PERIOD_S = 0.1
_GIVE_BACK_S = 5.0
"""Longest time for which a group is asked to release its processes."""
_GROUPS = Path("/sys/fs/cgroup")


class Group:
    """A kernel group whose processes get a part of one core.

    Raises:
        OSError: This process may not make groups, or no group limits cores here.
    """

    def __init__(self, name: str, share: float) -> None:
        period_us = round(_PERIOD_S * 1e6)
        quota_us = round(share * period_us)
        if (old := _GROUPS / "cpu").is_dir():
            self._above, limits = (
                old,
                {"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": quota_us},
            )
        else:
            self._above, limits = _GROUPS, {"cpu.max": f"{quota_us} {period_us}"}
        self._folder = self._above / name
        self._folder.mkdir()
        try:
            for file, limit in limits.items():
                (self._folder / file).write_text(str(limit))
        except OSError:
            self._folder.rmdir()
            raise

    def take(self, pid: int) -> Callable[[], None]:
        """Put a process into the group; return a function that puts it back, and removes the group."""
        try:
            place = self._above / _group_of(pid, self._above).lstrip("/") / "cgroup.procs"
            (self._folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self._folder.rmdir()
            raise

        def give_back() -> None:
            until_s = time.monotonic() + _GIVE_BACK_S
            while self._folder.exists():
                try:
                    self._emptied(place)
                except OSError:
                    # Busy, because of a process that was started since the last look, or of one that is ending.
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(_PERIOD_S)

        return give_back

    def _emptied(self, place: Path) -> None:
        # The process, and those that it has started meanwhile; an ended process is in no group.
        for each in (self._folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                place.write_text(each)
        self._folder.rmdir()


def _group_of(pid: int, above: Path) -> str:
    wanted = "cpu" if above.name == "cpu" else ""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds.split(",").count(wanted):
            return path
    raise FileNotFoundError(f"process {pid} is in no group below {above}")


def cpu_group(pid: int, share: float) -> Callable[[], None]:
    """Put a process into a group that gets a part of one core; return a function that ends that.

    Raises:
        OSError: This is not allowed here.
    """
    return Group(f"omniload-starved-{pid}", share).take(pid)


def as_cpulimit(pid: int, share: float) -> Callable[[], None]:
    """Let a process run for only a part of each tenth of a second; return a function that ends that."""
    process, ended = psutil.Process(pid), threading.Event()

    def turns() -> None:
        with suppress(psutil.Error):
            try:
                while not ended.is_set():
                    process.send_signal(signal.SIGSTOP)
                    ended.wait((1 - share) * _PERIOD_S)
                    process.send_signal(signal.SIGCONT)
                    ended.wait(share * _PERIOD_S)
            finally:
                # However the loop ends, the process is not left stopped.
                process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=turns, name="starving", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


@contextmanager
def starved_for(
    pid: int, seconds: float, share: float = SHARE
) -> Iterator[tuple[str, threading.Event]]:
    """Limit a process to a part of one core for a while; yield the way, and an event that is set when that is over.

    Args:
        pid: The process.
        seconds: Duration.
        share: Share of one core.
    """
    try:
        how, end = "a group of the kernel's", cpu_group(pid, share)
    except OSError:
        how, end = "stops, as cpulimit does", as_cpulimit(pid, share)
    is_over, has_ended, ending = threading.Event(), threading.Event(), threading.Lock()

    def give_back() -> None:
        with ending:
            try:
                if not has_ended.is_set():
                    end()
                    has_ended.set()
            finally:
                # The event is set even if the limit could not be ended, because a caller waits for it.
                is_over.set()

    def in_time() -> None:
        # A second attempt below raises the error inside the block.
        with suppress(OSError):
            give_back()

    timer = threading.Timer(seconds, in_time)
    timer.start()
    try:
        yield how, is_over
    finally:
        timer.cancel()
        give_back()


@contextmanager
def short_for(pid: int, seconds: float) -> Iterator[None]:
    """Let the kernel end a process when it needs a megabyte more; if it needs none in this time, end it then."""
    process = psutil.Process(pid)

    def end() -> None:
        with suppress(psutil.NoSuchProcess):
            process.kill()

    short: AbstractContextManager[object] = short_of_memory(process)
    timer = threading.Timer(seconds, end)
    with short:
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
