"""The manifest of a snapshot: its key, every entry, and the place of each content.

It is a header of 64 bytes, then one zstd frame, laid out byte by byte in
``docs/design/snapshot/0021-environment-snapshots.md``. The tables have fixed records, because
a restore has to read tens of thousands of entries within its half second.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import orjson
import zstandard

from omniload.base.errors import IntegrityError, OmniloadError, StateError
from snapshot.env.format.entries import Entry, Kind, Target
from snapshot.env.format.packs import Frame, check_frames, inflate

__all__ = [
    "HEADER_BYTES",
    "VERSION",
    "Head",
    "Manifest",
    "Place",
    "check_header",
    "decode_manifest",
    "encode_manifest",
]

VERSION = 1
MAGIC = b"OMNIENV\0"
HEADER_BYTES = 64
MAX_BODY_BYTES = 1 << 30
# Limit of a body as it is stored: some two million paths.
MAX_STORED_BYTES = 256 << 20

_HEADER = struct.Struct("<8sIIQQ32s")
# Times are signed, because they may be before 1970.
_ENTRY = struct.Struct("<BBHIqQ")
_CONTENT = struct.Struct("<32sIIQQ")
_FRAME = struct.Struct("<IIQII")
_NONE = 0xFFFFFFFF


class Place(NamedTuple):
    """The place of a content."""

    pack: int
    """Number of the pack in the manifest's list."""
    offset: int
    """Offset in the raw pack."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The facts of a snapshot that a person wants to know; JSON in the manifest."""

    version: int = VERSION
    key: str
    """Key of the snapshot, 64 hexadecimal digits."""
    document: dict[str, Any]
    """Document whose digest is the key."""
    targets: tuple[Target, ...]
    created_ns: int
    packs: tuple[str, ...]
    """Names of the packs that hold the contents."""
    distributions: tuple[str, ...] = ()
    """``name==version`` of the distributions that are installed after the command."""
    install_s: float = 0.0
    """Seconds that the command took."""
    stored_bytes: int = 0
    """Bytes that this snapshot added to the store."""
    skipped: tuple[str, ...] = ()
    """Paths that a snapshot cannot hold: devices, sockets, pipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole snapshot, except the bytes of its files."""

    head: Head
    entries: tuple[Entry, ...]
    """Entries in order of target and path."""
    contents: dict[bytes, Place] = field(default_factory=dict)
    """Places of contents by SHA-256."""
    frames: tuple[tuple[Frame, ...], ...] = ()
    """All frames of each pack."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def num_files(self) -> int:
        """Number of files among the entries."""
        return sum(entry.kind is Kind.FILE for entry in self.entries)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        StateError: It is larger than the limit for reads.
    """
    # Sorted, so that each snapshot has exactly one form.
    digests = sorted(manifest.contents)
    number_of = {digest: number for number, digest in enumerate(digests)}
    fields = asdict(manifest.head)
    fields["targets"] = [target._asdict() for target in manifest.head.targets]
    head = orjson.dumps(
        {
            **fields,
            "entries": len(manifest.entries),
            "contents": len(digests),
            "frames": sum(map(len, manifest.frames)),
        }
    )
    blocks = [
        head,
        _names(entry.path for entry in manifest.entries),
        _names(entry.link for entry in manifest.entries if entry.kind is Kind.LINK),
        b"".join(
            _ENTRY.pack(e.kind, e.target, e.mode, number_of.get(e.digest, _NONE), *e[4:6])
            for e in manifest.entries
        ),
        b"".join(
            _CONTENT.pack(d, manifest.contents[d].pack, 0, *manifest.contents[d][1:])
            for d in digests
        ),
        b"".join(
            _FRAME.pack(number, 0, *frame)
            for number, frames in enumerate(manifest.frames)
            for frame in frames
        ),
    ]
    body = b"".join(struct.pack("<Q", len(block)) + block for block in blocks)
    stored = zstandard.ZstdCompressor(level=9).compress(body)
    if len(stored) > MAX_STORED_BYTES or len(body) > MAX_BODY_BYTES:
        raise StateError(
            f"a snapshot of {len(manifest.entries)} paths needs a manifest of {len(stored)} bytes, more than "
            f"{MAX_STORED_BYTES}; capture fewer targets"
        )
    digest = hashlib.sha256(body).digest()
    return _HEADER.pack(MAGIC, VERSION, 0, len(body), len(stored), digest) + stored


