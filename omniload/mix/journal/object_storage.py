"""A journal on a store: segments, and the claim of the planner that appends to them.

::

    FOLDER/claims/00000002-9f31c2aa             who continues the journal: the greatest claim
    FOLDER/lines/START-STOP-00000002-9f31c2aa   its bytes, see ``segments``

A planner writes its claim before it reads the journal, and looks for newer claims after each segment that it writes.
So either the next planner finds the segment, or the writer of the segment finds the claim and hands out none of its
steps. The store must only show in a listing what was put before, as S3, GCS, Azure and HDFS promise. Neither a
conditional put nor a lock that outlives its holder is needed.
"""

import io
import secrets
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from os import getpid
from pathlib import Path
from typing import BinaryIO

import orjson
from typing_extensions import Buffer, override

from fusefs.stores.protocol import Entry, Store
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import IntegrityError, OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.mix.journal.segments import (
    LAST_LIFE,
    Extent,
    Life,
    Listed,
    Mark,
    Merging,
    Segment,
    moved_aside,
)
from omniload.mix.journal.storage import JournalStorage, Since, asking

__all__ = ["CLAIM_VERSION", "ObjectStorage"]

_LOG = get_logger(__name__)
CLAIM_VERSION = 1
_CLAIMS, _LINES = "claims", "lines"
_BUFFER = 1 << 20
_SMALL = 1 << 20
_LOOKS = 8
"""Number of listings that a reader tries while others merge the segments that it was about to read."""
_LARGEST_CLAIM = 4096
_LEAVE_S = 5.0


