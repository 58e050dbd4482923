"""The snapshots service of containerd over a unix socket: requests to a ``Snapshotter``, errors to codes.

Source:
    containerd's API, version 1: service ``snapshots``.
"""

import errno
import os
import socket
import stat as stat_bits
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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

__all__ = [
    "METHODS",
    "SERVICE",
    "SnapshotsService",
    "WireMessage",
    "code_of",
    "message",
    "reader",
    "start_server",
]

WireMessage: TypeAlias = Any
"""A message made here, whose fields are attributes that no type checker knows."""

_Fields: TypeAlias = dict[str, Any]

_PACKAGE = "containerd.services.snapshots.v1"
SERVICE = f"{_PACKAGE}.Snapshots"
_NEW = "snapshotter:1 key:2 parent:3 %labels:4"
_KEY = "snapshotter:1 key:2"
_MOUNTS = "*mounts:1:Mount"

# A wire format consists only of the names and numbers of fields, so there is no generated code to keep in step
# with a generator. NAME:NUMBER[:TYPE], a text if no type is named; * is repeated, % a map of texts. Messages
# have no names on the wire, so messages of other packages are listed here, too.
_SHARED = {
    "Timestamp": "seconds:1:i64 nanos:2:i32",
    "FieldMask": "*paths:1",
    "Mount": "type:1 source:2 target:3 *options:4",
    "Info": "name:1 parent:2 kind:3:i32 created_at:4:Timestamp updated_at:5:Timestamp %labels:6",
}
METHODS: Mapping[str, tuple[str, str]] = {
    "Prepare": (_NEW, _MOUNTS),
    "View": (_NEW, _MOUNTS),
    "Mounts": (_KEY, _MOUNTS),
    "Commit": ("snapshotter:1 name:2 key:3 %labels:4", ""),
    "Remove": (_KEY, ""),
    "Stat": (_KEY, "info:1:Info"),
    "Update": ("snapshotter:1 info:2:Info update_mask:3:FieldMask", "info:1:Info"),
    "List": ("snapshotter:1 *filters:2", "*info:1:Info"),
    "Usage": (_KEY, "size:1:i64 inodes:2:i64"),
    "Cleanup": ("snapshotter:1", ""),
}
"""Every call that is answered: fields of its request and its answer, ``NAMERequest`` and ``NAMEResponse``.

``List`` gives several answers.
"""


def message(name: str, /, **fields: object) -> WireMessage:
    """Make a message by its name; a field that is None stays unset.

    Raises:
        KeyError: The table has no such message.
        ValueError: The message has no such field.
    """
    return _classes[name](**{key: value for key, value in fields.items() if value is not None})


def reader(name: str) -> Callable[[bytes], WireMessage]:
    """Return the function that reads bytes as a message of that name."""
    read: Callable[[bytes], WireMessage] = _classes[name].FromString
    return read


def _built() -> dict[str, WireMessage]:
    file = descriptor_pb2.FileDescriptorProto(
        name="snapshots.proto", package=_PACKAGE, syntax="proto3"
    )
    asked = {f"{name}Request": request for name, (request, _) in METHODS.items()}
    answered = {f"{name}Response": answer for name, (_, answer) in METHODS.items()}
    names = {**_SHARED, **asked, **answered}
    for name, fields in names.items():
        _describe(file.message_type.add(name=name), name, fields)
    # Use a pool of its own: in the common pool, another library's copy of the interface would collide with this one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    described = ((name, pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names)
    return {name: message_factory.GetMessageClass(found) for name, found in described}


def _describe(found: descriptor_pb2.DescriptorProto, place: str, fields: str) -> None:
    """Fill in the fields of a message from its line in the table."""
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {"text": kinds.TYPE_STRING, "i64": kinds.TYPE_INT64, "i32": kinds.TYPE_INT32}
    for text in fields.split():
        name, number, kind = [*text.lstrip("*%").split(":"), "text"][:3]
        field = found.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
        if text[0] in "*%":
            field.label = kinds.LABEL_REPEATED
        if text[0] == "%":
            # On the wire a map is repeated pairs; with this option, and this name, it is a dictionary here.
            kind = f"{place}.{name.capitalize()}Entry"
            entry = found.nested_type.add(name=f"{name.capitalize()}Entry")
            entry.options.map_entry = True
            _describe(entry, kind, "key:1 value:2")
        field.type = scalars.get(kind, kinds.TYPE_MESSAGE)
        if kind not in scalars:
            field.type_name = f".{_PACKAGE}.{kind}"


_classes = _built()

_log = get_logger(__name__)
# Concurrent requests: a request whose layer is being indexed takes one for all that time, a removal does not.
_THREADS = 64
# Snapshots in one message of a list, because gRPC limits messages to 4 MiB.
_PAGE = 100
_NUMBER_OF: dict[Kind, int] = {"view": 1, "active": 2, "committed": 3}
# The address of a socket has 108 bytes, the last of which is zero.
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
"""Status code by class of error; the first match counts."""


