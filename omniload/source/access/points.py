"""Places at which decompression of a shard can start, and the store that keeps them.

Shape suffixes:
    P  places of a shard, rising      U  units of a shard
"""

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import orjson
import xxhash
import zstandard
from numpy.typing import NDArray

from omniload.base.compression.streams import WINDOW_BYTES, unzstd
from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import install_line
from omniload.base.log import get_logger
from omniload.base.lru import Lru
from omniload.base.reading import open_file
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.index import FileUnits, IndexCache, key_of_file, write_kept
from omniload.source.parsing.beginnings import codec_of

__all__ = [
    "ACCESS_VERSION",
    "NEAR_BYTES",
    "SMALL_BYTES",
    "AccessPoints",
    "KeptPoints",
    "Point",
    "require_near",
]

ACCESS_VERSION = 2
"""Version of a file of places, in its first line; a file of another version counts as missing."""

SMALL_BYTES = 8 << 20
"""Largest decompressed shard that is only entered at its first byte."""
NEAR_BYTES = 64 << 20
"""Most bytes that may be decompressed before a unit if units are read in any order."""

_KEY, _SUFFIX = "omniload.access", ".access"
_HEAD_BYTES, _MOST_BITS = 4 << 10, 7
_HELD_BYTES = 64 << 20
"""Total memory for places of a source's shards if no folder keeps them."""
_UNUSED_S = 7 * 24 * 3600.0
"""Time that unread places of a former shard stay, because a run in progress may use them after an edit of a file."""
_LEFTOVER_S = 3600.0
"""Age up to which a draft may belong to a living writer."""
_log = get_logger(__name__)


class Point(NamedTuple):
    """A place where decompression can start."""

    raw: int
    """Byte of the file; if ``bits`` is not 0, the first bits are in the byte before."""
    place: int
    """Byte of the decompressed content."""
    bits: int = 0
    """Number of high bits of the byte before that belong to the data after the place; only for gzip."""
    window: bytes = b""
    """Decompressed bytes before the place; only for gzip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPoints:
    """The entry points of a shard, with a digest of each unit, which verifies reads by way of an entry point."""

    raws_P: NDArray[np.int64]
    places_P: NDArray[np.int64]
    """Decompressed places, rising, above 0, because every shard can be entered at its first byte."""
    bits_P: NDArray[np.uint8]
    windows_P: tuple[bytes, ...]
    """Windows as in ``Point.window``, compressed with zstd; empty if a place needs none."""
    digests_U: NDArray[np.uint64]
    """xxh3 of the decompressed content of each unit."""
    farthest_bytes: int
    """Most bytes from a place, or from the first byte, to the start of a unit that is entered there."""

    @classmethod
    def of(cls, points: Sequence[Point], units: FileUnits, digests: Sequence[int]) -> Self:
        """Return the entry points of a shard.

        Args:
            points: Places, rising.
            units: Units of the shard.
            digests: Digest of each unit.
        """
        places_P = np.array([point.place for point in points], np.int64)
        nearest_U = np.concatenate(([0], places_P))[
            np.searchsorted(places_P, units.starts, side="right")
        ]
        compressor = zstandard.ZstdCompressor(level=3)
        return cls(
            raws_P=np.array([point.raw for point in points], np.int64),
            places_P=places_P,
            bits_P=np.array([point.bits for point in points], np.uint8),
            windows_P=tuple(
                compressor.compress(point.window) if point.window else b"" for point in points
            ),
            digests_U=np.array(digests, np.uint64),
            farthest_bytes=int((units.starts - nearest_U).max(initial=0)),
        )

    def before(self, start: int) -> Point | None:
        """Return the last place at or before a byte; ``None`` if this is the first byte of the shard."""
        at = int(np.searchsorted(self.places_P, start, side="right")) - 1
        if at < 0:
            return None
        window = self.windows_P[at]
        return Point(
            raw=int(self.raws_P[at]),
            place=int(self.places_P[at]),
            bits=int(self.bits_P[at]),
            window=unzstd(window, WINDOW_BYTES) if window else b"",
        )

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the entry points."""
        return sum(map(len, self.windows_P)) + 64 * len(self.raws_P) + 8 * len(self.digests_U)


