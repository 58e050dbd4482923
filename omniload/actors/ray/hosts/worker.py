"""What a process of a Ray of our own runs: it has the roles loaded, then is Ray's worker as any other.

Ray starts a process ahead of each actor. The first one on a node loads Ray and what roles need, and leaves a copy of
itself behind, from which the others are forked: loading takes 1.4 s of processor time and 60 MB of memory that each
of them would have to itself. A process that Ray starts then only asks for a fork in its place, and ends. Where nobody
answers it loads by itself, as the first one did.

    python worker.py --raylet-name=SOCKET OPTIONS-OF-RAY...
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

__all__ = ["main"]

_ROOT = str(Path(__file__).parents[4])
"""Where this omniload lies; not always the one that Python would find by itself."""
_RAYLET = "--raylet-name="
_RAYLET_PID = "RAY_RAYLET_PID"
_ANSWERED_S = 90.0
"""Longest wait for the first process to load, and to fork another one. Ray gives a worker up after 60 s: two at once
would load no sooner, and where the first one ends, the others hear of it."""
_ASKED_S = 5.0
"""Longest wait for what somebody who has connected asks for."""
_LENGTH_BYTES = 4
_MOST_BYTES = 4 << 20
"""Of a command line and an environment, of which Linux takes 2 MiB."""


def main() -> None:
    """Have another process become Ray's worker in this one's place, or load and become it."""
    places = [word.removeprefix(_RAYLET) for word in sys.argv if word.startswith(_RAYLET)]
    # One worker has no other option of a name, and no process without the raylet's number could tell its end.
    is_shared = len(places) == 1 and os.environ.get(_RAYLET_PID, "").isdigit()
    listener = None
    if is_shared:
        with suppress(OSError):
            listener = _listen_first(f"{places[0]}.roles")
            if listener is None and _is_forked(f"{places[0]}.roles"):
                return
    _load()
    if listener is not None:
        with listener:
            _leave_a_copy(listener)
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)


def _load() -> None:
    gc.disable()
    # In place of this folder, which Python has put there for the script that it runs.
    sys.path[0] = _ROOT
    # Whatever is wrong is told where an actor asks for it, by Ray's own way of telling it.
    with suppress(Exception):
        # Ray first: with it there, ours takes its settings as they came with the environment.
        for module in ("ray", "omniload.actors.ray.actors"):
            import_module(module)
    del sys.path[0]
    # Neither looked at nor written to from now on: pages stay shared among forks.
    gc.freeze()
    gc.enable()


def _listen_first(place: str) -> socket.socket | None:
    """Listen at a path where nobody does, or return ``None``.

    Others connect before anything is loaded, and wait for their answers.

    Raises:
        OSError: The folder takes no socket.
    """
    listener, own = socket.socket(socket.AF_UNIX), f"{place}.{os.getpid()}"
    try:
        listener.bind(own)
        listener.listen(socket.SOMAXCONN)
        # Only now, in one step: who finds it before it listens would be refused, and take it for one that is left.
        os.link(own, place)
    except FileExistsError:
        listener.close()
        return None
    except OSError:
        listener.close()
        raise
    finally:
        Path(own).unlink(missing_ok=True)
    return listener


def _is_forked(place: str) -> bool:
    """Ask for a process in this one's place, with its command line and environment; return whether there is one.

    Raises:
        OSError: Nobody answers.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWERED_S)
        server.connect(place)
        asked = json.dumps([sys.argv, dict(os.environ), os.getpgrp()]).encode()
        server.sendall(len(asked).to_bytes(_LENGTH_BYTES, "big") + asked)
        return bool(server.recv(1))


def _leave_a_copy(listener: socket.socket) -> None:
    """Have a copy of this process fork others until the raylet ends; return in this one, and in each of those."""
    # Threads of Python hold what they hold in a fork for ever. Those of Arrow and of numpy are made ready for forks.
    if threading.active_count() > 1:
        return
    # Twice: Ray ends the children of a worker with it.
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    if os.fork() != 0:
        os._exit(0)
    # And the group of processes that it leads.
    os.setpgid(0, 0)
    raylet = os.pidfd_open(int(os.environ[_RAYLET_PID]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while raylet not in select.select([listener.fileno(), raylet], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                os.close(raylet)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _stand_in(connection)
                return
    os._exit(0)


def _stand_in(connection: socket.socket) -> None:
    """Take the place of who asks, with its command line, environment and group; end where it has given up by now."""
    connection.settimeout(_ASKED_S)
    try:
        with connection.makefile("rb") as words:
            length = int.from_bytes(words.read(_LENGTH_BYTES), "big")
            command, environment, group = json.loads(words.read(min(length, _MOST_BYTES)))
        # Ray ends a worker by its group.
        os.setpgid(0, group)
        connection.sendall(b"1")
    except (OSError, ValueError, TypeError):
        os._exit(1)
    sys.argv = command
    os.environ.clear()
    os.environ.update(environment)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # else every process would draw the same; Python's own are drawn anew by themselves


if __name__ == "__main__":
    main()