class SnapshotsService:
    """One method for each call, with the name of the call in lower case; it returns the fields of the answer."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter

    def prepare(self, request: WireMessage) -> _Fields:
        """Make a snapshot for writes; ``ALREADY_EXISTS`` for a layer that need not be unpacked."""
        labels = dict(request.labels)
        return _mounts(self._snapshotter.prepare(request.key, request.parent, labels))

    def view(self, request: WireMessage) -> _Fields:
        """Make a snapshot for reads."""
        labels = dict(request.labels)
        return _mounts(self._snapshotter.prepare(request.key, request.parent, labels, "view"))

    def mounts(self, request: WireMessage) -> _Fields:
        """Return the mounts of a snapshot again."""
        return _mounts(self._snapshotter.mounts(request.key))

    def commit(self, request: WireMessage) -> _Fields:
        """Make a layer of the written files."""
        self._snapshotter.commit(request.name, request.key, dict(request.labels))
        return {}

    def remove(self, request: WireMessage) -> _Fields:
        """Remove a snapshot."""
        self._snapshotter.remove(request.key)
        return {}

    def stat(self, request: WireMessage) -> _Fields:
        """Describe one snapshot."""
        return {"info": _info(self._snapshotter.stat(request.key))}

    def update(self, request: WireMessage) -> _Fields:
        """Change labels."""
        labels, paths = dict(request.info.labels), list(request.update_mask.paths)
        return {"info": _info(self._snapshotter.update(request.info.name, labels, paths))}

    def list(self, request: WireMessage) -> Iterator[_Fields]:
        """Describe all snapshots that match the filters, in pages."""
        found = self._snapshotter.listing(list(request.filters))
        for start in range(0, len(found), _PAGE):
            yield {"info": [_info(snapshot) for snapshot in found[start : start + _PAGE]]}

    def usage(self, request: WireMessage) -> _Fields:
        """Return the space of a snapshot on the disk."""
        size_bytes, inodes = self._snapshotter.usage(request.key)
        return {"size": size_bytes, "inodes": inodes}

    def cleanup(self, request: WireMessage) -> _Fields:  # noqa: ARG002 -- it says nothing
        """Remove the remains of removed snapshots."""
        self._snapshotter.cleanup()
        return {}


def start_server(snapshotter: Snapshotter, path: Path) -> grpc.Server:
    """Answer on a unix socket that only its owner may use; return the server. A socket without a server is replaced.

    Raises:
        ConfigError: Something else is at that path, or it is too long for a socket.
        StateError: Another process answers there, or the socket cannot be made.
    """
    _make_way(path)
    server = grpc.server(ThreadPoolExecutor(_THREADS, "omniload-snapshotter"))
    service = SnapshotsService(snapshotter)
    handlers = {name: _handler(name, getattr(service, name.lower())) for name in METHODS}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    # gRPC makes the socket with the rights that the umask leaves; a later chmod would leave it open for a moment.
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
    """Return the status code by which containerd understands an error."""
    # containerd acts on some codes, such as that of an existing layer, and shows the others.
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return next(
        (code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


def _handler(
    name: str, answer: Callable[[WireMessage], Any]
) -> "grpc.RpcMethodHandler[WireMessage, WireMessage]":
    answered = f"{name}Response"

    def stream(request: WireMessage, context: grpc.ServicerContext) -> Iterator[WireMessage]:
        try:
            for fields in answer(request):
                yield message(answered, **fields)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the caller gets it as a status
            _refuse(name, error, context)

    def unary(request: WireMessage, context: grpc.ServicerContext) -> WireMessage:
        try:
            return message(answered, **answer(request))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the caller gets it as a status
            _refuse(name, error, context)

    reads, writes = reader(f"{name}Request"), _classes[answered].SerializeToString
    if name == "List":
        return grpc.unary_stream_rpc_method_handler(stream, reads, writes)
    return grpc.unary_unary_rpc_method_handler(unary, reads, writes)


def _refuse(name: str, error: Exception, context: grpc.ServicerContext) -> None:
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        _log.exception("defect in %s", name)
    context.abort(code, str(error) or repr(error))


def _mounts(found: Sequence[MountEntry]) -> _Fields:
    return {"mounts": [message("Mount", **asdict(entry)) for entry in found]}


def _info(snapshot: Snapshot) -> WireMessage:
    return message(
        "Info",
        name=snapshot.key,
        parent=snapshot.parent,
        kind=_NUMBER_OF[snapshot.kind],
        created_at=_time(snapshot.created_ns),
        updated_at=_time(snapshot.updated_ns),
        labels=dict(snapshot.labels),
    )


def _time(time_ns: int) -> WireMessage:
    seconds, nanos = divmod(time_ns, 10**9)
    return message("Timestamp", seconds=seconds, nanos=nanos)


def _make_way(path: Path) -> None:
    """Remove the socket of a process that has ended."""
    # gRPC itself would remove the socket of a living process, too.
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
        # Do not block, or a process that is too busy to answer would be waited for without end.
        tried.setblocking(False)
        try:
            # The file outlives its process, so only a connection shows whether a process answers.
            tried.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:  # for example, its queue is full
            _log.debug("%s: %s", path, error)
    raise StateError(f"another process answers on {str(path)!r}; end it first")