class KeptPoints:
    """Entry points of a source's shards: a file for each shard next to the index, or in memory if nothing is kept.

    Args:
        cache: Place of the source's index.
        kind: Way in which files are divided, as for ``index_of``.
    """

    def __init__(self, cache: IndexCache | None, kind: str) -> None:
        self._folder = None if cache is None else cache.access_folder(kind)
        self._held: Lru[str, AccessPoints] = Lru(_HELD_BYTES)
        self._is_new = False
        """Whether something was stored since the last search for files of other shards."""

    def keep(self, file: ShardFile, points: AccessPoints) -> None:
        """Store the entry points of a shard, in place of earlier ones."""
        self._is_new = True
        kept = self._folder is not None and write_kept(
            self._path(self._folder, file), _encoded(file, points)
        )
        if not kept:
            self._held.put(file.path, points, points.size_bytes)

    def of(self, file: ShardFile) -> AccessPoints | None:
        """Return the entry points of a shard in its present state; ``None`` if there are none or they are damaged."""
        held = self._held.get(file.path)
        if held is not None or self._folder is None:
            return held
        path = self._path(self._folder, file)
        try:
            with _used(path) as opened:
                return _decoded(opened.read(), file)
        except (FileNotFoundError, _OtherShardError):
            return None
        except (StateError, OSError, ValueError) as error:
            _log.warning(
                "%s: places cannot be read (%s); the shard is read from its start", path, error
            )
            return None

    def farthest(self, file: ShardFile) -> int | None:
        """Return ``AccessPoints.farthest_bytes`` of a shard without its places; ``None`` if nothing is kept."""
        if (held := self._held.get(file.path)) is not None:
            return held.farthest_bytes
        if self._folder is None:
            return None
        try:
            with _used(self._path(self._folder, file)) as opened:
                return int(_head_of(opened.read(_HEAD_BYTES), file)["farthest"])
        except (StateError, OSError, ValueError):
            return None

    def keep_only(self, files: Sequence[ShardFile]) -> None:
        """Remove the files of other shards after something was stored; otherwise the folder would only grow.

        Files that were read within ``_UNUSED_S`` stay, and so does a draft that may still be written.
        """
        if self._folder is None or not self._is_new:
            return
        self._is_new = False
        names = {self._path(self._folder, file).name for file in files}
        now_s = time.time()
        with suppress(OSError):
            for path in self._folder.iterdir():
                is_draft = path.name.startswith(".")
                if path.name in names or not (is_draft or path.suffix == _SUFFIX):
                    continue
                with suppress(FileNotFoundError):
                    if now_s - path.stat().st_mtime > (_LEFTOVER_S if is_draft else _UNUSED_S):
                        path.unlink()

    @staticmethod
    def _path(folder: Path, file: ShardFile) -> Path:
        path = file.path.encode(errors="surrogateescape")
        return folder / f"{hashlib.blake2b(path, digest_size=12).hexdigest()}{_SUFFIX}"


def _used(path: Path) -> BinaryIO:
    """Open a file of places, and mark it as used.

    Raises:
        OSError: The file cannot be read.
    """
    # The file may belong to another user, or be on a read-only disk; its time then stays as it is.
    with suppress(OSError):
        os.utime(path)
    return open_file(path)


def require_near(files: Sequence[ShardFile], kept: KeptPoints) -> None:
    """Raise an error for shards whose units are far from any entry point, if units are read in any order.

    Raises:
        ConfigError: Gives the remedy.
    """
    for file in files:
        distance = kept.farthest(file)
        if distance is None or distance > NEAR_BYTES:
            raise ConfigError(
                f"{file.path}: shuffle.method: units enters a compressed shard in its middle, at most "
                f"{format_bytes(NEAR_BYTES)} before the records that it needs: {_said_of(file, distance)}, or write "
                "method: block"
            )


