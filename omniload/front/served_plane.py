"""A data plane in a process of its own, which ranks join and leave: ``omniload.serve``, ``omniload.join``.

::

    serve(mix, address=FOLDER) ── plane.json ──▶ FOLDER ──▶ join(FOLDER, rank=1, world_size=4) ── steps 0 to 16
         ▲                                                  resize(0, 3), on ranks that stay ── steps from 17 on
         └──────────── dp 3 from step 17 on ─────────────────────┘

The note in the folder holds the secret of the plane's Ray: it is for its owner alone, as the folder is. It counts as
long as its server has it locked, or to other hosts as long as that takes connections: one that was killed leaves its
note, and Ray waits minutes for what is not there. Hosts without a folder in common have it from a port of the server.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, Unpack

from pydantic import ValidationError
from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.lifeline import answers
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec, first_step_of
from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.extras import refuse_namesake
from omniload.base.linux.file_lock import FileLock, is_locked, locked
from omniload.base.linux.network import host_id
from omniload.base.reading import read_kept_file
from omniload.base.state import Json
from omniload.base.writing import write_whole
from omniload.client import Client
from omniload.front.arguments import (
    check_choices,
    check_timeout,
    require_rank,
    require_whole,
    steps_of,
)
from omniload.front.bringing_up import take_turn
from omniload.front.launch import Place
from omniload.front.loader import Loader, MixFacts, OpenClient, RunNotes
from omniload.front.opening import form_of, vocab_size_of
from omniload.front.rendezvous import Counter, told_at
from omniload.front.rows import Labels
from omniload.front.settings import Settings
from omniload.front.spec import kept_in, spec_of
from omniload.machine.messages import ResizeAsked
from omniload.mix.config import MixConfig

__all__ = ["ServedPlane", "join", "serve"]

_HOST_AND_PORT = re.compile(r"([^/\s:]+):(\d{1,5})")
_LIKE_A_PORT = re.compile(r"[]:][^/]*:\d+$|^\w+://")
"""An IPv6 address with a port, or a URL."""
_NOTE_NAME, _LOCK_NAME = "plane.json", "plane.lock"
_MOST_BYTES = 64 << 20
_LARGEST_PORT = 65_535
_LOOK_S = 0.1
_FAILED_S = 1.0
_ANSWER_S = 5.0
_ROOT = 0


class _Note(StrictModel):
    """What ranks need to join."""

    version: Literal[2] = 2
    plane: PlaneAddress
    token: str
    names: tuple[str, ...]
    vocab_size: int | None
    num_steps: int | None
    first_step: int
    repeats: bool
    run_dir: Path | None
    """Folder of the run, which keeps losses of documents."""


class ServedPlane:
    """A data plane that ranks of other processes join; its own process trains nothing. Use it in a ``with``."""

    def __init__(self, spec: PlaneSpec, address: str | Path) -> None:
        """Bring it up, and say where at ``address``.

        Raises:
            ConfigError: The folder or port cannot be used, or the mix is refused.
            StateError: Another process serves a plane there, or the state does not fit.
        """
        self._ended = threading.Event()
        self._opened = ExitStack()
        try:
            # First in, last out: the address is let go of when nothing of the plane is left.
            counter = None if (at := _port_of(address)) is None else Counter(*at)
            self._opened.callback((counter or _claimed(Path(address))).close)
            self._plane = self._opened.enter_context(open_ray_plane(spec))
            # Ray is there, and with it the secret that this process has made up.
            from omniload.actors.ray.tokens import token  # noqa: PLC0415 -- an extra

            note = _Note(
                plane=self._plane.address,
                token=token(),
                names=spec.mix.names,
                vocab_size=vocab_size_of(spec),
                num_steps=spec.num_steps,
                first_step=first_step_of(spec),
                repeats=spec.mix.mix.stop == "never",
                # Ranks join from working directories of their own.
                run_dir=None if spec.run_dir is None else spec.run_dir.resolve(),
            )
            content = note.model_dump_json().encode()
            if counter is not None:
                counter.tell(content)
                # Runs before the plane ends: nobody may join a plane that is closing.
                self._opened.callback(counter.close)
                return
            place = Path(address) / _NOTE_NAME
            write_whole(place, content, mode=0o600)
            # Held for as long as this process lives; whatever ends it, the kernel lets go.
            self._opened.enter_context(locked(place, writable=True))
            # Before the plane ends, as above.
            self._opened.callback(place.unlink, missing_ok=True)
        except BaseException:
            self._opened.close()
            raise

    def wait(self) -> None:
        """Serve until ``close`` is called, as by the handler of a signal.

        Raises:
            OmniloadError: The data plane has failed; ranks are told the same.
        """
        # A plane tells ranks of its failure; this process is not a rank, and has to ask.
        while not self._ended.wait(_FAILED_S):
            if (failure := self._plane.failure()) is not None:
                raise failure

    def close(self) -> None:
        """End the plane. To close again does nothing."""
        # First: a thread in ``wait`` would ask a plane that ends how it is.
        self._ended.set()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    mix: str | Path | Mapping[str, object] | MixConfig,
    *,
    address: str | Path,
    world_size: int = 1,
    state: Mapping[str, Json] | None = None,
    run_dir: str | Path | None = None,
    steps: int | None = None,
    **settings: Unpack[Settings],
) -> ServedPlane:
    """Bring up the data plane of a job whose ranks join and leave, in a process that is none of them.

    Args:
        mix: As for ``open``.
        address: A folder where ranks find it, made where it is missing; those of other hosts, where they see it and
            ``runtime.bind`` says where to listen. Or ``HOST:PORT`` of this host, where no folder is seen by all:
            whoever reaches that port may join.
        world_size: Ranks that there usually are.
        state: What a rank's ``state_dict`` returned, to continue from; with any number of ranks.
        run_dir: As for ``open``.
        steps: As for ``open``.
        **settings: As for ``open``.

    Raises:
        ConfigError: The mix, a setting or the folder is refused.
        StateError: ``state`` does not fit, or a plane is served there already.
    """
    refuse_namesake()
    require_whole("world_size", world_size, least=1)
    place = Place(dp_rank=0, dp_size=world_size)
    # Elastic whatever the mix says: its ranks come and go.
    spec = spec_of(mix, None, {**settings, "elastic": True}, "ray", place, 0)
    spec = replace(kept_in(run_dir, mix, spec), num_steps=steps_of(steps), state=state or None)
    return ServedPlane(spec, address)


def join(  # noqa: PLR0913 -- keywords of a call that users make
    address: str | Path,
    *,
    rank: int,
    world_size: int,
    step: int | None = None,
    generation: int | None = None,
    arrays: Literal["auto", "torch", "numpy"] = "auto",
    labels: Labels = "shifted",
    device: object = None,
    timeout: float = 120.0,
) -> Loader:
    """Join a plane that ``serve`` has brought up, or will in time; the first batch does so.

    Args:
        address: Its folder, or ``HOST:PORT``; as ``serve`` was given it.
        rank: Number of this rank among ``world_size``, from 0: each takes samples of its own.
        world_size: Ranks from ``step`` on; those that are there already call ``Loader.resize`` with the same number.
        step: First step of these ranks, which none of those before has committed; ``None`` for the ranks that the
            plane was served for, from its first step on.
        generation: Number of these ranks, rising with each change; ``None`` for those of now, and in the place of a
            rank that is gone for those that come next, where both are on the plane's host: on another it is given.
        arrays: As for ``open``.
        labels: As for ``open``.
        device: As for ``open``.
        timeout: Seconds to wait for the plane to be served.

    Raises:
        ConfigError: An argument is refused, or the plane is another user's, or listens on another host alone.
        UnavailableError: No plane is served there in time.
    """
    check_choices(labels=labels, arrays=arrays)
    check_timeout(timeout)
    require_rank(rank, world_size)
    # Now rather than with the first batch: it holds the names and sizes of the mix.
    note = _read(address, timeout)
    asked = _asked_of(note.plane, world_size, step, generation)
    facts = MixFacts(
        names=note.names,
        vocab_size=note.vocab_size,
        num_steps=note.num_steps,
        first_step=note.first_step if step is None else step,
        repeats=note.repeats,
        num_ranks=world_size,
    )
    form = form_of(arrays, labels, device)
    notes = None if note.run_dir is None else RunNotes(note.run_dir, rank)
    return Loader(_JoinServed(note, rank, asked), form, facts, notes=notes)


@dataclass(frozen=True, slots=True)
class _JoinServed(OpenClient):
    """Joins a plane that goes on without this rank."""

    note: _Note
    rank: int
    asked: ResizeAsked | None

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        if state is not None:
            raise ConfigError(
                "a rank that joins takes the step that comes next for all; give the state to omniload.serve"
            )
        from omniload.actors.ray.rank.joining import handle_in, node_for_rank  # noqa: PLC0415 -- an extra
        from omniload.actors.ray.tokens import use_given_token, use_token  # noqa: PLC0415

        # First: a process that has another plane open must keep that one's secret of Ray.
        take_turn(stack)
        plane, here = self.note.plane, host_id()
        if plane.host != here:
            node = stack.enter_context(closing(node_for_rank(plane, self.note.token)))
            plane = plane.with_node_on(here, node.place)
        elif self.note.token:
            use_token(self.note.token)
        else:
            use_given_token()
        is_connected = plane.host != here
        handle = handle_in(plane, self.rank, is_connected=is_connected, asked=self.asked)
        return stack.enter_context(Client(handle))


def _asked_of(
    plane: PlaneAddress, world_size: int, step: int | None, generation: int | None
) -> ResizeAsked | None:
    if step is None:
        if generation is not None or world_size != plane.sizes["dp"]:
            raise ConfigError(
                f"world_size is {world_size} and generation {generation}, of a plane that was served for "
                f"{plane.sizes['dp']} ranks; give step too, the first one that these ranks train on"
            )
        return None
    require_whole("step", step)
    if generation is not None:
        require_whole("generation", generation, least=1)
    return ResizeAsked(dp=world_size, step=step, generation=generation)


def _claimed(folder: Path) -> FileLock:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock beside the note: a note outlives a process that is killed, and the kernel lets go of its lock.
        return FileLock(folder / _LOCK_NAME)
    except BlockingIOError as error:
        raise StateError(
            f"{folder} is the address of a plane that {error.strerror} serves; close that one, or name another folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"address {str(folder)!r} cannot be used: {error.strerror}; name a folder that can be written"
        ) from error


def _port_of(address: str | Path) -> tuple[str, int] | None:
    """Return host and port that an address names; ``None`` for a folder.

    Raises:
        ConfigError: There is no such port.
    """
    found = _HOST_AND_PORT.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        # A folder of that name would be made on every host, and waited for in vain.
        if isinstance(address, str) and _LIKE_A_PORT.search(address) and not Path(address).exists():
            raise ConfigError(
                f"address is {address!r}, neither HOST:PORT with a name or an IPv4 address nor a folder that is there; "
                "planes listen on IPv4: give one of the two"
            )
        return None
    if not 0 < int(found[2]) <= _LARGEST_PORT:
        raise ConfigError(
            f"address is {address!r}; ports are 1 to {_LARGEST_PORT}: give one, or a folder"
        )
    return found[1], int(found[2])


def _read(address: str | Path, timeout_s: float) -> _Note:
    """Wait for the note of a plane that is served."""
    place, until_s = Path(address) / _NOTE_NAME, time.monotonic() + timeout_s
    at = _port_of(address)
    # It is written whole: as soon as it is there, it can be read.
    while (note := _note_at(place) if at is None else _note_from(*at, until_s)) is None:
        if time.monotonic() >= until_s:
            was = ", and the process that served one has ended, or does not answer"
            why = _unknown(at[0]) if at is not None else was if place.exists() else ""
            raise UnavailableError(
                f"no plane is served at {address} within {timeout_s:g} s{why}; start the "
                "process that calls omniload.serve; on another host, see that runtime.ports are open between them"
            )
        time.sleep(_LOOK_S)
    return note


def _unknown(host: str) -> str:
    """Say if no host has that name. Asked last: a host that is starting may get its name late."""
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError as error:
        return f", as no host {host} is known here ({error.strerror})"
    return ""


def _note_at(place: Path) -> _Note | None:
    """Return the note of a plane that is served now; ``None`` where there is none, or its server has ended."""
    try:
        owner = place.stat().st_uid
        # Whoever writes the note decides which Ray this process connects to, and so what runs in it.
        if owner not in (os.geteuid(), _ROOT):
            raise ConfigError(
                f"{place} is of user {owner}, this rank of {os.geteuid()}; name a folder of its own user"
            )
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="the address of a plane")
        note = _checked(content, str(place))
        return note if _is_served(note, place) else None
    except FileNotFoundError:
        return None


def _note_from(host: str, port: int, until_s: float) -> _Note | None:
    """Return the note that a server tells; ``None`` where it does not before ``until_s``."""
    content = told_at(host, port, max(_LOOK_S, until_s - time.monotonic()), _MOST_BYTES)
    return _checked(content, f"{host}:{port}") if content else None


def _checked(content: bytes, place: str) -> _Note:
    """Return a note, of a plane that this host can reach."""
    try:
        note = _Note.model_validate_json(content)
    except ValidationError as error:
        raise IntegrityError(
            f"{place} is no address of a plane that this release serves ({error.error_count()} faults); install one "
            "release everywhere"
        ) from error
    if note.plane.host != host_id() and note.plane.terms is None:
        raise ConfigError(
            f"the plane at {place} runs on another host, and listens on loopback; set runtime.bind in the mix that is "
            "served to an interface such as eth0, or a network such as 10.0.0.0/8"
        )
    return note


def _is_served(note: _Note, place: Path) -> bool:
    """Tell whether the process that has written a note lives."""
    if note.plane.host == host_id():
        return is_locked(place)
    # Locks of another host may not be seen here: a connection tells that its process lives.
    return answers(note.plane.lifeline, _ANSWER_S)
