"""Python for scripts of ranks, warm: each is a process forked from one that has torch and our rooms for ranks loaded.

Loading takes a rank two to four seconds of processor time, and tests start a hundred. What they prove of ranks does
not lie there: a program that imports all this itself is in every page that is run and in two jobs that are launched.

    with WarmPython(folder) as python:
        subprocess.Popen([python.path, "rank.py", "1"])
        subprocess.run([python.path, "-m", "torch.distributed.run", "rank.py"], env=os.environ | python.for_launchers)

The process that is started is a small one (``_CLIENT``) that stands for the script's: it has its output, forwards
signals, ends when it does and as it does, and ends it where it is killed itself. The script has its open files, its
parent and its namespaces.
"""

import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Self

__all__ = ["WarmPython"]

_MODULES = (
    *("torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("omniload.front.opening", "trainer_integration.run.external_rank"),
    # Ray is not among them: it takes settings from variables when it is loaded.
    *("omniload.actors.local.plane", "trainer_integration.run.trainer"),
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SIZE_BYTES = 8
_MOST_FILES = 64
_STARTED_S = 60

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
held = [int(name) for name in os.listdir("/proc/self/fd")]
held = [number for number in held if number != server.fileno() and os.path.exists(f"/proc/self/fd/{{number}}")]
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), os.getppid(), held]).encode()
socket.send_fds(server, [len(asked).to_bytes({size}, "big")], held)
server.sendall(asked)
words = server.makefile()
pid = int(words.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(words.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class WarmPython:
    """The process that others are forked from; use it in a ``with``."""

    def __init__(self, folder: Path) -> None:
        """Start it, with its socket in an empty folder whose path is short."""
        self.path = str(folder / "python")
        """What to start in place of ``sys.executable``."""
        self.for_launchers = {"PYTHON_EXEC": self.path}
        """Variables by which torchrun, and our launcher, start ranks with it."""
        address = str(folder / "socket")
        text = _CLIENT.format(python=sys.executable, address=address, size=_SIZE_BYTES)
        Path(self.path).write_text(text)
        Path(self.path).chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, __file__, address],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ready, _, _ = select.select([self._process.stdout], [], [], _STARTED_S)
        assert ready, f"no warm Python within {_STARTED_S} s"
        assert self._process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(_STARTED_S)
        self._process.stdout.close()


def serve(address: str) -> list[str]:
    """Fork a process for each that asks; return its command line in that process, and end in this one with stdin."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ones between
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                break
            connection.close()
        else:
            sys.exit()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, held, _, _ = socket.recv_fds(connection, _SIZE_BYTES, _MOST_FILES)
    with connection.makefile("rb") as words:
        command, folder, environment, parent, numbers = json.loads(
            words.read(int.from_bytes(size, "big"))
        )
    if pid := os.fork():
        for descriptor in (0, 1, 2, *held):
            os.close(descriptor)
        os._exit(_watch(pid, connection))
    _enter_namespaces_of(connection)
    connection.close()
    # Out of the way first: a number that one is to have may be another's now.
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _MOST_FILES) for descriptor in held]
    for descriptor in held:
        os.close(descriptor)
    for number, descriptor in zip(numbers, aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    own, os.getppid = os.getppid, lambda: parent
    # Its children have parents of their own.
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", own))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return command


def _enter_namespaces_of(connection: socket.socket) -> None:
    """Be on the host of who asked: its network, its name, and its mounts."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    places = {
        kind: f"/proc/{int.from_bytes(credentials[:4], sys.byteorder)}/ns/{kind}"
        for kind in ("net", "uts", "mnt")
    }
    others = [
        at
        for kind, at in places.items()
        if Path(at).readlink() != Path(f"/proc/self/ns/{kind}").readlink()
    ]
    for descriptor in [os.open(place, os.O_RDONLY) for place in others]:
        if _LIBC.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _watch(pid: int, connection: socket.socket) -> int:
    """Tell who asked how the process ends; end it where that one ends first."""
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def become(command: list[str]) -> None:
    """Run a command line of Python's in this process."""
    while command[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del command[0]
    del sys.path[0]
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    gc.disable()
    for module in _MODULES:
        import_module(module)
    gc.freeze()
    gc.enable()
    become(serve(sys.argv[1]))
