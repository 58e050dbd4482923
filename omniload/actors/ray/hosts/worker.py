"""Entry point of a worker process in a Ray of our own: it gets the roles loaded, then behaves like any worker of Ray.

The process that starts a node first begins another process. That process loads the modules of roles while Ray's servers
start, and loads Ray when the first worker asks. Ray starts a process for each actor. This process asks for a fork of
the loaded process to replace it, and ends. Otherwise each worker would spend 1.2 s of processor time and 60 MB of
memory of its own on loading. If no fork is granted, the worker loads the modules itself.

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
"""Option before two numbers: the descriptor of the socket for requests, and the process with which this one ends."""
_ROOT = str(Path(__file__).parents[4])
"""Folder that this omniload is imported from; Python might find another one by itself."""
_RAYLET = "--raylet-name="
_RAYLET_PID = "RAY_RAYLET_PID"
_OF_NO_JOB = {"RAY_JOB_ID": "ffffffff"}
"""Job number that Ray gives to a worker which it starts before any job, and which can serve any job."""
BEFORE_RAY = (
    *("omniload.actors.address", "omniload.actors.answering_edits", "omniload.actors.planning"),
    *("omniload.actors.planner_journal", "omniload.machine.roster.members"),
    *("omniload.actors.roles.constructor", "omniload.actors.roles.loader"),
    *("omniload.actors.roles.planner", "omniload.actors.roles.planner_metrics"),
    # Modules of other packages that Ray and its workers load.
    *("argparse", "asyncio", "filelock", "google.protobuf.descriptor_pb2", "jsonschema", "psutil"),
    *("google.protobuf.json_format", "msgpack", "multiprocessing", "packaging.version", "pdb"),
    *("pydantic.v1.fields", "requests", "tarfile", "tqdm", "tqdm.auto", "yaml"),
    # Our own modules that a loader would load late, when it opens its sources.
    *("fsspec", "numpy.ma", "pyarrow.compute", "pyarrow.fs", "pyarrow.json"),
    *("omniload.source.formats.jsonl", "omniload.source.formats.parquet"),
)
"""Modules to load before the raylet exists. Ray comes later, because while loading it reads whose worker it is."""
_RAY = ("ray", "omniload.actors.ray.actors", "omniload.actors.ray.planner_actor")
"""Ray first, so that our modules find Ray loaded with its settings from the environment."""
_IN_EVERY_WORKER = ("ray._common.usage.usage_lib", "ray._private.arrow_serialization")
_ANSWERED_S = 90.0
"""Longest wait for the process to load and to fork. Ray gives up on a worker after 60 s, but two processes that load at
once would be no faster, and if the loaded process ends, the waiting workers notice."""
_ASKED_S = 5.0  # longest wait for the request after a connection
_LENGTH_BYTES = 4
_MOST_BYTES = 4 << 20  # size of a command line and an environment, of which Linux takes 2 MiB


def place_of(raylet: str) -> str:
    """Return the path of the socket where workers ask for a fork, derived from the path of their raylet's socket."""
    return f"{raylet}.roles"


def main() -> None:
    """Have a fork become Ray's worker in place of this process, or load the modules and become it."""
    del sys.path[0]  # the folder of this script, which Python has put first
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
        # A failing import is ignored here, because it fails again when an actor needs it, and Ray reports it then.
        with suppress(Exception):
            import_module(module)
    del sys.path[0]
    # From now on the collector neither reads nor writes these objects, so forks share their pages.
    gc.freeze()
    gc.enable()


def _is_forked() -> bool:
    """Ask for a fork in place of this process, with its command line and environment; return whether there is one."""
    places = [word.removeprefix(_RAYLET) for word in sys.argv if word.startswith(_RAYLET)]
    if len(places) != 1:  # Ray gives a worker this option exactly once
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
    """Load the modules, then fork a process for each request until the opener ends; return only in the forks."""
    ends = os.pidfd_open(opener)
    _load(BEFORE_RAY)
    with socket.socket(fileno=listener) as server:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for its forks
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
    """Load Ray for the raylet of the first worker that asks; return whether Ray is loaded and can be forked."""
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
    # In a fork, locks held by other Python threads stay locked forever. The threads of Arrow and numpy support forks.
    return _RAYLET_PID in os.environ and threading.active_count() == 1


def _stand_in(connection: socket.socket) -> None:
    """Take over the asking worker's arguments, environment, group and folders; end if that worker has given up."""
    connection.settimeout(_ASKED_S)
    try:
        with connection.makefile("rb") as words:
            length = int.from_bytes(words.read(_LENGTH_BYTES), "big")
            asked = json.loads(words.read(min(length, _MOST_BYTES)))
        sys.argv, environment, group, folder, sys.path[:] = asked
        os.chdir(folder)
        # Ray ends a worker through its process group.
        os.setpgid(0, group)
        connection.sendall(b"1")
    except (OSError, ValueError, TypeError):
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # numpy would draw the same numbers in every fork; Python reseeds its own generator


if __name__ == "__main__":
    main()
