"""A directory of nodes as a named Ray actor, and the process that speaks with it for one node.

``python -m snapshot.image.peer_ray``: its node on standard input as one line of JSON; whenever
the list of nodes changes, that list goes to standard output, one line of JSON each. It is a
process of its own because Ray ends a process whose cluster is lost, and a mount must not end.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from omniload.base.clock import Clock, SystemClock
from snapshot.image.peer_directory import NodeJoined, NodeLeft, PeerDirectory, Ticked

__all__ = ["DirectoryActor", "directory_actor", "main", "members_of", "run"]

ACTOR, NAMESPACE = "omniload-peers", "omniload"
SOON_S, LATER_S = 0.5, 5.0
"""Between two questions: at first nodes start together, later they come and go."""
_SOON = 20
"""Questions that are asked soon after each other."""
_ANSWER_WITHIN_S = 10.0


class DirectoryActor:
    """Carries what nodes say to a ``PeerDirectory``. Decides nothing."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._directory = PeerDirectory()

    def join(self, name: str, group: str, blobs: Sequence[str]) -> list[str]:
        """Note a node, if it has a name, and return those that know one of its layers."""
        now_s = self._clock.now_s()
        self._directory.handle(Ticked(now_s))
        if name:
            self._directory.handle(NodeJoined(name, group, frozenset(blobs), now_s))
        return list(self._directory.who(group, blobs))

    def leave(self, name: str, group: str) -> None:
        """Forget a node."""
        self._directory.handle(NodeLeft(name, group))


def directory_actor() -> Any:  # noqa: ANN401 -- Ray's handle
    """Return the directory of this cluster, made if it is not there; it outlives who made it."""
    options = {"name": ACTOR, "namespace": NAMESPACE, "lifetime": "detached"}
    # It may be restarted at any time: its nodes tell it all again.
    made = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(DirectoryActor)
    return made.options(**options, get_if_exists=True).remote()


def members_of(actor: Any, node: dict[str, Any]) -> list[str]:  # noqa: ANN401 -- Ray's handle
    """Tell the directory of a node, and return whom it names."""
    asked = actor.join.remote(node["name"], node["group"], node["blobs"])
    found: list[str] = ray.get(asked, timeout=_ANSWER_WITHIN_S)
    return found


def run(
    ask: Callable[[], list[str]], ended: threading.Event, waits_s: Iterator[float]
) -> Iterator[dict[str, Any]]:
    """Ask until it is ended; yield what is new: ``members``, or a ``problem`` once until it is over."""
    last: list[str] | None = None
    in_trouble = False
    for wait_s in waits_s:
        try:
            members = ask()
        except (RayError, ValueError, OSError, RuntimeError) as error:
            if not in_trouble:
                yield {"problem": f"{type(error).__name__}: {error}"[:500]}
            in_trouble = True
        else:
            if members != last or in_trouble:
                yield {"members": members}
            last, in_trouble = members, False
        if ended.wait(wait_s):
            return


def main() -> None:
    """Join, tell whom the directory names, and leave when standard input ends."""
    node = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True, name="omniload-peers-end").start()
    handle: list[Any] = []

    def ask() -> list[str]:
        if not ray.is_initialized():
            ray.init(
                address=node["address"],
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
            )
        if not handle:
            handle.append(directory_actor())
        try:
            return members_of(handle[0], node)
        except RayError:
            handle.clear()  # a directory that is gone for good is made anew
            raise

    for told in run(ask, ended, _waits()):
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    if handle and node["name"]:
        with suppress(RayError):
            ray.get(handle[0].leave.remote(node["name"], node["group"]), timeout=2.0)
    os._exit(0)  # what Ray would still do at its end may wait for a cluster that is gone


def _waits() -> Iterator[float]:
    for _ in range(_SOON):
        yield SOON_S
    while True:
        yield LATER_S


if __name__ == "__main__":
    main()
