"""Heartbeats of all hosts of a plane: this host's come from its folder, the others' through a role on each host."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.heartbeat_board import Board, FolderBoard
from omniload.actors.ray.answers import ask_head
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.finding import actor_named, newest_of
from omniload.actors.ray.given.namespaces import where
from omniload.base.errors import UnavailableError
from omniload.base.linux.network import host_id
from omniload.base.log import get_logger
from omniload.machine.progress import Progress

__all__ = ["HostsBoard", "boards_of"]

_ANSWER_S = 1.0
_LOG = get_logger(__name__)


class HostsBoard(Board):
    """Reads this host's heartbeats, and asks a role on each other host for the heartbeats of that host.

    If a host does not answer in time, its last heartbeats are returned again, marked as cut off. They grow old, and
    their age shows that the roles have stopped.
    """

    def __init__(
        self,
        here: FolderBoard,
        namespace: str,
        roles_away: Mapping[str, Sequence[str]],
        waited_for: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Read the folder of this host, and ask roles on the other hosts.

        Args:
            here: Heartbeats of this host.
            namespace: Namespace of the plane's actors.
            roles_away: Names of roles on each other host; any one of them can answer.
            waited_for: Names of roles on each host that are reported as cut off even if the host has never answered.
        """
        self._here, self._roles_away, self._waited_for = here, roles_away, waited_for or {}
        self._namespace = namespace
        self._began_s = time.monotonic()
        self._told: dict[str, dict[str, Progress]] = {}
        """Last heartbeats from each asked role, by name. A name that is missing from them belongs to a role that has
        ended."""
        self._late: dict[str, Any] = {}
        """Answers that are still outstanding, by role. A role that is stopped is not asked again meanwhile."""
        self._looked_for: dict[str, Future[Any]] = {}
        """Roles whose actors Ray's head has been asked for and has not returned yet."""

    @override
    def read(self) -> dict[str, Progress]:
        answers = self._answers()
        for role, (now_s, roles) in answers.items():
            # This is an upper limit of the difference: the answer took some time, by which the heartbeat looks younger.
            ahead_s = time.monotonic() - now_s
            found = [Progress.from_json(stored).moved(ahead_s) for stored in roles]
            self._told[role] = {progress.name: progress for progress in found}
        found = []
        for host, asked in self._roles_away.items():
            told = [p for role in asked for p in self._told.get(role, {}).values()]
            if not answers.keys() & set(asked):
                told = [replace(progress, is_cut_off=True) for progress in told]
                told += self._unheard(host) if not told else []
            found += told
        # This host's own heartbeats come last because no other host knows them better.
        found.sort(key=lambda p: p.beat_s)
        return {progress.name: progress for progress in found} | self._here.read()

    def _unheard(self, host: str) -> list[Progress]:
        """Return heartbeats that stand for the roles of a host that has never answered."""
        names = self._waited_for.get(host, ())
        return [
            Progress(name=name, pid=0, beat_s=self._began_s, tasks=(), is_cut_off=True)
            for name in names
        ]

    def _answers(self) -> dict[str, tuple[float, list[dict[str, Any]]]]:
        # An answer that arrived since the last read carries an old clock reading, so it is dropped and asked for anew.
        come = _come(list(self._late.values()), timeout_s=0.0)
        self._late = {role: answer for role, answer in self._late.items() if answer not in come}
        for role in chain(*self._roles_away.values()):
            if role not in self._late:
                try:
                    if role not in self._looked_for:
                        self._looked_for[role] = ask_head(partial(_newest, role, self._namespace))
                    actor = self._looked_for[role].result(_ANSWER_S)
                    self._late[role] = actor.heartbeats.remote()
                except FutureTimeoutError:
                    continue  # a waiting rank must be free to check that the opener is still there
                except (ValueError, UnavailableError, RayError) as error:
                    _LOG.debug("%s cannot be asked for heartbeats: %s", role, error)
                del self._looked_for[role]
        there = _come(list(self._late.values()), timeout_s=_ANSWER_S)
        come_by = {role: answer for role, answer in self._late.items() if answer in there}
        self._late = {role: self._late[role] for role in self._late.keys() - come_by.keys()}
        answers = {}
        for role, answer in come_by.items():
            try:
                answers[role] = ray.get(answer)
            except RayError as error:
                _LOG.debug("%s did not tell the heartbeats of its host: %s", role, error)
        return answers


def _come(asked: list[Any], *, timeout_s: float) -> list[Any]:
    """Return the answers that arrive within the timeout."""
    return ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0] if asked else []


def _newest(role: str, namespace: str) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Return the actor that began as a role, or the actor that replaced it."""
    try:
        return ray.get_actor(role, **where(namespace))
    except (ValueError, AssertionError):  # as in ``actor_named``
        # The list of all named actors is costly, so it is asked for only now: most roles are never replaced.
        return actor_named(newest_of(role, namespace) or role, namespace)


def boards_of(address: PlaneAddress, folder: Path) -> tuple[FolderBoard, Board]:
    """Return the board of this host, to post to, and the board of all hosts, to read."""
    here = FolderBoard(folder)
    roles_away = address.roles_away_from(host_id())
    waited_for = address.waited_for_away_from(host_id())
    if not roles_away:
        return here, here
    return here, HostsBoard(here, address.namespace, roles_away, waited_for)
