"""What a process of a Ray of our own runs: it has the roles loaded, then is Ray's worker as any other.

The process that starts a node begins another beforehand, which loads what roles need while Ray's servers start, and Ray
once somebody asks. Ray starts a process for each actor: that asks for a fork of the loaded one in its place, and
ends. Loading takes 1.2 s of processor time and 60 MB of memory that each of them would have to itself. Where nobody
answers, it loads by itself.

    python worker.py --ahead LISTENER OPENER
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
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

__all__ = ["AHEAD", "BEFORE_RAY", "main", "place_of"]

AHEAD = "--ahead"
"""Before the number of the socket where a process is asked for forks, and that of the process which it ends with."""
_ROOT = str(Path(__file__).parents[4])
"""Where this omniload lies; not always the one that Python would find by itself."""
_RAYLET = "--raylet-name="
_RAYLET_PID = "RAY_RAYLET_PID"
_OF_NO_JOB = {"RAY_JOB_ID": "ffffffff"}
"""What Ray tells a worker that it starts before there is a job, and that is given to any."""
BEFORE_RAY = (
    *("omniload.actors.address", "omniload.actors.answering_edits", "omniload.actors.planning"),
    *("omniload.actors.planner_journal", "omniload.machine.roster.members"),
    *("omniload.actors.roles.constructor", "omniload.actors.roles.loader"),
    *("omniload.actors.roles.planner", "omniload.actors.roles.planner_metrics"),
    # What Ray and its workers load of others.
    *("argparse", "asyncio", "filelock", "google.protobuf.descriptor_pb2", "jsonschema", "psutil"),
    *("google.protobuf.json_format", "msgpack", "multiprocessing", "packaging.version", "pdb"),
    *("pydantic.v1.fields", "requests", "tarfile", "tqdm", "tqdm.auto", "yaml"),
    # Of ours, loaded late: those of a loader as it opens its sources.
    *("fsspec", "numpy.ma", "pyarrow.compute", "pyarrow.fs", "pyarrow.json"),
    *("omniload.source.formats.jsonl", "omniload.source.formats.parquet"),
)
"""What is loaded before there is a raylet: Ray heeds whose worker it is as it is loaded itself."""
_RAY = ("ray", "omniload.actors.ray.actors", "omniload.actors.ray.planner_actor")
"""Ray first: with it there, ours takes its settings as they came with the environment."""
_IN_EVERY_WORKER = ("ray._common.usage.usage_lib", "ray._private.arrow_serialization")
_ANSWERED_S = 90.0
"""Longest wait for the process to load, and to fork another one. Ray gives a worker up after 60 s: two at once
would load no sooner, and where the loaded one ends, the others hear of it."""
_ASKED_S = 5.0  # longest wait for what somebody who has connected asks for
_LENGTH_BYTES = 4
_MOST_BYTES = 4 << 20  # of a command line and an environment, of which Linux takes 2 MiB


def place_of(raylet: str) -> str:
    """Return the path of the socket where workers ask for a fork, by that of their raylet's socket."""
    return f"{raylet}.roles"


def main() -> None:
    """Have another process become Ray's worker in this one's place, or load and become it."""
    del sys.path[0]  # this folder, which Python has put there for the script that it runs
    if sys.argv[1:2] == [AHEAD]:
        _fork_for_others(*map(int, sys.argv[2:]))
    elif _is_forked():
        return
    else:
        _load(_RAY)
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)


def _load(modules: Sequence[str]) -> None:
    gc.disable()
    sys.path.insert(0, _ROOT)
    for module in modules:
        # Whatever is wrong is told where an actor asks for it, by Ray's own way of telling it.
        with suppress(Exception):
            import_module(module)
    del sys.path[0]
    # Neither looked at nor written to from now on: pages stay shared among forks.
    gc.freeze()
    gc.enable()


def _is_forked() -> bool:
    """Ask for a process in this one's place, with its command line and environment; return whether there is one."""
    places = [word.removeprefix(_RAYLET) for word in sys.argv if word.startswith(_RAYLET)]
    if len(places) != 1:  # one worker has no other option of a name
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWERED_S)
        server.connect(place_of(places[0]))
        own = os.getpgrp(), str(Path.cwd()), sys.path  # a job may bring code of its own
        asked = json.dumps([sys.argv, dict(os.environ), *own]).encode()
        server.sendall(len(asked).to_bytes(_LENGTH_BYTES, "big") + asked)
        return bool(server.recv(1))
    return False


def _fork_for_others(listener: int, opener: int) -> None:
    """Load, then fork a process for each that asks, until the opener ends; return in those."""
    ends = os.pidfd_open(opener)
    _load(BEFORE_RAY)
    with socket.socket(fileno=listener) as server:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
        while ends not in select.select([listener, ends], [], [])[0]:
            connection, _ = server.accept()
            with connection:
                if _has_loaded_ray(connection) and os.fork() == 0:
                    os.close(ends)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _stand_in(connection)
                    return
    sys.exit()


def _has_loaded_ray(connection: socket.socket) -> bool:
    """Load Ray for the raylet of the first worker that asks, and tell whether it is there to be forked."""
    if _RAYLET_PID not in os.environ:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        asking = int.from_bytes(credentials[:4], sys.byteorder)
        with suppress(OSError):
            its = Path(f"/proc/{asking}/environ").read_bytes().split(b"\0")
            told = dict(os.fsdecode(variable).partition("=")[::2] for variable in its)
            if told.get(_RAYLET_PID):
                settings = {name: told[name] for name in told if name.startswith("RAY_")}
                os.environ.update(settings | _OF_NO_JOB)
                _load((*_RAY, *_IN_EVERY_WORKER))
    # Threads of Python hold what they hold in a fork for ever. Those of Arrow and of numpy are made ready for forks.
    return _RAYLET_PID in os.environ and threading.active_count() == 1


def _stand_in(connection: socket.socket) -> None:
    """Take the place of who asks, with its words, environment, group and folders; end where it has given up by now."""
    connection.settimeout(_ASKED_S)
    try:
        with connection.makefile("rb") as words:
            length = int.from_bytes(words.read(_LENGTH_BYTES), "big")
            asked = json.loads(words.read(min(length, _MOST_BYTES)))
        sys.argv, environment, group, folder, sys.path[:] = asked
        os.chdir(folder)
        # Ray ends a worker by its group.
        os.setpgid(0, group)
        connection.sendall(b"1")
    except (OSError, ValueError, TypeError):
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # else every process would draw the same; Python's own are drawn anew by themselves


if __name__ == "__main__":
    main()
