"""A data plane in a process of its own, which ranks join and leave: ``omniload.serve``, ``omniload.join``.

::

    serve(mix, address=FOLDER) ── plane.json ──▶ FOLDER ──▶ join(FOLDER, rank=1, world_size=4) ── steps 0 to 16
         ▲                                                  resize(0, 3), on ranks that stay ── steps from 17 on
         └──────────── dp 3 from step 17 on ─────────────────────┘

``plane_note`` describes the note that ranks find at the address, and when it is valid. ``served_rank`` describes how
they join.
"""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

from omniload.actors.address import PlaneAddress
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec, first_step_of
from omniload.base.errors import ConfigError, ShownAtOnce, StateError
from omniload.base.extras import refuse_namesake
from omniload.base.linux.file_lock import FileLock, locked
from omniload.base.linux.folders import whole_path
from omniload.base.state import Json
from omniload.base.writing import write_whole
from omniload.front.arguments import require_whole, steps_of
from omniload.front.launch import Place
from omniload.front.opening import vocab_size_of
from omniload.front.plane_note import NOTE_NAME, PlaneNote, port_of
from omniload.front.rendezvous import NoteServer
from omniload.front.settings import Settings
from omniload.front.spec import kept_in, spec_of
from omniload.mix.config import MixConfig

__all__ = ["ServedPlane", "serve"]

_LOCK_NAME = "plane.lock"
_FAILED_S = 1.0
"""Seconds between two checks of whether the plane has failed."""


class ServedPlane:
    """A data plane that ranks of other processes join; its own process trains nothing. Use it in a ``with``."""

    def __init__(self, spec: PlaneSpec, address: str | Path) -> None:
        """Bring up the plane, and announce it at ``address``.

        Raises:
            ConfigError: The folder or port cannot be used, or the mix is refused.
            StateError: Another process serves a plane at this address, or the state does not fit.
        """
        self._ended = threading.Event()
        self._opened = ExitStack()
        try:
            # First in, last out: the address is released when nothing of the plane is left.
            server = None if (at := port_of(address)) is None else NoteServer(*at)
            # An absolute path, because the serving process may change its folder before it closes.
            folder = Path() if server is not None else whole_path(address)
            self._opened.callback((server or _claimed(folder)).close)
            self._plane = self._opened.enter_context(open_ray_plane(spec))
            note = _note_of(self._plane.address, spec).model_dump_json().encode()
            # Everything entered from here on ends before the plane does: no rank may join a plane that is closing.
            if server is not None:
                server.serve(note)
                self._opened.callback(server.close)
            else:
                self._leave_note(folder / NOTE_NAME, note)
        except BaseException:
            self._opened.close()
            raise

    def _leave_note(self, place: Path, note: bytes) -> None:
        """Write the note, and hold its lock, which the kernel releases when this process ends in any way."""
        write_whole(place, note, mode=0o600)
        self._opened.enter_context(locked(place, writable=True))
        self._opened.callback(place.unlink, missing_ok=True)

    def wait(self) -> None:
        """Serve until ``close`` is called, for example by a signal handler.

        Raises:
            OmniloadError: The data plane has failed; ranks get the same error.
        """
        # A plane reports its failure to ranks. This process is not a rank, so it has to ask.
        while not self._ended.wait(_FAILED_S):
            if (failure := self._plane.failure()) is not None:
                raise failure

    def close(self) -> None:
        """End the plane. A second call does nothing."""
        # First, because a thread in ``wait`` would ask a plane that is ending.
        self._ended.set()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@ShownAtOnce()
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
    """Bring up the data plane of a job whose ranks join and leave, in a process that is not one of its ranks.

    Args:
        mix: As for ``open``.
        address: A folder in which ranks find the plane; it is created if it is missing. Ranks on other hosts need to
            see the folder, and ``runtime.bind`` then says where to listen. Without a shared folder, ``HOST:PORT`` of
            this host: any process that reaches the port may join.
        world_size: Usual number of ranks.
        state: Result of a rank's ``state_dict``, to continue from, with any number of ranks.
        run_dir: As for ``open``.
        steps: As for ``open``.
        **settings: As for ``open``.

    Raises:
        ConfigError: The mix, a setting or the folder is refused.
        StateError: ``state`` does not fit, or a plane is served at this address already.
    """
    refuse_namesake()
    require_whole("world_size", world_size, least=1)
    place = Place(dp_rank=0, dp_size=world_size)
    # Elastic whatever the mix says, because its ranks come and go.
    spec = spec_of(mix, None, {**settings, "elastic": True}, "ray", place, 0)
    spec = replace(kept_in(run_dir, mix, spec), num_steps=steps_of(steps), state=state or None)
    return ServedPlane(spec, address)


def _note_of(address: PlaneAddress, spec: PlaneSpec) -> PlaneNote:
    """Return the note that ranks need to join a plane that is up."""
    # Ray has started by now, and with it the secret that this process has generated.
    from omniload.actors.ray.tokens import token  # noqa: PLC0415 -- an extra

    return PlaneNote(
        plane=address,
        token=token(),
        names=spec.mix.names,
        vocab_size=vocab_size_of(spec),
        num_steps=spec.num_steps,
        first_step=first_step_of(spec),
        repeats=spec.mix.mix.stop == "never",
        # Ranks join from working directories of their own.
        run_dir=None if spec.run_dir is None else spec.run_dir.resolve(),
    )


def _claimed(folder: Path) -> FileLock:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A lock next to the note: the note remains if its process is killed, but the kernel releases the lock.
        return FileLock(folder / _LOCK_NAME)
    except BlockingIOError as error:
        raise StateError(
            f"{folder} is the address of a plane that {error.strerror} serves; close that one, or name another folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"address {str(folder)!r} cannot be used: {error.strerror}; name a folder that can be written"
        ) from error
