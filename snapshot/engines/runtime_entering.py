"""The way into a container: ``python -I runtime_entering.py TOLD CGROUP WORD...``.

Run as a file, in a folder with ``image``, ``upper``, ``work``, ``root`` and ``config.json``.
It makes new mount and process namespaces and an overlay at ``root``, and becomes the
runtime there, WORD...; to the descriptor TOLD it writes the number of that process, then
``done``, or what went wrong.

The runtime is process 1 of its namespace: whatever ends it ends the container too, whose
init would otherwise outlive a runtime that is killed. The process in front of it outlives
who started it, and then does what that one can no more: it ends the container, unmounts
the image and removes the folder and the container's control groups.
"""

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import signal
import subprocess
import sys
import time

__all__ = ["main"]

_NEW_MOUNTS, _NEW_PROCESSES = 0x20000, 0x20000000
_DEATH_SIGNAL = 1
_DETACH = 2
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOUNTS = (
    # Nothing leaks out; yet what the machine unmounts is no longer held here, where it is shared.
    ("--make-rslave", "/"),
    ("-t", "overlay", "omniload", "-o", "lowerdir=image,upperdir=upper,workdir=work", "root"),
    ("-t", "proc", "proc", "/proc"),  # the runtime looks for itself there
)
_EMPTY_WITHIN_S = 5.0
_SECOND_GROUPS = "/sys/fs/cgroup/unified"
_ORPHANED = signal.SIGUSR1


def main() -> None:
    """Make the namespaces, start the runtime in them, and end as it ends."""
    told, cgroup, *words = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    starter, folder = os.getppid(), os.getcwd()  # noqa: PTH109 -- pathlib is not needed for this
    groups = _own_groups()
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES):
        os.write(int(told), f"no namespaces: {os.strerror(ctypes.get_errno())}".encode())
        sys.exit(1)
    child = os.fork()
    if not child:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _become(int(told), words)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # they are for the container, and sent to it
    signal.signal(_ORPHANED, lambda *_: _kill(child))
    libc.prctl(_DEATH_SIGNAL, _ORPHANED, 0, 0, 0)
    if os.getppid() != starter:
        _kill(child)
    os.write(int(told), b"%d\n" % child)
    os.close(int(told))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(_ORPHANED, signal.SIG_IGN)  # the number may be another process's from now on
    if os.getppid() != starter and not libc.setns(mounts, _NEW_MOUNTS):
        _tidy(libc, folder)
    _remove_groups(cgroup, groups)
    sys.exit(128 - code if code < 0 else code)


def _kill(child: int) -> None:
    # It may have ended by itself, and been waited for, a moment before who started us was killed.
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _become(told: int, words: list[str]) -> None:
    """Mount what the container needs and become the runtime."""
    for mount in _MOUNTS:
        done = subprocess.run(["mount", *mount], capture_output=True, check=False)  # noqa: S603, S607
        if done.returncode:
            os.write(told, done.stderr[:2000])
            os._exit(1)
    # crun takes no machine that has control groups of both versions; it need not see the second.
    subprocess.run(["umount", _SECOND_GROUPS], capture_output=True, check=False)  # noqa: S603, S607
    os.write(told, b"done\n")
    os.close(told)
    try:
        os.execvp(words[0], words)  # noqa: S606 -- what was asked for
    except OSError as error:
        os.write(2, f"omniload: {words[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _tidy(libc: ctypes.CDLL, folder: str) -> None:
    """Unmount the image and remove the folder, since who made them is gone.

    No program can help: a process whose process namespace has ended starts none.
    """
    os.chdir("/")
    if not libc.umount2(os.fsencode(f"{folder}/image"), _DETACH):
        shutil.rmtree(folder, ignore_errors=True)


def _own_groups() -> set[str]:
    """Return the control groups of this process, as paths below their hierarchies."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:  # noqa: PTH123
        return {line.rstrip("\n").split(":", 2)[2].strip("/") for line in file}


def _remove_groups(name: str, ours: set[str]) -> None:
    """Remove control groups that a runtime which was killed has left: below ours, or at the top."""
    for top in ("/sys/fs/cgroup", *glob.glob("/sys/fs/cgroup/*/")):  # noqa: PTH207
        for below in {*ours, ""}:
            _remove_group(os.path.join(top, below, name))  # noqa: PTH118


def _remove_group(path: str) -> None:
    end_s = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        try:
            os.rmdir(path)  # noqa: PTH106
        except OSError as error:  # never made, or the runtime has removed it; or not empty yet
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                return
            time.sleep(0.01)  # the kernel tells nobody when what was killed has left a group
        else:
            return


if __name__ == "__main__":
    main()