def _said_of(file: ShardFile, distance: int | None) -> str:
    """Return the reason why a shard has no near entry points everywhere, with the remedy."""
    if codec_of(file) == "gzip" and find_spec("indexed_gzip") is None:
        return f"of gzip a package finds where, which is not installed; {install_line('gzip')}"
    if distance is None:
        return (
            "its entry points are saved nowhere; set XDG_CACHE_HOME, or --cache-dir of a command, to a folder with "
            "room"
        )
    if codec_of(file) == "gzip":
        return f"it has places up to {format_bytes(distance)} apart; write it in smaller shards"
    return (
        f"it has {format_bytes(distance)} in one frame of zstd, which is entered at its start; write it in many, "
        f"zstd -dc {file.path} | pzstd > NEW.zst"
    )


class _OtherShardError(ValueError):
    """The file belongs to another shard, or to another state of this one."""


def _stamped(file: ShardFile) -> str:
    """Return a digest that distinguishes a shard from others and from its earlier states."""
    key = "\0".join(map(str, key_of_file(file))).encode(errors="surrogateescape")
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def _encoded(file: ShardFile, points: AccessPoints) -> bytes:
    """Return a line of JSON, followed by the columns in little-endian order, and all windows."""
    body = b"".join(
        [
            points.raws_P.astype("<i8").tobytes(),
            points.places_P.astype("<i8").tobytes(),
            points.digests_U.astype("<u8").tobytes(),
            np.array(list(map(len, points.windows_P)), "<u4").tobytes(),
            points.bits_P.tobytes(),
            *points.windows_P,
        ]
    )
    head = {
        _KEY: ACCESS_VERSION,
        "of": _stamped(file),
        "places": len(points.raws_P),
        "units": len(points.digests_U),
        "farthest": points.farthest_bytes,
        "check": xxhash.xxh3_128_hexdigest(body),
    }
    return orjson.dumps(head) + b"\n" + body


def _head_of(data: bytes, file: ShardFile) -> dict[str, int | str]:
    """Read the first line of a file of entry points.

    Raises:
        ValueError: The line has another version, or belongs to another shard or another state of this one.
    """
    head = orjson.loads(data.partition(b"\n")[0])
    if not isinstance(head, dict) or head.get(_KEY) != ACCESS_VERSION:
        raise ValueError(f"it is not of version {ACCESS_VERSION}")
    if head.get("of") != _stamped(file):
        raise _OtherShardError("the shard is another by now")
    if not all(isinstance(head.get(name), int) for name in ("places", "units", "farthest")):
        raise ValueError("a number is missing in its first line")
    return head


def _decoded(data: bytes, file: ShardFile) -> AccessPoints:
    """Read a file of entry points.

    Raises:
        ValueError: As for ``_head_of``, or the file was altered or truncated.
    """
    head = _head_of(data, file)
    body = data.partition(b"\n")[2]
    if xxhash.xxh3_128_hexdigest(body) != head.get("check"):
        raise ValueError("it was altered or cut short")
    places, units = int(head["places"]), int(head["units"])
    sizes = np.cumsum([0, 8 * places, 8 * places, 8 * units, 4 * places, places]).tolist()
    raws_P, places_P, digests_U, lengths_P, bits_P = (
        np.frombuffer(body[start:stop], dtype)
        for start, stop, dtype in zip(
            sizes, sizes[1:], ("<i8", "<i8", "<u8", "<u4", "u1"), strict=False
        )
    )
    ends = (sizes[-1] + np.cumsum(lengths_P, dtype=np.int64)).tolist()
    if (
        (np.diff(places_P, prepend=0) < 0).any()
        or raws_P.min(initial=1) < 1
        or raws_P.max(initial=0) > file.size_bytes
        or bits_P.max(initial=0) > _MOST_BITS
    ):
        raise ValueError("a place lies where none can be")
    return AccessPoints(
        raws_P=raws_P,
        places_P=places_P,
        bits_P=bits_P,
        windows_P=tuple(
            body[start:stop] for start, stop in zip([sizes[-1], *ends], ends, strict=False)
        ),
        digests_U=digests_U,
        farthest_bytes=int(head["farthest"]),
    )
