"""Messages of containerd's public gRPC interface, built from a table when this is imported.

The table holds names and numbers of fields, which are all that a wire format is; there is
no generated code to keep in step with a generator. Messages live in a pool of their own,
so that another library's copy of the same interface does not collide with this one.

Source:
    containerd's API, version 1: service ``snapshots``.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["METHODS", "SERVICE", "Method", "WireMessage", "message"]

WireMessage: TypeAlias = Any
"""A message made here: its fields are attributes that no type checker knows."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "i64": _FIELD.TYPE_INT64,
    "i32": _FIELD.TYPE_INT32,
}
_SNAPSHOTS = "containerd.services.snapshots.v1"
SERVICE = f"{_SNAPSHOTS}.Snapshots"
_NEW = "snapshotter:1 key:2 parent:3 %labels:4"
_KEY = "snapshotter:1 key:2"

_PACKAGES: Mapping[str, Mapping[str, str]] = {
    # NAME:NUMBER[:TYPE]; * is repeated, % a map of strings, a dot before a type means package and all.
    "google.protobuf": {
        "Timestamp": "seconds:1:i64 nanos:2:i32",
        "FieldMask": "*paths:1",
        "Empty": "",
    },
    "containerd.types": {
        "Mount": "type:1 source:2 target:3 *options:4",
    },
    _SNAPSHOTS: {
        "Info": "name:1 parent:2 kind:3:i32 created_at:4:.google.protobuf.Timestamp "
        "updated_at:5:.google.protobuf.Timestamp %labels:6",
        "PrepareSnapshotRequest": _NEW,
        "PrepareSnapshotResponse": "*mounts:1:.containerd.types.Mount",
        "ViewSnapshotRequest": _NEW,
        "ViewSnapshotResponse": "*mounts:1:.containerd.types.Mount",
        "MountsRequest": _KEY,
        "MountsResponse": "*mounts:1:.containerd.types.Mount",
        "RemoveSnapshotRequest": _KEY,
        "CommitSnapshotRequest": "snapshotter:1 name:2 key:3 %labels:4",
        "StatSnapshotRequest": _KEY,
        "StatSnapshotResponse": "info:1:Info",
        "UpdateSnapshotRequest": "snapshotter:1 info:2:Info "
        "update_mask:3:.google.protobuf.FieldMask",
        "UpdateSnapshotResponse": "info:1:Info",
        "ListSnapshotsRequest": "snapshotter:1 *filters:2",
        "ListSnapshotsResponse": "*info:1:Info",
        "UsageRequest": _KEY,
        "UsageResponse": "size:1:i64 inodes:2:i64",
        "CleanupRequest": "snapshotter:1",
    },
}


class Method:
    """One call: its address and how its messages are read and written."""

    def __init__(self, name: str, request: str, answer: str) -> None:
        self.path = f"/{SERVICE}/{name}"
        self.name = name
        self.is_stream = name == "List"
        """Whether it is answered by several messages."""
        self.request = request
        self.answer = answer

    def encode(self, value: WireMessage) -> bytes:
        """Return the bytes of a request or answer."""
        data: bytes = value.SerializeToString()
        return data

    def reader(self, name: str) -> Callable[[bytes], WireMessage]:
        """Return what reads bytes as a message."""
        read: Callable[[bytes], WireMessage] = _classes[name].FromString
        return read


def message(name: str, /, **fields: object) -> WireMessage:
    """Make a message by its name with its package; a field that is None stays unset.

    Raises:
        KeyError: The table has no such message.
        ValueError: The message has no such field.
    """
    return _classes[name](**{key: value for key, value in fields.items() if value is not None})


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    shared = ["google.protobuf.proto", "containerd.types.proto"]
    for package, messages in _PACKAGES.items():
        file = descriptor_pb2.FileDescriptorProto(
            name=f"{package}.proto", package=package, syntax="proto3"
        )
        file.dependency.extend(name for name in shared if name != file.name)
        if package == "google.protobuf":
            del file.dependency[:]
        for name, fields in messages.items():
            _describe(file.message_type.add(name=name), package, fields)
        pool.Add(file)
    return pool


def _describe(found: descriptor_pb2.DescriptorProto, package: str, fields: str) -> None:
    """Fill in the fields of a message from its line in the table."""
    for text in fields.split():
        name, number, kind = [*text.lstrip("*%").split(":"), "string"][:3]
        field = found.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
        if text[0] in "*%":
            field.label = _FIELD.LABEL_REPEATED
        if text[0] == "%":
            entry = found.nested_type.add(name=f"{name.capitalize()}Entry")
            entry.options.map_entry = True
            _describe(entry, package, "key:1 value:2")
            field.type = _FIELD.TYPE_MESSAGE
            field.type_name = f".{package}.{found.name}.{entry.name}"
        elif kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = _FIELD.TYPE_MESSAGE
            field.type_name = kind if kind.startswith(".") else f".{package}.{kind}"


def _build() -> dict[str, WireMessage]:
    pool = _pool()
    names = [f"{package}.{name}" for package, found in _PACKAGES.items() for name in found]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names
    }


_classes = _build()

_EMPTY = "google.protobuf.Empty"
_ANSWER_OF = {
    "Prepare": ("PrepareSnapshotRequest", f"{_SNAPSHOTS}.PrepareSnapshotResponse"),
    "View": ("ViewSnapshotRequest", f"{_SNAPSHOTS}.ViewSnapshotResponse"),
    "Mounts": ("MountsRequest", f"{_SNAPSHOTS}.MountsResponse"),
    "Commit": ("CommitSnapshotRequest", _EMPTY),
    "Remove": ("RemoveSnapshotRequest", _EMPTY),
    "Stat": ("StatSnapshotRequest", f"{_SNAPSHOTS}.StatSnapshotResponse"),
    "Update": ("UpdateSnapshotRequest", f"{_SNAPSHOTS}.UpdateSnapshotResponse"),
    "List": ("ListSnapshotsRequest", f"{_SNAPSHOTS}.ListSnapshotsResponse"),
    "Usage": ("UsageRequest", f"{_SNAPSHOTS}.UsageResponse"),
    "Cleanup": ("CleanupRequest", _EMPTY),
}
METHODS: Mapping[str, Method] = {
    name: Method(name, f"{_SNAPSHOTS}.{request}", answer)
    for name, (request, answer) in _ANSWER_OF.items()
}
"""Every call that is answered, by name."""
