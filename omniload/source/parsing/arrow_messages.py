"""The messages of an Arrow IPC stream or file, found without reading what they carry.

A message is a length, a flatbuffer that says how much follows, and that many bytes. A file is a
stream between two magics, with a footer that repeats where its batches lie; so one walk serves
both (https://arrow.apache.org/docs/format/Columnar.html, "Serialization and Interprocess
Communication"). Every number is checked against the file before it is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from omniload.base.errors import IntegrityError
from omniload.source.files import ShardFile

__all__ = ["END_OF_STREAM", "FILE_MAGIC", "Message", "messages_of"]

FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

_CONTINUATION = 0xFFFFFFFF
_FILE_HEAD = 8
_FILE_TAIL = 10
_AT_ONCE = 4 << 10
"""Bytes that hold the head of most messages."""
_LARGEST_METADATA = 64 << 20
_RECORD_BATCH = 3
_HEADERS = {1: "schema", 2: "dictionary", _RECORD_BATCH: "batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, where it lies."""

    kind: str
    """``schema``, ``dictionary`` or ``batch``."""
    start: int
    """Its first byte."""
    stop: int
    """The byte after its body."""
    rows: int
    """Rows of a batch; 0 for the others."""
    metadata: bytes
    """The flatbuffer."""


def messages_of(file: ShardFile) -> Iterator[Message]:
    """Walk over the messages of a shard.

    Raises:
        IntegrityError: It is neither a stream nor a file, is cut short, or says of itself what cannot be.
        OSError: It cannot be read.
    """
    at, end = _bounds(file)
    first = True
    while True:
        found = _message(file, at, end)
        if found is None:
            break
        if first != (found.kind == "schema"):
            raise _fault(
                file, at, f"a {found.kind} where {'the' if first else 'no'} schema belongs"
            )
        yield found
        at, first = found.stop, False
    if first:
        raise _fault(file, at, "no schema")


def _fault(file: ShardFile, at: int, what: str) -> IntegrityError:
    return IntegrityError(
        f"{file.path}: byte {at} of {file.size_bytes}: {what}; the file is cut short or corrupt, replace it"
    )


def _bounds(file: ShardFile) -> tuple[int, int]:
    """Return where messages start, and where they stop at the latest."""
    size = file.size_bytes
    head = file.read_range(0, min(_FILE_HEAD, size))
    if head[: len(FILE_MAGIC)] != FILE_MAGIC:
        return 0, size
    if size < _FILE_HEAD + _FILE_TAIL:
        raise _fault(file, 0, "an Arrow file without a footer")
    tail = file.read_range(size - _FILE_TAIL, size)
    footer = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != FILE_MAGIC:
        raise _fault(
            file, size - len(FILE_MAGIC), f"{tail[4:]!r} where {FILE_MAGIC!r} ends an Arrow file"
        )
    if not 0 < footer <= size - _FILE_HEAD - _FILE_TAIL:
        raise _fault(file, size - _FILE_TAIL, f"a footer of {footer} bytes")
    return _FILE_HEAD, size - _FILE_TAIL - footer


def _message(file: ShardFile, at: int, end: int) -> Message | None:
    """Return the message at a place; ``None`` where the stream says that it ends."""
    head = file.read_range(at, min(at + _AT_ONCE, end))
    prefix = 8 if head[:4] == b"\xff\xff\xff\xff" else 4  # before Arrow 0.15 there was no mark
    if len(head) < prefix:
        raise _fault(file, at, "the end of the file, and the stream has not ended")
    length = int.from_bytes(head[prefix - 4 : prefix], "little", signed=True)
    if length == 0:
        return None
    if not 8 <= length <= min(end - at - prefix, _LARGEST_METADATA):
        raise _fault(file, at, f"a message with {length} bytes of metadata")
    metadata = head[prefix : prefix + length]
    if len(metadata) < length:
        metadata = file.read_range(at + prefix, at + prefix + length)
    try:
        kind, body, rows = _read(metadata)
    except IndexError:
        raise _fault(file, at, "a message whose metadata points out of itself") from None
    start = at + prefix + length
    if kind not in _HEADERS:
        raise _fault(file, at, f"a message of type {kind}")
    if not 0 <= body <= end - start:
        raise _fault(file, at, f"a message with a body of {body} bytes, {end - start} are left")
    if rows < 0:
        raise _fault(file, at, f"a batch of {rows} rows")
    return Message(kind=_HEADERS[kind], start=at, stop=start + body, rows=rows, metadata=metadata)


def _read(metadata: bytes) -> tuple[int, int, int]:
    """Return type, length of the body, and rows of a message (``Message.fbs`` of Arrow).

    Raises:
        IndexError: An offset leads out of the metadata.
    """
    table = _number(metadata, 0, 4)
    kind = _field(metadata, table, 1, 1)
    body = _field(metadata, table, 3, 8)
    rows = 0
    if kind == _RECORD_BATCH and (place := _place(metadata, table, 2)):
        rows = _field(metadata, place + _number(metadata, place, 4), 0, 8)
    return kind, body, rows


def _place(metadata: bytes, table: int, field: int) -> int:
    """Return where a field of a flatbuffer's table lies; 0 where it is left out."""
    vtable = table - _number(metadata, table, 4)
    if 4 + 2 * field >= _number(metadata, vtable, 2):
        return 0
    offset = _number(metadata, vtable + 4 + 2 * field, 2)
    return table + offset if offset else 0


def _field(metadata: bytes, table: int, field: int, size: int) -> int:
    place = _place(metadata, table, field)
    return _number(metadata, place, size) if place else 0


def _number(metadata: bytes, at: int, size: int) -> int:
    if at < 0 or at + size > len(metadata):
        raise IndexError(at)
    return int.from_bytes(metadata[at : at + size], "little", signed=size != 2)
