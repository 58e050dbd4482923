"""Seeing another process end, and ending with the one that started this one. Linux."""

import os
import select
import threading

__all__ = ["end_with", "has_ended"]


def end_with(pid: int) -> None:
    """End this process as soon as process ``pid`` has ended, also where it has ended before.

    A thread waits for it. ``PR_SET_PDEATHSIG`` would end this process with the *thread* that
    started it; a look at ``getppid`` from time to time takes the one that adopted this process for
    its parent where the real one ended before the first look.

    Args:
        pid: The process that started this one, as it was known before this one began.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return  # A kernel before 5.3: what else watches the parent has to do.
    threading.Thread(target=_wait, args=(parent,), name="omniload-parent", daemon=True).start()


def has_ended(pid: int, limit_s: float) -> bool:
    """Wait for a process to end, and return whether it has within ``limit_s``.

    ``Process.join`` with a limit waits for a pipe that the process's own children keep open.
    """
    try:
        # A handle means this very process: its number may be another's as soon as it is reaped.
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
    # The parent gets no exit status any more, and buffers of this process are nobody's.
    os._exit(1)
