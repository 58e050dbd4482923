"""Noticing the end of another process, and ending with the parent process. Linux only."""

import os
import select
import threading

__all__ = ["end_with", "has_ended"]


def end_with(pid: int) -> None:
    """End this process as soon as process ``pid`` has ended, or at once if it has ended before.

    A thread waits for the end. ``PR_SET_PDEATHSIG`` would end this process with the *thread* that started it. Regular
    checks of ``getppid`` would take the adopting process for the parent if the real parent ended before the first
    check.

    Args:
        pid: The process that started this one, as known before this one began.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return  # a kernel before 5.3: the other watch on the parent has to suffice
    threading.Thread(target=_wait, args=(parent,), name="omniload-parent", daemon=True).start()


def has_ended(pid: int, limit_s: float) -> bool:
    """Wait for a process to end, and return whether it has ended within ``limit_s``.

    ``Process.join`` with a limit waits for a pipe that the process's own children keep open.
    """
    try:
        # A handle identifies this very process, while its number may be reused as soon as it is reaped.
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return _is_over(handle, limit_s)
    finally:
        os.close(handle)


def _is_over(handle: int, limit_s: float | None) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(None if limit_s is None else 1e3 * limit_s))


def _wait(parent: int) -> None:
    _is_over(parent, None)
    # There is no parent that could receive an exit status, and buffers of this process are no longer needed.
    os._exit(1)
