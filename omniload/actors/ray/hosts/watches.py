"""Observes the members of other hosts, each through a watch on its own host.

::

    keeper ── look at these, of which I know those as stopped ──▶ HostWatch, a process on each host that has members
           ◀── what has changed, or after half a second what is so ──  /proc, and the heartbeats in the host's folder

The keeper makes two calls a second to each host, however many members the host has. If a host does not answer, nothing
new is known of its members: those last reported as stopped still count as stopped, and no member there counts as
silent.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omniload.actors.ray.answers import future_of
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.hosts.watch import Looked
from omniload.actors.ray.processes import Process
from omniload.base.log import get_logger
from omniload.machine.progress import Progress

__all__ = ["Later", "Watches"]

_FRESH_S = 2.5
"""Greatest age of an answer when the next one arrives, from a host that is in reach and not too busy."""
_SILENT_S, _BEGINS_S = 2.0, 120.0
"""Time without an answer after which a watch is lost, or failed to begin. These limits may be long: only a member that
stops at the same time as its watch goes unnoticed meanwhile."""
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 60.0
"""Pause before another watch is started. It doubles until a watch answers more than once. A watch that is silent for
the first time is replaced immediately."""
_COUNTED_S = 0.5
"""A longer time between two looks means that the keeper's own process did not run, so it says nothing about a watch."""
_LINGERS_S = 60.0
"""Time that a host without members keeps its watch, because the successor of a lost member may start there again."""
_BEGUN_AT_ONCE = 8
"""Most watches started at one look, because each start takes the keeper some milliseconds."""
_LOG = get_logger(__name__)

Later = Callable[[Callable[[], None]], None]
"""Has a call made in the thread that looks."""


@dataclass(slots=True)
class _Host:
    """A node with members, according to the last answer of its watch."""

    since_s: float
    """Time when a member last came or went."""
    board: Path | None = None
    """Folder on the node for the heartbeats of members that post theirs there."""
    members: dict[str, Process] = field(default_factory=dict)
    stopped: frozenset[str] = frozenset()
    beats: Mapping[str, Progress] = field(default_factory=dict)
    watch: Any = None
    waits_s: float | None = None
    """Seconds that the current question has waited; ``None`` without a question."""
    heard_s: float | None = None
    """Time of the watch's last answer; ``None`` before the first."""
    begin_at_s: float = float("-inf")
    rest_s: float = _FIRST_REST_S


class Watches:
    """Observes the members of other hosts. For one thread, which also handles the answers."""

    def __init__(self, begin: Callable[[str], Any]) -> None:
        """Begin without hosts; ``begin`` starts the watch of a node."""
        self._begin = begin
        self._hosts: dict[str, _Host] = {}
        self._looked_s = float("-inf")

    def add(self, name: str, process: Process, board: Path | None) -> None:
        """Observe a member on another host from now on, and its heartbeats if it posts them in a folder there."""
        host = self._hosts.setdefault(process.node, _Host(time.monotonic()))
        # Shadows run next to constructors, and have no folder there.
        host.board, host.since_s = board or host.board, time.monotonic()
        host.members[name] = process

    def forget(self, name: str) -> None:
        """Stop observing a member that has ended."""
        for host in self._hosts.values():
            if host.members.pop(name, None) is not None:
                host.since_s = time.monotonic()

    def look(self, now_s: float, later: Later) -> None:
        """Ask the watch of each host with members that has no open question; start missing watches.

        Args:
            now_s: Time of a monotonic clock.
            later: Has a call made in the one thread.
        """
        counted_s, begun = min(now_s - self._looked_s, _COUNTED_S), 0
        self._looked_s = now_s
        for node, host in list(self._hosts.items()):
            if host.waits_s is not None:
                host.waits_s += counted_s
                limit_s = _BEGINS_S if host.heard_s is None else _SILENT_S
                if host.waits_s >= limit_s:
                    self._lose(node, host, f"no answer for {limit_s:.0f} s")
            elif not host.members:  # the lost members may have been on a host that is gone
                if now_s - host.since_s >= _LINGERS_S:
                    del self._hosts[node]
            elif host.watch is not None:
                self._ask(node, host, later)
            elif now_s >= host.begin_at_s and begun < _BEGUN_AT_ONCE:
                begun += 1
                host.watch, host.heard_s = self._begin(node), None
                self._ask(node, host, later)

    def stopped(self) -> frozenset[str]:
        """Return the names of members whose processes are stopped, according to the last answers."""
        return frozenset[str]().union(*(h.stopped & h.members.keys() for h in self._hosts.values()))

    def beats(self, now_s: float) -> dict[str, Progress]:
        """Return heartbeats of members on hosts that answer, each by the clock of its host."""
        answering = [
            host
            for host in self._hosts.values()
            if host.heard_s is not None and now_s - host.heard_s < _FRESH_S
        ]
        return {n: beat for h in answering for n, beat in h.beats.items() if n in h.members}

    def _ask(self, node: str, host: _Host, later: Later) -> None:
        host.waits_s, watch = 0.0, host.watch
        asked = watch.look.remote(dict(host.members), host.stopped, host.board)
        answer = future_of(asked, node)
        answer.add_done_callback(lambda done: later(partial(self._hear, node, watch, done)))

    def _hear(self, node: str, watch: Any, done: "Future[Looked]") -> None:  # noqa: ANN401 -- Ray's handles have no type
        host = self._hosts.get(node)
        if host is None or host.watch is not watch:
            return  # another watch is asked now
        if (error := done.exception()) is not None:
            self._lose(node, host, str(error), has_ended=True)
            return
        host.stopped, roles = done.result()
        host.beats = {beat.name: beat for beat in map(Progress.from_json, roles)}
        # On a host that is too busy, each new watch may answer once as it begins. Therefore only a second answer ends
        # the doubling of pauses.
        if host.heard_s is not None:
            host.rest_s = _FIRST_REST_S
        host.waits_s, host.heard_s = None, time.monotonic()

    def _lose(self, node: str, host: _Host, why: str, *, has_ended: bool = False) -> None:
        """Drop a watch, and start another after a pause: the host may be gone, cut off or too busy."""
        rest_s, lost = host.rest_s, host.watch
        # If the host is gone, the ends of its members are reported at the same time.
        is_first = rest_s == _FIRST_REST_S
        is_told = not host.members or is_first
        if is_first and not has_ended:
            rest_s = 0.0
        level = logging.INFO if is_told else logging.WARNING
        what = "no process looks for stopped processes on node %s until a new watch starts in %.0f s: %s"
        _LOG.log(level, what, node, rest_s, why)
        host.watch = host.waits_s = None
        host.begin_at_s = time.monotonic() + rest_s
        host.rest_s = min(2 * host.rest_s, _LONGEST_REST_S)
        with suppress(RayError):  # a stopped watch would otherwise remain forever
            ray.kill(lost, no_restart=True)
