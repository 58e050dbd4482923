"""Who may have a detached plane: one driver at a time, with the mix that the plane is of.

It has no clock and knows no Ray: the opener tells it the time, and which ranks are there.
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
"""How long a plane is kept for the driver that attached, until the first of its ranks has joined."""
_NUMBER = ".plane.id"
"""File of a run's folder: a number by chance, which tells it from another folder of its path on another host."""
_LETTERS, _WRITTEN_S, _LOOK_S = 32, 2.0, 0.02
LEFT_S = 5.0
"""Beside the silence of ranks on other hosts: how long a driver waits for the ranks of the one before to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attaching:
    """What a driver asks of the opener of a detached plane."""

    spec: PlaneSpec
    """The run, with the state that the driver goes on from."""
    identity: Mapping[str, str]
    """Of which mix, release and code it is, by names of what differs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the driver that ``runtime.env.pass_on`` names."""
    driver: str = ""
    """Which process of which host it is, for messages."""
    opener: str = ""
    """Name of the opener that is asked, which tells the run's folder; see ``opener_of``."""
    ticket: str = ""
    """Tells this asking from all others, however often it is sent."""

    @property
    def passed_on(self) -> str:
        """Digest of the variables: no value is kept."""
        text = json.dumps(sorted(self.environment.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def for_an_actor(self) -> Self:
        """Return it with folders, and a Ray, that are the same in an actor: in a working directory of its own."""
        spec = self.spec
        assert spec.run_dir is not None, "whoever opens a detached plane requires one"
        whole = replace(
            spec,
            base_dir=spec.base_dir.resolve(),
            run_dir=spec.run_dir.resolve(),
            cache_dir=None if spec.cache_dir is None else spec.cache_dir.resolve(),
        )
        # An actor is connected to its Ray already, by whatever address that has on its own node.
        runtime = spec.mix.runtime.model_copy(update={"address": "auto"})
        mix = spec.mix.model_copy(update={"runtime": runtime})
        return replace(self, spec=replace(whole, mix=mix))

    def require_same_folder(self, where: str) -> None:
        """Refuse a process that has another folder of this path than the driver, or none.

        Raises:
            StateError: It has.
        """
        run_dir = self.spec.run_dir
        assert run_dir is not None, "whoever opens a detached plane requires one"
        if opener_of(run_dir) != self.opener:
            raise StateError(
                f"{run_dir} is another folder for the opener of the detached data plane ({where}) than for "
                f"{self.driver}: give it a run_dir that both see under one path, as on a file system of the cluster"
            )


class Tenancy:
    """Of which mix a plane is, and which driver has it. For one thread at a time."""

    def __init__(self) -> None:
        """Begin with no plane."""
        self.driver = "nobody"
        """Which attached last, for messages."""
        self._identity: Mapping[str, str] = {}
        self._passed_on = self._ticket = ""
        self._leased_until_s = 0.0

    def why_wait(
        self, asked: Attaching, waited_s: float, ranks: Sequence[str], now_s: float
    ) -> str:
        """Return for whom a driver has to wait; empty where it is its turn.

        Args:
            asked: What it asks.
            waited_s: How long it has waited.
            ranks: Ranks that are there.
            now_s: The time.

        Raises:
            StateError: The plane is of another mix, or its ranks are those of a driver that stays.
        """
        self._refuse_another(asked)
        # An answer may be lost: whoever has the plane may ask once more.
        if asked.ticket == self._ticket:
            return ""
        names = ", ".join(ranks)
        if ranks and waited_s >= asked.spec.mix.runtime.silent_after + LEFT_S:
            raise StateError(
                f"the detached data plane of {asked.spec.run_dir} has ranks of another driver ({names}; attached by "
                f"{self.driver}), and {asked.driver} is to attach: end that one first, or give this job a run_dir of "
                "its own"
            )
        if ranks:
            return f"{names} of {self.driver} to be gone"
        if now_s < self._leased_until_s:
            return f"ranks of {self.driver}, which has attached, to join or for {LEASE_S:.0f} s to pass"
        return ""

    def opened(self, asked: Attaching) -> None:
        """Note of what a plane is that was opened."""
        self._identity, self._passed_on = dict(asked.identity), asked.passed_on

    def closed(self) -> None:
        """Note that there is no plane."""
        self._identity, self._ticket, self._leased_until_s = {}, "", 0.0

    def give(self, asked: Attaching, now_s: float) -> None:
        """Give the plane to a driver, whose ranks are to join."""
        self._ticket, self.driver, self._leased_until_s = (
            asked.ticket,
            asked.driver,
            now_s + LEASE_S,
        )

    def joined(self) -> None:
        """Note that a rank of the driver has joined: from now on its ranks say whether it is there."""
        self._leased_until_s = 0.0

    def driver_ended(self) -> None:
        """Note that the driver's process has ended: no rank of it is waited for."""
        self._leased_until_s = 0.0

    def has_other_variables(self, asked: Attaching) -> bool:
        """Tell whether roles of the plane were handed other values than this driver passes on."""
        return self._passed_on != asked.passed_on

    def _refuse_another(self, asked: Attaching) -> None:
        found, mine = self._identity, asked.identity
        differ = [key for key in {**mine, **found} if found.get(key) != mine.get(key)]
        if not (found and differ):
            return
        key, run_dir = differ[0], asked.spec.run_dir
        raise StateError(
            f"the detached data plane of {run_dir} is of another mix, or release: {key} is "
            f"{found.get(key, 'not given')}, here {mine.get(key, 'not given')}; end it by omniload mix stop {run_dir}, "
            "or open what it is of"
        )


def rank_names(spec: PlaneSpec) -> list[str]:
    """Return the names of all ranks of a run."""
    dp_size, cp_size = (spec.tree.size_of(axis) for axis in ("dp", "cp"))
    return [rank_name(dp, cp, cp_size) for dp in range(dp_size) for cp in range(cp_size)]


@system_refusals("the run's folder")
def opener_of(run_dir: Path, *, is_new: bool = False) -> str:
    """Return the name of the opener of a run: by the path of its folder, and the number that is written there.

    Args:
        run_dir: The folder.
        is_new: Whether one that has no number is given one.

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
        # Another driver may be writing it.
        while len(number := place.read_text(encoding="ascii")) < _LETTERS:
            if time.monotonic() >= until_s:
                raise StateError(f"{place} has {len(number)} of {_LETTERS} letters; remove it")
            threading.Event().wait(_LOOK_S)
    named = f"{number} {run_dir.resolve()}".encode()
    return f"opener-{hashlib.blake2b(named, digest_size=8).hexdigest()}"
