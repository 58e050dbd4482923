"""A memory limit for a process: the kernel kills the process at the limit, as on a machine without free memory."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

__all__ = ["short_of_memory"]

_GROUPS = Path("/sys/fs/cgroup")
_LIMIT = 1 << 20


def _group_of_this_process() -> tuple[Path, str, str] | None:
    """Return the folder of this process's memory group, its file of the limit and its file of kills, or None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "memory":
            return (
                _GROUPS / "memory" / path.lstrip("/"),
                "memory.limit_in_bytes",
                "memory.oom_control",
            )
        folder = _GROUPS / path.lstrip("/")
        if not kinds and (folder / "memory.max").exists():
            return folder, "memory.max", "memory.events"
    return None


@contextmanager
def short_of_memory(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """Let the kernel kill a process when it needs a megabyte more; yield a function that returns the number of kills.

    If this process may not limit memory, the other process receives at once the signal that the kernel would send.
    """
    found = _group_of_this_process()
    with ExitStack() as stack:
        try:
            ended = _limited(found, process, stack)
        except OSError:
            process.send_signal(signal.SIGKILL)
            ended = None
        yield (
            lambda: 1 if ended is None else int(ended.read_text().split("oom_kill ")[1].split()[0])
        )


def _limited(
    found: tuple[Path, str, str] | None, process: psutil.Process, stack: ExitStack
) -> Path:
    """Put a process into a group with a limit; return the file in which the kernel counts its kills."""
    if found is None:
        raise FileNotFoundError("this process is in no group that limits memory")
    within, limit, counts = found
    group = within / f"omniload-test-{process.pid}"
    group.mkdir()
    stack.callback(_removed, group, process)
    (group / limit).write_text(str(_LIMIT))
    (group / "cgroup.procs").write_text(str(process.pid))
    return group / counts


def _removed(group: Path, process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
    psutil.wait_procs([process], 30)
    group.rmdir()
