"""The snapshots service of containerd over a unix socket: requests to a ``Snapshotter``, errors to codes."""

import errno
import os
import socket
import stat as stat_bits
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc

from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.log import get_logger
from snapshot.engines.containerd.chain import MountEntry
from snapshot.engines.containerd.records import (
    Kind,
    Snapshot,
    SnapshotExistsError,
    SnapshotInUseError,
    SnapshotMissingError,
)
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.wire import METHODS, SERVICE, Method, WireMessage, message

__all__ = ["SnapshotsService", "code_of", "start_server"]

_log = get_logger(__name__)
_PACKAGE = "containerd.services.snapshots.v1"
_THREADS = 64
"""Requests at a time: a layer that is being indexed holds one for as long as that takes, a removal none."""
_PAGE = 100
"""Snapshots in one message of a list."""
_NUMBER_OF: dict[Kind, int] = {"view": 1, "active": 2, "committed": 3}
_LONGEST_SOCKET = 107
_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (SnapshotMissingError, grpc.StatusCode.NOT_FOUND),
    (SnapshotExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (SnapshotInUseError, grpc.StatusCode.FAILED_PRECONDITION),
    (StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
)
"""The first that fits counts."""


class SnapshotsService:
    """One method for each call, named as the call is, in lower case."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter

    def prepare(self, request: WireMessage) -> WireMessage:
        """Make a place to write; ``ALREADY_EXISTS`` for a layer that need not be unpacked."""
        found = self._snapshotter.prepare(request.key, request.parent, dict(request.labels))
        return message(f"{_PACKAGE}.PrepareSnapshotResponse", mounts=_mounts(found))

    def view(self, request: WireMessage) -> WireMessage:
        """Make a place to read."""
        labels = dict(request.labels)
        found = self._snapshotter.prepare(request.key, request.parent, labels, "view")
        return message(f"{_PACKAGE}.ViewSnapshotResponse", mounts=_mounts(found))

    def mounts(self, request: WireMessage) -> WireMessage:
        """Say again what to mount."""
        found = self._snapshotter.mounts(request.key)
        return message(f"{_PACKAGE}.MountsResponse", mounts=_mounts(found))

    def commit(self, request: WireMessage) -> WireMessage:
        """Make a layer of what was written."""
        self._snapshotter.commit(request.name, request.key, dict(request.labels))
        return message("google.protobuf.Empty")

    def remove(self, request: WireMessage) -> WireMessage:
        """Take a snapshot away."""
        self._snapshotter.remove(request.key)
        return message("google.protobuf.Empty")

    def stat(self, request: WireMessage) -> WireMessage:
        """Describe one snapshot."""
        found = self._snapshotter.stat(request.key)
        return message(f"{_PACKAGE}.StatSnapshotResponse", info=_info(found))

    def update(self, request: WireMessage) -> WireMessage:
        """Change labels."""
        labels, paths = dict(request.info.labels), list(request.update_mask.paths)
        found = self._snapshotter.update(request.info.name, labels, paths)
        return message(f"{_PACKAGE}.UpdateSnapshotResponse", info=_info(found))

    def list(self, request: WireMessage) -> Iterator[WireMessage]:
        """Describe all that the filters ask for, in pages."""
        found = self._snapshotter.listing(list(request.filters))
        for start in range(0, len(found), _PAGE):
            page = [_info(snapshot) for snapshot in found[start : start + _PAGE]]
            yield message(f"{_PACKAGE}.ListSnapshotsResponse", info=page)

    def usage(self, request: WireMessage) -> WireMessage:
        """Say what a snapshot takes on the disk."""
        size_bytes, inodes = self._snapshotter.usage(request.key)
        return message(f"{_PACKAGE}.UsageResponse", size=size_bytes, inodes=inodes)

    def cleanup(self, request: WireMessage) -> WireMessage:  # noqa: ARG002 -- it says nothing
        """Remove what is left of snapshots that are gone."""
        self._snapshotter.cleanup()
        return message("google.protobuf.Empty")


def start_server(snapshotter: Snapshotter, path: Path) -> grpc.Server:
    """Answer on a unix socket that only its owner may use; return the server, which runs.

    A socket that nobody answers on any more is replaced.

    Raises:
        ConfigError: Something else is at that path, or it is too long for a socket.
        StateError: Another process answers there, or the socket cannot be made.
    """
    _make_way(path)
    server = grpc.server(ThreadPoolExecutor(_THREADS, "omniload-snapshotter"))
    service = SnapshotsService(snapshotter)
    handlers = {
        method.name: _handler(method, getattr(service, method.name.lower()))
        for method in METHODS.values()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    # A socket is made by gRPC with what the umask leaves; closed afterwards, it was open for a moment.
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise StateError(f"socket {str(path)!r} cannot be made: {error}") from error
    finally:
        os.umask(before)
    server.start()
    return server


def code_of(error: Exception) -> grpc.StatusCode:
    """Return what containerd understands of an error; it acts on some of these, and shows the others."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return next(
        (code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


def _handler(
    method: Method, answer: Callable[[WireMessage], WireMessage]
) -> "grpc.RpcMethodHandler[WireMessage, WireMessage]":
    reads = method.reader(method.request)
    if method.is_stream:

        def stream(request: WireMessage, context: grpc.ServicerContext) -> Iterator[WireMessage]:
            try:
                yield from answer(request)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the caller gets it as a status
                _refuse(method, error, context)

        return grpc.unary_stream_rpc_method_handler(stream, reads, method.encode)

    def unary(request: WireMessage, context: grpc.ServicerContext) -> WireMessage:
        try:
            return answer(request)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the caller gets it as a status
            _refuse(method, error, context)

    return grpc.unary_unary_rpc_method_handler(unary, reads, method.encode)


def _refuse(method: Method, error: Exception, context: grpc.ServicerContext) -> None:
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        _log.exception("defect in %s", method.name)
    context.abort(code, str(error) or repr(error))


def _mounts(found: Sequence[MountEntry]) -> list[WireMessage]:
    return [
        message(
            "containerd.types.Mount",
            type=entry.type,
            source=entry.source,
            options=list(entry.options),
        )
        for entry in found
    ]


def _info(snapshot: Snapshot) -> WireMessage:
    return message(
        f"{_PACKAGE}.Info",
        name=snapshot.key,
        parent=snapshot.parent,
        kind=_NUMBER_OF[snapshot.kind],
        created_at=_time(snapshot.created_ns),
        updated_at=_time(snapshot.updated_ns),
        labels=dict(snapshot.labels),
    )


def _time(time_ns: int) -> WireMessage:
    seconds, nanos = divmod(time_ns, 10**9)
    return message("google.protobuf.Timestamp", seconds=seconds, nanos=nanos)


def _make_way(path: Path) -> None:
    """Remove the socket of a process that is gone; gRPC itself would remove that of a living one, too."""
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        raise ConfigError(
            f"socket {str(path)!r} has {len(os.fsencode(path))} bytes, more than the "
            f"{_LONGEST_SOCKET} the kernel takes; use a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat_bits.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{str(path)!r} is there and no socket; name another path")
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.connect(str(path))
        except OSError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
    raise StateError(f"another process answers on {str(path)!r}; end it first")