def decode_manifest(data: bytes, *, name: str) -> Manifest:
    """Read a manifest; every number in it is checked against the others.

    ``snapshot.env.format.entries`` checks whether its paths may be written.

    Raises:
        IntegrityError: It is damaged or contradicts itself.
        StateError: Another version wrote it.
    """
    body = _body(data, name)
    try:
        head, fields, blocks = _blocks(body)
        entries, contents, frames = _tables(fields, blocks)
    except OmniloadError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise IntegrityError(f"manifest {name!r} contradicts itself: {error!r}") from error
    manifest = Manifest(head=head, entries=entries, contents=contents, frames=frames)
    _check(manifest, name)
    return manifest


def check_header(header: bytes, size_bytes: int, *, name: str) -> None:
    """Check the header of a manifest of ``size_bytes``, before the rest of it is read into memory.

    Raises:
        IntegrityError: It is no manifest, its size differs from the stated one, or it is too large.
        StateError: Another version wrote it.
    """
    if len(header) < HEADER_BYTES or header[:8] != MAGIC:
        raise IntegrityError(f"{name!r} is no manifest of a snapshot, or was cut short")
    _, version, _, raw_bytes, stored_bytes, _ = _HEADER.unpack(header[:HEADER_BYTES])
    if version != VERSION:
        raise StateError(
            f"manifest {name!r} has version {version}, this code reads {VERSION}; "
            "restore it with the release that saved it"
        )
    if (
        size_bytes != HEADER_BYTES + stored_bytes
        or stored_bytes > MAX_STORED_BYTES
        or raw_bytes > MAX_BODY_BYTES
    ):
        raise IntegrityError(
            f"manifest {name!r} has {size_bytes} bytes and claims {HEADER_BYTES + stored_bytes}, at most "
            f"{HEADER_BYTES + MAX_STORED_BYTES}, or {raw_bytes} raw bytes, more than {MAX_BODY_BYTES}"
        )


def _body(data: bytes, name: str) -> bytes:
    check_header(data, len(data), name=name)
    *_, raw_bytes, _, digest = _HEADER.unpack(data[:HEADER_BYTES])
    body = inflate(data[HEADER_BYTES:], raw_bytes, name=name)
    if hashlib.sha256(body).digest() != digest:
        raise IntegrityError(f"manifest {name!r} does not match its digest")
    return body


def _blocks(body: bytes) -> tuple[Head, dict[str, Any], list[bytes]]:
    blocks, at = [], 0
    while at < len(body):
        (size,) = struct.unpack_from("<Q", body, at)
        if at + 8 + size > len(body):
            raise ValueError(f"a block of {size} bytes at {at} of {len(body)}")
        blocks.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    if len(blocks) != 6:
        raise ValueError(f"{len(blocks)} blocks, not 6")
    fields = orjson.loads(blocks[0])
    counts = {count: int(fields.pop(count)) for count in ("entries", "contents", "frames")}
    fields["targets"] = tuple(Target(**target) for target in fields["targets"])
    for listed in ("packs", "distributions", "skipped"):
        fields[listed] = tuple(map(str, fields[listed]))
    head = Head(**fields)
    _check_head(head)
    return head, counts, blocks


def _check_head(head: Head) -> None:
    """Check the types of fields that are shown or relied on, because JSON may hold anything.

    Raises:
        ValueError: A field has another type.
    """
    texts = [head.key, *(text for target in head.targets for text in target)]
    for name, kind in (("command", list), ("base", dict), ("interpreter", dict)):
        held = head.document.get(name, kind())
        if type(held) is not kind:
            raise ValueError(f"{name} {held!r}")
        texts += held.values() if isinstance(held, dict) else held
    if any(type(text) is not str for text in texts):
        raise ValueError(f"texts {texts!s:.200}")
    if head.document.get("base", {}).keys() not in ({"image", "installed"}, set()):
        raise ValueError(f"base {head.document['base']!r}")
    numbers = (head.created_ns, head.stored_bytes, head.install_s)
    is_known = {type(n) for n in numbers[:2]} == {int} and type(numbers[2]) in {int, float}
    if not is_known or not all(0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"created_ns, stored_bytes, install_s {numbers!r}")


