"""Which Ray ``runtime.address`` means: ``auto`` is one of this machine, but none that omniload started for a job."""

import os
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from omniload.actors.lifeline import answers
from omniload.actors.ray.answers import ask_head, wait_for_future
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.reaper import FOLDERS
from omniload.base.clock import Deadline
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = ["address_meant", "choose", "require_listening", "require_same"]

_LOG = get_logger(__name__)
_REACHED_S = 5.0
"""Longest wait until the head at another address reports which Ray it belongs to."""
_LISTENS_S, _LOOK_S = 30.0, 0.5
"""Longest wait until a head listens, and the time between looks."""
_IS_PORT = re.compile(r"^[^/]*:\d+$")
"""An address of host and port, unlike ``auto`` or the address of a client of Ray."""
_HEAD, _SOCKET = b"--gcs-address=", b"--raylet_socket_name="


def address_meant(asked: str) -> str:
    """Return the address of the Ray to join; ``auto`` remains where Ray's own search cannot go wrong.

    That search takes any Ray whose processes run on this machine, if ``ray start`` has noted none in the folder of
    temporary files, as with ``--temp-dir``. The Ray that it takes may be the one of another job.

    Raises:
        ConfigError: It is unclear which of several Rays is meant.
    """
    if asked != "auto":
        return asked
    if named := os.environ.get("RAY_ADDRESS"):  # Ray itself takes the variable before anything else
        return named
    try:
        noted = import_module("ray._private.utils").read_ray_address()
    except (ImportError, AttributeError) as error:
        _LOG.debug("which Ray was started last is not known: %s", error)
        return asked
    return choose(_found(Path("/proc")), noted)


def choose(found: Mapping[str, str], noted: str | None) -> str:
    """Return the address that ``auto`` means.

    Args:
        found: Socket of the node of each Ray that runs on this machine, by the address of its head.
        noted: Address that the last ``ray start`` noted, whether or not that Ray still runs.

    Returns:
        An address, or ``auto`` if no process of a Ray can be seen, as in a container beside it.

    Raises:
        ConfigError: Several Rays run, and none is the noted one; or only Rays of other jobs do.
    """
    given = sorted(each for each, place in found.items() if not _is_private(place))
    if not found:
        return "auto"
    if noted and (noted in given or not given):
        return noted
    if len(given) == 1:
        return given[0]
    if given:
        raise ConfigError(
            f"runtime.address is 'auto', but {len(given)} Rays run on this machine ({', '.join(given)}), and ray start "
            "has noted none of them as the latest; name one: runtime.address HOST:PORT, or RAY_ADDRESS"
        )
    raise ConfigError(
        "runtime.address is 'auto', but the only Rays on this machine are those that omniload started for other jobs; "
        "start one with 'ray start --head' on this machine or join it to the cluster, or leave runtime.address out"
    )


def require_listening(address: str, within_s: float = _LISTENS_S) -> None:
    """Wait for a head to accept connections, as one does that is just being started.

    Without this, Ray tries for minutes and says nothing, even if the port is wrong; other ranks give up before it.

    Raises:
        UnavailableError: Nothing accepts a connection there.
    """
    deadline = Deadline(within_s)
    while _IS_PORT.search(address) and not answers(address, _REACHED_S):
        if deadline.left_s() <= 0:
            raise UnavailableError(
                f"the Ray at {address}: nothing has accepted a connection there for {within_s:.0f} s; start its head, "
                "or correct runtime.address or RAY_ADDRESS ('ray start --head' prints the address), or open the port "
                "in the firewall"
            )
        threading.Event().wait(_LOOK_S)


def require_same(address: str) -> None:
    """Refuse an address of another Ray than the connected one: a process can be connected to only one at a time.

    Raises:
        StateError: ``address`` names another Ray.
    """
    here = str(ray.get_runtime_context().gcs_address)
    if address == "auto" or _numbers_of(address) == _numbers_of(here):
        return
    if not _leads_here(address):
        raise StateError(
            f"this process is connected to the Ray at {here}, but runtime.address names the Ray at {address}; connect "
            "the process to that Ray (ray.init), or set runtime.address to the Ray of this process, or to auto"
        )


def _found(processes: Path) -> dict[str, str]:
    """Return the socket of the node of each Ray that has one on this machine, by the address of its head."""
    found = dict[str, str]()
    for process in processes.glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or hidden from this user
            words = (process / "cmdline").read_bytes().split(b"\0")
            if Path(os.fsdecode(words[0])).name == "raylet":
                head, place = (_value(words, key) for key in (_HEAD, _SOCKET))
                if head:
                    found[head] = place
    return found


def _is_private(place: str) -> bool:
    """Return whether a node of Ray has its socket in the folder of a plane, as each that omniload has started."""
    return any(part.startswith(FOLDERS) for part in Path(place).parts)


def _value(words: list[bytes], key: bytes) -> str:
    return next((os.fsdecode(word.removeprefix(key)) for word in words if word.startswith(key)), "")


def _numbers_of(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with suppress(OSError):  # this host cannot resolve the name, so it is compared as written
        host = socket.gethostbyname(host)
    return host, port


def _leads_here(address: str) -> bool:
    """Return whether an address is another name of the connected head, which shows by the identifier of its Ray."""
    if not answers(address, _REACHED_S):  # otherwise Ray tries for 40 s
        return False
    try:
        own = import_module("ray._private.worker").global_worker.gcs_client.cluster_id
        client = import_module("ray._raylet").GcsClient
        asked = ask_head(lambda: client(address=address).cluster_id)
        return wait_for_future(asked, _REACHED_S, lambda: None) and asked.result() == own
    except (ImportError, AttributeError, RayError) as error:
        _LOG.debug("which Ray is at %s is not known: %s", address, error)
        return False
