"""Content in a spool, and the segments of the store that lie under it."""

from collections.abc import Sequence

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest, Segment
from fusefs.read.file_reader import FileReader
from fusefs.tree.freshness import names_segments
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import ids_of, segments_of, spliceable
from fusefs.vfs.file.content_state import ContentState
from fusefs.vfs.file.write_back import granule_bytes_of, written_from
from fusefs.write.splice import MOST_RANGES, MOST_RANGES_CLOSED
from fusefs.write.spool import Spool, SpoolPlace

__all__ = ["SpooledContent", "is_there"]


class SpooledContent:
    """Bytes that lie here, over others that lie in the store.

    Args:
        files: The namespace.
        place: Where the spool lies.
        path: Decides the granule.
        opened: The version underneath.
        loose: Durable content that no manifest names, in its place: what was appended so far.
    """

    state = ContentState.SPOOLED
    version = None
    is_small = False

    def __init__(
        self,
        files: StripedFiles,
        place: SpoolPlace,
        path: str,
        opened: OpenVersion | None,
        loose: Content | None,
    ) -> None:
        self._files = files
        self._base: tuple[Segment, ...]
        """What the spool lies over and a splice may keep."""
        reader: FileReader | None
        if loose is None:
            self._base = spliceable(opened.manifest) if opened is not None else ()
            reader = opened.reader if opened is not None else None
        else:
            self._base, reader = segments_of(loose), files.opener.versions.reader_of(loose)
        self.spool = Spool(place, granule_bytes_of(files, path), reader)
        try:
            if not self._base:
                self.spool.hold_all()
        except BaseException:
            self.spool.close()
            raise
        self._loose: Content = loose if loose is not None else b""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.spool.granules.size_bytes

    @property
    def needs_version(self) -> bool:
        """Whether some bytes are read from the version underneath."""
        return self.spool.granules.num_missing() > 0

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | None:
        """Return bytes that are at hand; None where reading would wait. Never waits."""
        del process
        return self.spool.try_read(offset, size_bytes)

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without waiting for the store."""
        del path
        return self.spool.writes_now(offset, size_bytes)

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Make it durable and return the content to publish.

        Args:
            path: Where to.
            shown: The manifest of the version that is open.
            last: Whether this is no flush in between: then more is written for a file in fewer ranges.
        """
        base = self._base if is_there(self._files, path, shown, self._base) else ()
        most_ranges = MOST_RANGES_CLOSED if last else MOST_RANGES
        return written_from(self.spool, base, self._files, path, most_ranges=most_ranges)

    def take_loose(self) -> Content:
        """Return what no manifest names, once: a publish that fails may have named it."""
        loose, self._loose = self._loose, b""
        return loose

    def lies_over(self, opened: OpenVersion) -> None:
        """Note that a version holds every byte as it is here."""
        self._base = spliceable(opened.manifest)
        self.spool.published(opened.reader)

    def close(self, kept: Manifest | None) -> None:
        """Let the bytes go, and what no manifest names but ``kept``."""
        self.spool.close()
        self._files.references.discard(self._loose, kept=kept)

    abandon = close


def is_there(
    files: StripedFiles, path: str | None, shown: Manifest | None, segments: Sequence[Segment]
) -> bool:
    """Return whether another mount has left alone what the next version takes over from the one that is open.

    Args:
        files: The namespace.
        path: Where the file is published, if it is.
        shown: The manifest of the version that is open.
        segments: Of the next version.
    """
    shared = ids_of(segments) & ids_of(spliceable(shown))
    return not shared or path is None or names_segments(files, path, shared)
