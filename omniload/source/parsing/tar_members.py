"""Members of a tar archive: the place of each, with name and size checked before use.

Reads archives of POSIX (ustar, pax) and of GNU (long names, sizes in base 256). Nothing is unpacked, and a name is only
a key. A name that leads out of a folder is refused all the same, because its author meant harm. Neighbours with the
same key form a sample, as in WebDataset.
"""

import zlib
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias

import xxhash

from omniload.base.errors import IntegrityError
from omniload.base.units import format_bytes
from omniload.source.parsing.json_lines.lines import BadLineError

__all__ = ["Link", "Member", "Sample", "TarBytes", "held_by", "members_of", "samples_of"]

Link: TypeAlias = Literal["hard", "symbolic"]
"""Entry of an archive for a file whose bytes are elsewhere."""

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_ADLER = 65_521
# Type ``7`` is a contiguous file, which is an ordinary file to a reader.
_FILES = frozenset({b"0", b"\0", b"7"})
_LINKS: dict[bytes, Link] = {b"1": "hard", b"2": "symbolic"}
_EMPTY = frozenset({*_LINKS, b"3", b"4", b"5", b"6"})
"""Links, devices, folders and pipes, which have no bytes."""
_SPARSE = b"GNU.sparse."
"""Prefix of the pax keys that mark a sparse member: a map of the parts of a file, followed by the parts."""
_LOOK_BEHIND = 64 << 10
"""Bytes after the end that are checked: writers add up to 10 KiB of zeros, and some tape drives up to 64 KiB."""
_LARGEST_HEADER = 1 << 20
_LARGEST_NAME = 4_096
_ELSEWHERE: dict[Link, tuple[str, str]] = {
    "hard": (" in the archive", "--hard-dereference"),
    "symbolic": ("", "--dereference"),
}
"""Place of the bytes of a link, and the option of tar that packs the bytes instead of the link."""
_RENAMED = "give the file another name, and pack the archive anew"
_NOT_SPARSE = "pack the archive anew without tar's --sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file in an archive."""

    name: str
    header: int
    """First byte of its headers."""
    start: int
    """First byte of its content."""
    stop: int
    """Byte after its content."""
    link: Link | None = None
    """Type of the link; its bytes are in another member, or in a file that may be in no archive."""

    @property
    def next(self) -> int:
        """First byte of the header of the next member."""
        return -(-self.stop // _BLOCK) * _BLOCK


@dataclass(slots=True, kw_only=True)
class TarBytes:
    """An archive, or a part of one that starts with a header."""

    path: str
    at: int
    """First byte."""
    stop: int
    """Byte after the last."""
    fetch: Callable[[int, int], bytes | memoryview]
    """Returns a range of the archive."""
    digest: xxhash.xxh3_128 | None = None
    """Digest that is updated with every header."""

    def read(self, start: int, size: int, what: str) -> bytes:
        """Return bytes of the archive.

        Raises:
            IntegrityError: The archive ends before.
        """
        if start + size > self.stop:
            raise self.fault(
                start, f"{what} of {size} bytes, and {max(0, self.stop - start)} are left"
            )
        return bytes(self.fetch(start, start + size))

    def fault(
        self, at: int, what: str, remedy: str = "the archive is cut short or corrupt, replace it"
    ) -> IntegrityError:
        """Return the error for a fault at a byte, with its remedy."""
        return IntegrityError(f"{self.path}: byte {at} of {self.stop}: {what}; {remedy}")


def members_of(archive: TarBytes, *, ends: bool = True) -> Iterator[Member]:
    """Yield the files of an archive, including links, whose bytes are elsewhere.

    Args:
        archive: The archive, or whole members of it.
        ends: Whether a block of zeros must end it.

    Raises:
        IntegrityError: The archive is truncated, a header has a wrong checksum or impossible values, or another archive
            follows.
    """
    at, began = archive.at, None
    said: dict[str, str] = {}
    while True:
        if at == archive.stop and not ends and began is None:
            return
        header = archive.read(at, _BLOCK, "a header")
        # A single block of zeros is an end, because writers leave the second one out, or write many.
        if header == _ZEROS:
            _require_end(archive, at, began, ends=ends)
            return
        kind, size = header[156:157], _size(archive, at, header)
        if archive.digest is not None:
            archive.digest.update(header)
        began = at if began is None else began
        body = at + _BLOCK
        # These headers describe the next member, which may have several of them.
        if kind in {b"x", b"g", b"L", b"K"}:
            said |= _announced(archive, kind, body, size)
            at = body + -(-size // _BLOCK) * _BLOCK
            continue
        # The octal digits of a header end at 8 GiB; larger members state their size in a header before theirs.
        size = _stated(archive, at, said.get("size"), size)
        if kind not in _FILES | _EMPTY:
            raise _unread(archive, at, kind)
        member = Member(
            name=_checked(archive, at, said.get("path") or _name(archive, at, header)),
            header=began,
            start=body,
            stop=body + (size if kind in _FILES else 0),
            link=_LINKS.get(kind),
        )
        if member.stop > archive.stop:
            raise archive.fault(
                at, f"a member of {format_bytes(size)}, and {archive.stop - body} bytes are left"
            )
        if kind in _FILES or member.link is not None:
            yield member
        at, began, said = member.next, None, {}


def _unread(archive: TarBytes, at: int, kind: bytes) -> IntegrityError:
    """Return the error for a member of an unsupported type, which tar may or may not know."""
    if kind == b"S":
        return archive.fault(at, "a sparse member, whose bytes are not its file's", _NOT_SPARSE)
    what = f"a member of type {kind!r}, which is not read"
    # Labels, parts of multi-volume archives, dumps of folders, and types of Solaris and star.
    if kind in {b"A", b"D", b"I", b"M", b"N", b"V", b"X"}:
        return archive.fault(at, what, "pack the files anew as one archive without it")
    return archive.fault(at, what)


def _require_end(archive: TarBytes, at: int, began: int | None, *, ends: bool) -> None:
    """Raise for an end within a member, or data after the end: a second archive would silently be missing."""
    if began is not None:
        raise archive.fault(at, "an end, where a member was announced")
    if not ends:
        return
    behind = archive.fetch(at, min(archive.stop, at + _LOOK_BEHIND))
    if any(behind):
        raise IntegrityError(
            f"{archive.path}: byte {at} of {archive.stop}: the archive ends, but more bytes follow, which would not "
            "be read; name each archive separately, because concatenated archives are not one archive (tar "
            "--concatenate joins them)"
        )


def _size(archive: TarBytes, at: int, header: bytes) -> int:
    """Return the size in a header, after a check of its checksum."""
    stated = _number(archive, at, header[148:156])
    own = sum(header[148:156]) - 8 * ord(" ")
    # Adler-32 includes the sum of the bytes, and zlib adds twenty times faster than Python.
    if ((zlib.adler32(header) & 0xFFFF) - 1 - own - stated) % _ADLER:
        raise archive.fault(
            at, f"a header whose checksum is {sum(header) - own}, and not {stated} as it says"
        )
    return _number(archive, at, header[124:136])


def _number(archive: TarBytes, at: int, digits: bytes) -> int:
    """Read a number in octal, or in base 256."""
    if digits[0] & 0x80:
        value = int.from_bytes(digits, "big") - (0x80 << 8 * (len(digits) - 1))
        if digits[0] & 0x40 or value >= 1 << 62:
            raise archive.fault(at, f"a number that is negative or beyond any file, {digits!r}")
        return value
    text = digits.partition(b"\0")[0].strip()
    if not text.isdigit() and text:
        raise archive.fault(at, f"{digits!r} where a number in octal belongs")
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise archive.fault(at, f"{digits!r} where a number in octal belongs") from None


def _stated(archive: TarBytes, at: int, text: str | None, size: int) -> int:
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise archive.fault(at, f"a size of {ascii(text)[:40]}")
    return int(text)


def _announced(archive: TarBytes, kind: bytes, body: int, size: int) -> dict[str, str]:
    """Read the path and the size that a header gives for the next member."""
    if size > _LARGEST_HEADER:
        raise archive.fault(body, f"a header of {format_bytes(size)}")
    data = archive.read(body, size, "a header")
    if archive.digest is not None:
        archive.digest.update(data)
    # The target of a link, which does not matter, because links have no bytes.
    if kind == b"K":
        return {}
    if kind == b"L":
        return {"path": _text(archive, body, data.partition(b"\0")[0])}
    found = dict(_pairs(archive, body, data))
    # Times and owners are ignored. A path for all members would make one sample of them.
    if kind == b"g" and found.keys() & {"path", "size"}:
        raise archive.fault(
            body,
            "one path or size for all members",
            "pack the archive anew, without --pax-option of either",
        )
    return {} if kind == b"g" else {key: found[key] for key in ("path", "size") if key in found}


def _pairs(archive: TarBytes, body: int, data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records of pax: a length in decimal, a space, ``key=value``, a newline."""
    at = 0
    while at < len(data):
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) != length or not record.endswith(b"\n"):
            raise archive.fault(body + at, "a pax record that is none")
        if key.startswith(_SPARSE):
            raise archive.fault(
                body + at,
                f"a sparse member ({key.decode(errors='replace')!a}), whose bytes are not its file's",
                _NOT_SPARSE,
            )
        if key in {b"path", b"size"}:
            yield key.decode(), _text(archive, body + at, value)
        at += length


def _name(archive: TarBytes, at: int, header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # GNU stores times where POSIX stores the first part of a long name.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return _text(archive, at, prefix + b"/" + name if prefix else name)


def _text(archive: TarBytes, at: int, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise archive.fault(at, f"a name that is not UTF-8: {name[:60]!r}", _RENAMED) from None


def _checked(archive: TarBytes, at: int, name: str) -> str:
    """Return a name that stays inside the archive, without a leading ``./``."""
    plain = name.removeprefix("./").rstrip("/")
    parts = plain.split("/")
    if name in {".", "./"}:
        return name
    if len(name) > _LARGEST_NAME:
        raise archive.fault(
            at, f"a name of {len(name):,} letters, more than {_LARGEST_NAME:,}", _RENAMED
        )
    if "\0" in name or any(part in {"", ".."} for part in parts):
        raise archive.fault(
            at, f"the name {ascii(name)[:100]}, which leads out of the archive or is none", _RENAMED
        )
    return plain


@dataclass(slots=True, kw_only=True)
class Sample:
    """The members with one key."""

    key: str
    start: int
    members: dict[str, Member]
    twice: str = ""
    """Extension that two of the members have."""


def samples_of(members: Iterator[Member]) -> Iterator[Sample]:
    """Group neighbours by key; members without an extension, and ``__meta__`` members, belong to no sample."""
    current: Sample | None = None
    for member in members:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, extension = name.partition(".")
        if not stem or not dot or (stem.startswith("__") and stem.endswith("__")):
            continue
        # In lower case, as in the library of WebDataset.
        key, extension = f"{folder}{slash}{stem}", extension.lower()
        if current is None or current.key != key:
            if current is not None:
                yield current
            current = Sample(key=key, start=member.header, members={})
        if member.link == "hard" and extension in current.members:
            continue  # a file that was packed twice
        if extension in current.members:
            # Reported as a bad record when it is read, so that the archive is not refused for it.
            current.twice = extension
        current.members[extension] = member
    if current is not None:
        yield current


def held_by(
    sample: Sample, extension: str, data: memoryview, start: int, read: AbstractSet[str]
) -> memoryview:
    """Return the content of the member with an extension.

    Args:
        sample: The sample.
        extension: Extension of the member.
        data: Bytes of the archive.
        start: Place of these bytes in the archive.
        read: Extensions of the members that are read together, none of which may be a link.

    Raises:
        BadLineError: The member is missing, or two members have one of the extensions.
    """
    for name, each in sample.members.items():
        if each.link is not None and read & {name, name.rpartition(".")[2]}:
            lies, option = _ELSEWHERE[each.link]
            raise BadLineError(
                f".{name} is a {each.link} link, whose bytes lie elsewhere{lies}; pack it with tar {option}"
            )
    if sample.twice:
        raise BadLineError(f"has two members .{sample.twice}")
    member = sample.members.get(extension)
    if member is None:
        raise BadLineError(
            f"has no member .{extension}; it has .{', .'.join(sorted(sample.members)[:12])}"
        )
    return data[member.start - start : member.stop - start]
