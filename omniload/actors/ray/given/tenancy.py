"""Decides who may use a detached plane: one driver at a time, and only with the plane's mix.

This module has no clock and does not use Ray. The opener passes in the time and the present ranks.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import StateError, system_refusals
from omniload.machine.progress import rank_name

__all__ = ["LEASE_S", "LEFT_S", "Attaching", "Tenancy", "opener_of", "rank_names"]

LEASE_S = 60.0
"""How long a plane is reserved for the driver that attached, until its first rank joins."""
_NUMBER = ".plane.id"
"""File in a run's folder with a random number, which distinguishes it from a folder of the same path on another
host."""
_LETTERS, _WRITTEN_S, _LOOK_S = 32, 2.0, 0.02
LEFT_S = 5.0
"""How long a driver waits for the previous driver's ranks to go, in addition to the allowed silence of ranks on other
hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attaching:
    """Request of a driver to the opener of a detached plane."""

    spec: PlaneSpec
    """The run, with the state that the driver continues from."""
    identity: Mapping[str, str]
    """Mix, release and code of the driver, by the names used to report a difference."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the driver's environment that ``runtime.env.pass_on`` names."""
    driver: str = ""
    """Process and host of the driver, for messages."""
    opener: str = ""
    """Name of the asked opener, which identifies the run's folder; see ``opener_of``."""
    ticket: str = ""
    """Identifier of this request, the same however often the request is sent."""

    @property
    def passed_on(self) -> str:
        """Digest of the variables, so that no value is kept."""
        text = json.dumps(sorted(self.environment.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def for_an_actor(self) -> Self:
        """Return the request with absolute folders and a Ray address that are valid in an actor's working directory."""
        spec = self.spec
        assert spec.run_dir is not None, "whoever opens a detached plane requires one"
        whole = replace(
            spec,
            base_dir=spec.base_dir.resolve(),
            run_dir=spec.run_dir.resolve(),
            cache_dir=None if spec.cache_dir is None else spec.cache_dir.resolve(),
        )
        # An actor is already connected to its Ray, whose address may be different on the actor's node.
        runtime = spec.mix.runtime.model_copy(update={"address": "auto"})
        mix = spec.mix.model_copy(update={"runtime": runtime})
        return replace(self, spec=replace(whole, mix=mix))

    def require_same_folder(self, where: str) -> None:
        """Refuse a process for which the run's folder is missing or is another folder than the driver's.

        Raises:
            StateError: The folder is missing or different.
        """
        run_dir = self.spec.run_dir
        assert run_dir is not None, "whoever opens a detached plane requires one"
        if opener_of(run_dir) != self.opener:
            raise StateError(
                f"{run_dir} is a different folder for the opener of the detached data plane ({where}) than for "
                f"{self.driver}: choose a run_dir that both see under one path, as on a cluster's file system"
            )


class Tenancy:
    """The mix of a plane, and the driver that uses the plane. For one thread at a time."""

    def __init__(self) -> None:
        """Begin without a plane."""
        self.driver = "nobody"
        """Driver that attached last, for messages."""
        self._identity: Mapping[str, str] = {}
        self._passed_on = self._ticket = ""
        self._leased_until_s = 0.0

    def why_wait(
        self, asked: Attaching, waited_s: float, ranks: Sequence[str], now_s: float
    ) -> str:
        """Return what a driver must wait for; empty if it is the driver's turn.

        Args:
            asked: The driver's request.
            waited_s: How long the driver has waited.
            ranks: Ranks that are present.
            now_s: Present time.

        Raises:
            StateError: The plane is of another mix, or its ranks belong to a driver that stays.
        """
        self._refuse_another(asked)
        # An answer may be lost, so the driver that has the plane may ask again.
        if asked.ticket == self._ticket:
            return ""
        names = ", ".join(ranks)
        if ranks and waited_s >= asked.spec.mix.runtime.silent_after + LEFT_S:
            raise StateError(
                f"the detached data plane of {asked.spec.run_dir} has ranks of another driver ({names}; attached by "
                f"{self.driver}), so {asked.driver} cannot attach: end that driver first, or give this job a run_dir "
                "of its own"
            )
        if ranks:
            return f"{names} of {self.driver} to be gone"
        if now_s < self._leased_until_s:
            return f"ranks of {self.driver}, which has attached, to join or for {LEASE_S:.0f} s to pass"
        return ""

    def opened(self, asked: Attaching) -> None:
        """Note the identity of the plane that was opened."""
        self._identity, self._passed_on = dict(asked.identity), asked.passed_on

    def closed(self) -> None:
        """Note that there is no plane."""
        self._identity, self._ticket, self._leased_until_s = {}, "", 0.0

    def give(self, asked: Attaching, now_s: float) -> None:
        """Give the plane to a driver, whose ranks will join."""
        self._ticket, self.driver, self._leased_until_s = (
            asked.ticket,
            asked.driver,
            now_s + LEASE_S,
        )

    def joined(self) -> None:
        """Note that a rank of the driver has joined: from now on, its ranks show whether the driver is present."""
        self._leased_until_s = 0.0

    def driver_ended(self) -> None:
        """Note that the driver's process has ended, so that the plane is not reserved for its ranks any more."""
        self._leased_until_s = 0.0

    def has_other_variables(self, asked: Attaching) -> bool:
        """Return whether the plane's roles received other values than this driver passes on."""
        return self._passed_on != asked.passed_on

    def _refuse_another(self, asked: Attaching) -> None:
        found, mine = self._identity, asked.identity
        differ = [key for key in {**mine, **found} if found.get(key) != mine.get(key)]
        if not (found and differ):
            return
        key, run_dir = differ[0], asked.spec.run_dir
        raise StateError(
            f"the detached data plane of {run_dir} has another mix or release: {key} is "
            f"{found.get(key, 'not given')}, here {mine.get(key, 'not given')}; end it by omniload mix stop "
            f"{run_dir}, or open it with the mix and release that it has"
        )


def rank_names(spec: PlaneSpec) -> list[str]:
    """Return the names of all ranks of a run."""
    dp_size, cp_size = (spec.tree.size_of(axis) for axis in ("dp", "cp"))
    return [rank_name(dp, cp, cp_size) for dp in range(dp_size) for cp in range(cp_size)]


@system_refusals("the run's folder")
def opener_of(run_dir: Path, *, is_new: bool = False) -> str:
    """Return the name of a run's opener, made of the folder's path and the number written in the folder.

    Args:
        run_dir: The run's folder.
        is_new: Whether to write a number into a folder that has none.

    Raises:
        StateError: The folder cannot be used.
    """
    place, number = run_dir / _NUMBER, ""
    if is_new:
        run_dir.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), place.open("x", encoding="ascii") as file:
            file.write(secrets.token_hex(_LETTERS // 2))
    until_s = time.monotonic() + _WRITTEN_S
    with suppress(FileNotFoundError):
        # Another driver may be writing the number.
        while len(number := place.read_text(encoding="ascii")) < _LETTERS:
            if time.monotonic() >= until_s:
                raise StateError(f"{place} has {len(number)} of {_LETTERS} letters; remove it")
            threading.Event().wait(_LOOK_S)
    named = f"{number} {run_dir.resolve()}".encode()
    return f"opener-{hashlib.blake2b(named, digest_size=8).hexdigest()}"
