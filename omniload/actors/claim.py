"""A plane is opened once: by one process, for all ranks of its job.

Every rank that opens a plane of its own instead waits for ever: each plane waits for the
ranks that the other one serves.
"""

import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import StateError, UnavailableError, system_refusals
from omniload.base.linux.file_lock import FileLock, is_held_here, is_locked
from omniload.base.log import get_logger

__all__ = ["LOCK_NAME", "claim", "launch_of"]

LOCK_NAME = ".plane.lock"
"""File in the run's folder. It stays; what counts is the lock on it."""
_MOST_ASKING = 4096
"""Processes that are told who holds a name: the kernel keeps each that asked, for as long as the holder lives."""
_CREDENTIALS = struct.Struct("3i")
_MOMENT_S, _TRIES = 0.01, 100
_CHANGED_S = 60.0
"""Longest wait for a command that changes the mix of a run at rest: it may have to list a source."""
_LOG = get_logger(__name__)
_JOIN = (
    "end it if it is of a job before; give another job a run_dir of its own; and of one job leave rank= and "
    "world_size= of omniload.open to the launcher: rank 0 opens the plane, and the others join it"
)
_CLOSE = (
    "this process itself has it, by a loader that is not closed: go on with that one, or close() it before you open "
    "another, as where a cell of a notebook is run again; give another job a run_dir of its own"
)


def claim(spec: PlaneSpec, environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Take a plane: by its run's folder, and without one by the launch that this process is part of.

    A plane without either may be opened as often as one likes, and so may that of a single rank.

    Returns:
        A function that lets others open the plane; the kernel does so as well, with the end of the process.

    Raises:
        ConfigError: The run's folder cannot be used.
        StateError: The plane is open already; names the process that holds it.
        UnavailableError: Its mix is being changed, and that takes long.
    """
    if spec.run_dir is not None:
        return _locked(spec.run_dir).close
    launch = launch_of(environment)
    if launch is None or spec.tree.world_size == 1:
        return lambda: None
    # With mix and ranks: one launch may open several planes, one to train from and one to evaluate with.
    identity = f"{os.getuid()}\n{launch}\n{spec.tree!r}\n{spec.mix.model_dump_json()}"
    digest = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    held = _bound(f"\0omniload-plane-{digest}", launch)
    return (lambda: None) if held is None else held.close


def launch_of(environment: Mapping[str, str]) -> str | None:
    """Return what tells a launch of several processes from others on this machine; ``None`` outside of one."""
    for names in (("MASTER_ADDR", "MASTER_PORT"), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if all(environment.get(name) for name in names):
            found = (*names, "TORCHELASTIC_RUN_ID")
            return " ".join(f"{name}={environment.get(name, '')}" for name in found)
    return None


@system_refusals("the run's folder")
def _locked(run_dir: Path) -> FileLock:
    run_dir.mkdir(parents=True, exist_ok=True)
    place, until_s = run_dir / LOCK_NAME, time.monotonic() + _CHANGED_S
    changed = f"the mix of {run_dir} is being changed by a command, such as omniload mix add"
    waits = False
    while True:
        try:
            return FileLock(place)
        except BlockingIOError as error:
            if is_locked(place):
                # Nobody is to end the process that asks, as that of a notebook.
                remedy = _CLOSE if is_held_here(place) else _JOIN
                raise StateError(
                    f"the data plane of {run_dir} is open in {error.strerror}: {remedy}"
                ) from None
        if time.monotonic() > until_s:
            raise UnavailableError(
                f"{changed}, for {_CHANGED_S:.0f} s by now; open the data plane again once that command has ended, or "
                "end it"
            )
        if not waits:
            # By its kind: several may hold the lock at once, so none writes there which process it is.
            _LOG.warning("%s: waiting for at most %.0f s until it has ended", changed, _CHANGED_S)
            waits = True
        threading.Event().wait(_MOMENT_S)


def _bound(name: str, launch: str) -> socket.socket | None:
    """Take a name of the abstract namespace: no file, so nothing stays behind."""
    fault: OSError | None = None
    for _ in range(_TRIES):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(name)
            # So that whoever comes later can connect, and the kernel tells it which process this is.
            held.listen(_MOST_ASKING)
        except OSError as error:
            held.close()
            fault = error
        else:
            return held
        holder = _holder(name)
        if holder is not None:
            pid, uid = holder
            # A name that somebody else has taken keeps nobody from a plane of his own.
            if uid != os.getuid():
                break
            raise StateError(
                f"the data plane of this launch ({launch}) is open in process {pid} with the same mix and ranks: "
                f"{_CLOSE if pid == os.getpid() else _JOIN}"
            )
        # It has the name and does not listen yet, which a busy machine makes long; or has just ended, and it is free.
        threading.Event().wait(_MOMENT_S)
    _LOG.warning("whether the plane is open twice cannot be told: %s", fault)
    return None


def _holder(name: str) -> tuple[int, int] | None:
    """Return process and user that listen on a name; -1 where they cannot be told, ``None`` where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        # The holder takes nobody's connection, so a connect behind a full queue would wait for as long as it lives.
        asking.setblocking(False)
        try:
            asking.connect(name)
            raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            return None
        except OSError:
            return -1, -1
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