def _tables(
    counts: dict[str, Any], blocks: Sequence[bytes]
) -> tuple[tuple[Entry, ...], dict[bytes, Place], tuple[tuple[Frame, ...], ...]]:
    _, names, links, entry_table, content_table, frame_table = blocks
    contents: dict[bytes, Place] = {}
    digests: list[bytes] = []
    for digest, pack, _, offset, size in _CONTENT.iter_unpack(content_table):
        digests.append(digest)
        contents[digest] = Place(pack, offset, size)
    if len(contents) != counts["contents"]:
        raise ValueError(f"{len(contents)} contents, {counts['contents']} are due")
    link_of = _split(links)
    entries = []
    table = _ENTRY.iter_unpack(entry_table)
    for path, (kind, target, mode, content, mtime_ns, size) in zip(
        _split(names), table, strict=True
    ):
        digest = digests[content] if content != _NONE else b""
        link = next(link_of, None) if kind == Kind.LINK else ""
        if link is None:
            raise ValueError("fewer texts of links than links")
        entries.append(Entry(target, path, Kind(kind), mode, mtime_ns, size, digest, link))
    if len(entries) != counts["entries"] or next(link_of, None) is not None:
        raise ValueError(f"{len(entries)} entries, {counts['entries']} are due")
    frames: dict[int, list[Frame]] = {}
    for pack, _, *frame in _FRAME.iter_unpack(frame_table):
        frames.setdefault(pack, []).append(Frame(*frame))
    listed = tuple(tuple(frames[number]) for number in sorted(frames))
    if sorted(frames) != list(range(len(frames))) or sum(map(len, listed)) != counts["frames"]:
        raise ValueError(f"frames of the packs {sorted(frames)}, {counts['frames']} are due")
    return tuple(entries), contents, listed


def _check(manifest: Manifest, name: str) -> None:
    """Check that entries, contents, frames and packs agree."""
    head = manifest.head
    if head.version != VERSION or len(head.packs) != len(manifest.frames):
        raise IntegrityError(
            f"manifest {name!r}: {len(head.packs)} packs, {len(manifest.frames)} framed"
        )
    places = [(entry.target, entry.path) for entry in manifest.entries]
    if any(one >= other for one, other in pairwise(places)):
        raise IntegrityError(f"manifest {name!r}: entries are out of order, or one stands twice")
    for pack in head.packs:
        # The name becomes part of a path on the store.
        if not pack.isalnum():
            raise IntegrityError(f"manifest {name!r}: {pack!r} is no name of a pack")
    ends = []
    for pack, frames in zip(head.packs, manifest.frames, strict=True):
        check_frames(frames, name=pack)
        ends.append(sum(frame.raw_bytes for frame in frames))
    for place in manifest.contents.values():
        if place.size_bytes and (
            place.pack >= len(ends) or place.offset + place.size_bytes > ends[place.pack]
        ):
            raise IntegrityError(f"manifest {name!r}: a content lies outside its pack: {place}")
    for entry in manifest.entries:
        if entry.kind is Kind.FILE and (
            entry.digest not in manifest.contents
            or manifest.contents[entry.digest].size_bytes != entry.size_bytes
        ):
            raise IntegrityError(f"manifest {name!r}: {entry.path!r} has no content of its size")


def _names(names: Iterator[str]) -> bytes:
    return b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in names)


def _split(table: bytes) -> Iterator[str]:
    if table and not table.endswith(b"\0"):
        raise ValueError("a table of names does not end with a zero byte")
    text = table.decode("utf-8", "surrogateescape")
    return iter(text.split("\0")[:-1])
