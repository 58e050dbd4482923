"""A loader's part in workers that ranks of a machine share; the ranks find each other by a name in the kernel.

The first rank starts the server under that name. The name is in the abstract namespace of Unix sockets, so there is no
file on a disk, nothing is left behind, and the name is valid only on one machine (one network namespace). Server and
client check each other by the user that the kernel records for both.
"""

import errno
import hashlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from torch import multiprocessing
from typing_extensions import override

from omniload.actors.claim import launch_of
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.linux.parent_watch import has_ended
from omniload.base.linux.socket_peer import peer_of
from trainer_integration.loader.shared.iterator import Client
from trainer_integration.loader.shared.server import START_S, Setup, serve
from trainer_integration.loader.shared.worker import Work

__all__ = ["Share", "address_of"]

_made = itertools.count()
"""Counter of this process's loaders that share: ranks that make them in the same order need no names."""
_AGAIN_S = 0.02


def address_of(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of a group of this launch; outside of a launch, a unique address."""
    launch = launch_of(environment) or secrets.token_hex(16)
    # Ranks that an agent restarts must not meet workers of the previous start, which are about to end.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    identity = f"{os.getuid()}\n{launch}\n{attempt}\n{name}"
    digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return f"\0omniload-loader-{digest}"


class Share:
    """A loader's part in the group of its machine. It joins the group at the first request for a batch."""

    def __init__(self, name: str | bool, ranks: int) -> None:
        """Name the group.

        Args:
            name: ``True`` uses the order in which loaders are made.
            ranks: Ranks of this machine; the group has workers for each.
        """
        self.address = address_of(name if isinstance(name, str) else f"loader {next(_made)}")
        self.epochs = itertools.count()
        self._ranks = ranks
        self._client: Client | None = None

    def joined(self, loader: Any, seed: int) -> Client:
        """Return this rank's place in the group."""
        if self._client is None or not self._client.is_open:
            setup = self._setup(loader, seed)
            context = loader.multiprocessing_context or multiprocessing.get_context()
            self._client = Client(
                lambda: _connected(self.address, setup, context), setup.fingerprint
            )
        return self._client

    @property
    def server_pid(self) -> int | None:
        """Process of the group's server; ``None`` outside of the group."""
        return None if self._client is None else self._client.server

    def _setup(self, loader: Any, seed: int) -> Setup:
        work = Work(
            dataset=loader.dataset,
            kind=loader._dataset_kind,
            auto_collation=loader._auto_collation,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            seed=seed,
            worker_init_fn=loader.worker_init_fn,
            workers=loader.num_workers * self._ranks,
            ahead=loader.prefetch_factor * loader.num_workers,
            ranks=self._ranks,
        )
        collate = loader.collate_fn
        # Compared by names and numbers, because functions of two processes cannot be compared.
        fingerprint = {
            "dataset": type(loader.dataset).__qualname__,
            "samples": len(loader.dataset),
            "collate_fn": getattr(collate, "__qualname__", type(collate).__qualname__),
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
        }
        return Setup(work=work, fingerprint=fingerprint)

    def close(self) -> None:
        """Leave the group; its last rank ends it."""
        if self._client is not None:
            self._client.close()

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a loader with share=True belongs to its process and cannot be sent to another"
        )


def _connected(address: str, setup: Setup, context: Any) -> socket.socket:
    """Connect to the group's server, and start it if there is none.

    Raises:
        UnavailableError: There is no server within ``START_S``, or another user has the name.
    """
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(START_S)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            # No process listens yet, or more ranks connect at once than the listener queues.
            if error.errno not in {errno.ECONNREFUSED, errno.EAGAIN}:
                raise
            if not _started(address, setup, context):
                # Another rank has the name, and is about to listen.
                time.sleep(_AGAIN_S)
            continue
        _, uid = peer_of(connection)
        if uid == os.getuid():
            return connection
        connection.close()
        raise UnavailableError(
            f"the name of this launch's shared workers belongs to user {uid}, not to {os.getuid()}; "
            "give share= a name of your own"
        )
    raise UnavailableError(f"no server of the shared workers has answered within {START_S:g} s")


def _started(address: str, setup: Setup, context: Any) -> bool:
    """Start a server; ``False`` if another rank does so."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        # Bound before there is a server, so that ranks that come while it starts wait here, and start no other.
        listener.listen(128)
        report, reporting = context.Pipe(duplex=False)
        start = context.Process(
            target=_detached, args=(setup, listener, context.get_start_method(), reporting)
        )
        with report:
            with reporting:
                start.start()
            if not has_ended(start.pid, START_S):
                start.kill()
            start.join()
            # The exit code is not used: the system keeps none if SIGCHLD is ignored, as some launchers leave it.
            is_up = _has_report(report)
        if not is_up:
            raise UnavailableError(
                f"the server of the shared workers was not started (exit code {start.exitcode}, limit {START_S:g} s); "
                "its error stands in this rank's output"
            )
    return True


def _has_report(report: Connection) -> bool:
    try:
        return report.poll(0) and bool(report.recv_bytes())
    except EOFError:
        return False


def _detached(setup: Setup, listener: socket.socket, method: str, reporting: Connection) -> None:
    """Detach the server: it outlives the rank that started it, and ends with the last rank."""
    if os.fork() == 0:
        reporting.close()
        workers = multiprocessing.get_context("spawn" if method == "spawn" else "fork")
        serve(setup, listener, workers)
    else:
        reporting.send_bytes(b"up")
