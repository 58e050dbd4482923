"""The way into an image: ``python -I entering.py TOLD FOLDER USER GROUP VARIABLES WORD...``.

Run as a file, in a folder with ``image``, ``upper``, ``work`` and ``root``. It makes new
mount and process namespaces, an overlay at ``root``, and becomes the command there; to
the descriptor TOLD it writes the number of the command's process, then ``done``, or what went wrong.

``unshare --fork`` of util-linux 2.38 would lose the exit code of a command that was
signalled. The variables of the image are for the command alone: given to a program of this
machine, ``LD_PRELOAD`` would have it load code of the image before it is inside.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import warnings  # noqa: F401 -- by execvpe, which must not import it from the image

__all__ = ["main"]

_NEW_MOUNTS, _NEW_PROCESSES = 0x20000, 0x20000000
_DEATH_SIGNAL = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOUNTS = (
    ("--make-rprivate", "/"),
    ("-t", "overlay", "omniload", "-o", "lowerdir=image,upperdir=upper,workdir=work", "root"),
    ("-t", "proc", "proc", "root/proc"),
    ("--rbind", "/dev", "root/dev"),
    ("--rbind", "/sys", "root/sys"),
)


def main() -> None:
    """Make the namespaces, start the command in them, and end as it ends."""
    told, folder, user, group, variables, *words = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES):
        os.write(int(told), f"no namespaces: {os.strerror(ctypes.get_errno())}".encode())
        sys.exit(1)
    child = os.fork()
    if child:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)  # they are for the command, and sent to it
        os.write(int(told), b"%d\n" % child)
        os.close(int(told))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(128 - code if code < 0 else code)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _mount(int(told))
    os.write(int(told), b"done\n")
    os.close(int(told))
    _become(folder, int(user), int(group), json.loads(variables), words)


def _mount(told: int) -> None:
    for words in _MOUNTS:
        done = subprocess.run(["mount", *words], capture_output=True, check=False)  # noqa: S603, S607
        if done.returncode:
            os.write(told, done.stderr[:2000])
            os._exit(1)


def _become(
    folder: str, user: int, group: int, variables: dict[str, str], words: list[str]
) -> None:
    """Change the root directory and become the command; 127 where it is not there, as a shell says."""
    code = 126
    try:
        os.chroot("root")
        os.chdir("/")
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 -- pathlib is not loaded for this
        os.chdir(folder)
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.execvpe(words[0], words, variables)  # noqa: S606 -- what was asked for
    except FileNotFoundError as error:
        code, problem = 127, str(error.strerror)
    except OSError as error:
        problem = str(error.strerror)
    # Nothing may be imported here, which a traceback would do: the files are the image's now.
    os.write(2, f"omniload: {words[0]}: {problem}\n".encode("utf-8", "surrogateescape"))
    os._exit(code)


if __name__ == "__main__":
    main()
