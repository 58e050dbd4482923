"""A node's side of a directory of peers: starts the process that speaks with it, keeps what it says."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from omniload.base.errors import ConfigError
from omniload.base.extras import install_line
from omniload.base.log import get_logger

__all__ = ["JOINED_WITHIN_S", "JoinedPeers", "check_ray"]

_log = get_logger(__name__)

JOINED_WITHIN_S = 10.0
"""How long a start waits for the directory before it goes on with the registry alone."""
_LONGEST_LINE = 64 << 20
_GONE_WITHIN_S = 3.0


def check_ray() -> None:
    """Say what to install where there is no Ray.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"peers=ray needs the package ray; {install_line('ray')}")


class JoinedPeers:
    """The peers that a directory names, as they come and go.

    A directory that cannot be reached costs a warning: the last list it gave holds, none at first.

    Args:
        address: Of the cluster: ``auto``, or ``ray://HOST:PORT``.
        name: Where others reach this node; empty for one that serves nobody.
        group: Of its token.
        blobs: Layers of its image.
        line: The process that asks.
    """

    def __init__(
        self,
        address: str,
        name: str,
        group: str,
        blobs: Sequence[str],
        *,
        line: Sequence[str] = (sys.executable, "-m", "snapshot.image.peer_ray"),
    ) -> None:
        self._members: tuple[str, ...] = ()
        self._answered = threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        node = {"address": address, "name": name, "group": group, "blobs": list(blobs)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it ended already: the reader finds out
            self._process.stdin.write(json.dumps(node) + "\n")
            self._process.stdin.flush()
        self._closing = False
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="omniload-peers", daemon=True
        )
        self._reader.start()

    def members(self) -> tuple[str, ...]:
        """Return whom the directory named last."""
        return self._members

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when the directory has answered, or said why it does not; False where it is late."""
        timeout_s = JOINED_WITHIN_S if timeout_s is None else timeout_s
        if not self._answered.wait(timeout_s):
            _log.warning(
                "the directory of peers has not answered in %.0f s; going on with the registry "
                "until it does",
                timeout_s,
            )
            return False
        return True

    def close(self) -> None:
        """Leave the directory, and end the process that speaks with it."""
        self._closing = True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self, said: IO[str]) -> None:
        with said:
            while line := said.readline(_LONGEST_LINE):
                try:
                    self._take(json.loads(line))
                except (ValueError, TypeError, AttributeError):
                    _log.debug("not understood: %.200r", line)  # a library may print, too
        if not self._closing:
            _log.warning(
                "the process that asks the directory of peers has ended; %d peers stay known",
                len(self._members),
            )
        self._answered.set()

    def _take(self, told: dict[str, Any]) -> None:
        if (problem := told.get("problem")) is not None:
            _log.warning(
                "no directory of peers: %s; going on with the registry and %d known peers",
                problem,
                len(self._members),
            )
            self._answered.set()
        elif "members" in told:
            members = tuple(map(str, told["members"]))
            came, left = set(members) - set(self._members), set(self._members) - set(members)
            _log.info("%d peers; %d new, %d gone", len(members), len(came), len(left))
            self._members = members
            self._answered.set()