class ObjectStorage(JournalStorage):
    """A journal in a folder of a store."""

    keeps_all = True

    def __init__(self, store: Store, folder: Path | None = None) -> None:
        self.store = store
        """The folder on the store; each of its calls has a time limit and is repeated in an outage."""
        self.folder = folder
        """Path of the same folder on this machine; ``None`` if the store is not on this machine."""
        self._life: Life | None = None
        self._end = 0
        self._broken = False
        self._merging = Merging()
        self._tidying: DaemonPool | None = None
        self._tidied: Future[None] | None = None

    @override
    def __str__(self) -> str:
        return self.store.location

    @override
    def claim(self) -> None:
        with asking(self, self.folder, "claimed"):
            # Segments also show lives, even if their claims were removed.
            lives = [*self._claims(), *(segment.life for segment, _ in self._lines().sized)]
            last = max(lives, default=Life(0, ""))
            self._claim_behind(last, secrets.token_hex(4))

    def _claim_behind(self, last: Life, token: str) -> None:
        # A name has eight digits, so the next number would not be read as a life.
        if last.number >= LAST_LIFE:
            raise StateError(
                f"{self}: {self._holder(last)} has the last number that a planner can have, which none of ours "
                f"comes to; remove what names {last} in {_CLAIMS} and {_LINES}, or give another runtime.journal"
            )
        self._life = Life(last.number + 1, token)
        says = {
            "version": CLAIM_VERSION,
            "host": socket.gethostname(),
            "pid": getpid(),
            "at": time.time(),
        }
        # If two planners claim the same number at once, the greater token wins, and the other finds out in the next
        # check.
        claim, said = f"{_CLAIMS}/{self._life}", orjson.dumps(says)
        self.in_room(lambda: self.store.publish(claim, said), self.folder)
        self.require_claim()

    @override
    def exists(self) -> bool:
        with asking(self, self.folder, "read"):
            return bool(self.extents())

    @override
    def opened(self) -> BinaryIO:
        with asking(self, self.folder, "read"):
            reader = _Reader(self)
        if not reader.size_bytes:
            raise FileNotFoundError(f"{self}: no segment")
        # A journal is read in lines, but the store is asked for a megabyte at a time.
        return io.BufferedReader(reader, _BUFFER)

    @override
    def begin(self, content: bytes) -> None:
        with asking(self, self.folder, "written"):
            self._put(0, content)
        self._tidy()

    @override
    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        # Small objects of earlier lives at the end are merged into one.
        with asking(self, self.folder, "written"):
            known = kept_bytes - max(1, len(end))
            start = known
            begin, *behind = self.extents()
            # Not with the first bytes behind a mark, because a life that begins there would void the mark.
            for extent in reversed(behind if begin.start else [begin, *behind]):
                if extent.start < start:
                    if extent.stop - extent.start >= _SMALL or kept_bytes - extent.start > _SMALL:
                        break
                    start = extent.start
            with self.opened() as file:
                file.seek(start)
                content = file.read(known - start)
            if len(content) != known - start:
                raise IntegrityError(
                    f"{self}: gave {len(content)} bytes from {start} on where {known - start} were a moment "
                    "ago: something else writes there; resume from a checkpoint"
                )
            # At least one byte, because the first segment of a life voids what others put from there on.
            self.in_room(lambda: self._put(start, content + (end or b"\n")), self.folder)
        self._tidy()

    @override
    def cut(self, kept_bytes: int) -> None:
        # Segments of one life must agree on every byte. Therefore what follows belongs to a new life, which voids the
        # rest.
        self.require_claim()
        assert self._life is not None, "claimed"
        self._merging = Merging()
        with asking(self, self.folder, "claimed"):
            # The least token: if another planner claims this number at the same time, that planner wins.
            self._claim_behind(self._life, "0" * 8)
        self.go_on(kept_bytes)

    @override
    def append(self, content: bytes) -> None:
        if self._broken:
            raise UnavailableError(
                f"{self}: the last record was not written; open the journal again"
            )
        # It is unknown whether a failed put arrived, so nothing may be appended after it.
        self._broken = True
        with asking(self, self.folder, "written"):
            # The same bytes under the same name: a put that did arrive is overwritten with the same content.
            end = self._end
            self.in_room(lambda: self._put(end, content), self.folder)
        self._broken = False
        while (due := self._merging.due()) is not None:
            self._later(partial(self._replace, *due))

    @override
    def since(self) -> Since:
        with asking(self, self.folder, "read"):
            return self._lines().begin

    @override
    def drop_before(self, since: Since) -> bool:
        assert self._life is not None, "claimed"
        try:
            self.store.publish(f"{_LINES}/{Mark(since, self._life).name}", b"")
        except (OSError, UnavailableError) as error:
            # A long journal is no reason to stop, and the next base tries again.
            _LOG.warning("%s stays long: %s", self, error)
            return True
        with asking(self, self.folder, "written"):
            # The next planner either finds the mark, or all segments, as none is removed after its claim is found.
            self.require_claim()
        self._tidy()
        return True

    @override
    def shorten(self, lines: Iterable[bytes]) -> bool:
        raise AssertionError(f"{self} drops segments instead")

    @override
    def move_aside(self) -> str:
        """Give it the first free number; if one journal is the beginning of another, only the longer one is kept."""
        with asking(self, self.folder, "moved"):
            # The claims stay where they are: the appending planner is settled, and begins the journal anew.
            name = moved_aside(self.store, _LINES)
        return f"{self}/{name}"

    @override
    def close(self) -> None:
        if self._tidied is not None and self._tidying is not None:
            wait([self._tidied], _LEAVE_S)  # for the last task
            self._tidying.close(0)
            self._tidying = None

    def extents(self) -> list[Extent]:
        """Return the place of each byte at present.

        Raises:
            IntegrityError: An object is missing.
        """
        return self._found().extents()

    def _lines(self) -> Listed:
        return Listed.of(self._listed(_LINES))

    def _found(self) -> Listed:
        """Return what one listing shows.

        A listing is not a picture of one moment. If segments are put or merged meanwhile, it may show only the later
        ones. An object that is missing in two listings is really missing.
        """
        missing = ""
        for _ in range(_LOOKS):
            found = self._lines()
            try:
                found.extents()
            except IntegrityError as error:
                if str(error) == missing:
                    raise
                missing = str(error)
            else:
                return found
        raise UnavailableError(
            f"{self}: {_LOOKS} listings each missed another object ({missing}); try again"
        )

    def read(self, segment: Segment, offset: int, size_bytes: int) -> bytes:
        """Return bytes of a segment."""
        return self.store.read(f"{_LINES}/{segment.name}", offset, size_bytes)

    def _put(self, start: int, content: bytes) -> None:
        assert self._life is not None, "claimed"
        segment = Segment(start, start + len(content), self._life)
        self.store.publish(f"{_LINES}/{segment.name}", content)
        self.require_claim()
        self._end = segment.stop
        self._merging.added(segment, content)

    @override
    def require_claim(self) -> None:
        assert self._life is not None, "claimed"
        claims = self._claims()
        if (last := max(claims, default=self._life)) > self._life:
            raise StateError(
                f"{self}: {self._holder(last)} has taken the journal over, and this planner hands out nothing more; "
                "where that is another run, give each run_dir a name of its own"
            )
        if self._life not in claims:
            raise StateError(
                f"{self}: the claim of this planner, {self._life}, is gone: somebody removed it, or the folder; give "
                "each run a folder of its own and leave it alone"
            )

    def _holder(self, life: Life) -> str:
        """Describe the planner of a claim; its text is only shown, and decides nothing."""
        try:
            path = f"{_CLAIMS}/{life}"
            # The file may hold anything, so no more is read than the size of a valid claim.
            size = self.store.stat(path).size_bytes
            says = orjson.loads(self.store.read(path, 0, min(size, _LARGEST_CLAIM)))
        except (OSError, OmniloadError, ValueError):
            return f"planner {life}"
        match says:
            case {"version": version, "pid": int(pid), "host": str(host)} if (
                version == CLAIM_VERSION
            ):
                return f"process {pid} on {host!r:.80}"
            case _:
                return f"planner {life}"

    def _claims(self) -> list[Life]:
        found = (Life.read(entry.name) for entry in self._listed(_CLAIMS))
        return [life for life in found if life is not None]

    def _listed(self, folder: str) -> Sequence[Entry]:
        with suppress(FileNotFoundError):
            return self.store.listing(folder)
        return ()

    def _replace(self, merged: Segment, content: bytes, small: Sequence[Segment]) -> None:
        # Written before any is removed: in between, the bytes exist twice, which readers can handle.
        self.store.publish(f"{_LINES}/{merged.name}", content)
        for segment in small:
            self._remove(f"{_LINES}/{segment.name}")

    def _tidy(self) -> None:
        """Remove segments that are void from now on, and earlier claims."""
        self._later(self._remove_void)

    def _remove_void(self) -> None:
        assert self._life is not None, "claimed"
        for name in self._found().needless(self._life):
            self._remove(f"{_LINES}/{name}")
        for life in self._claims():
            if life < self._life:
                self._remove(f"{_CLAIMS}/{life}")

    def _remove(self, path: str) -> None:
        # Another planner may have removed it first.
        with suppress(FileNotFoundError):
            self.store.remove(path)

    def _later(self, call: Callable[[], None]) -> None:
        """Run work in a thread that need not be waited for; on failure, the small objects stay readable."""
        if self._tidying is None:
            # One thread keeps the order: a merge of merged segments must not overtake the merges that write them.
            self._tidying = DaemonPool(1, "omniload-journal")

        def quietly() -> None:
            try:
                call()
            except (OSError, OmniloadError) as error:
                _LOG.warning("%s: small objects stay as they are: %s", self, error)

        self._tidied = self._tidying.submit(quietly)


class _Reader(io.RawIOBase):
    """The bytes of all segments, one after another."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._look()
        self._at = self._starts[0] if self._starts else 0

    def _look(self) -> None:
        self._extents = self._storage.extents()
        self._starts = [extent.start for extent in self._extents]
        self.size_bytes = self._extents[-1].stop if self._extents else 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence]
        self._at = base + offset
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        with asking(self._storage, self._storage.folder, "read"):
            data = self._read(memoryview(buffer).nbytes)
        memoryview(buffer)[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, most: int) -> bytes:
        gone: FileNotFoundError | None = None
        for _ in range(_LOOKS):
            if self._at >= self.size_bytes:
                return b""
            if self._at < self._starts[0]:
                raise UnavailableError(
                    f"{self._storage}: steps before byte {self._starts[0]} were dropped while they were read; try again"
                ) from gone
            extent = self._extents[bisect_right(self._starts, self._at) - 1]
            size = min(most, extent.stop - self._at)
            try:
                return self._storage.read(extent.segment, self._at - extent.segment.start, size)
            except FileNotFoundError as error:
                gone = error
                self._look()  # it was merged with others meanwhile
        raise UnavailableError(
            f"{self._storage}: segments went away {_LOOKS} times while they were read; try again"
        ) from gone
