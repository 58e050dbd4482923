"""Objects of versions that left their path: removed when nobody here reads them any more."""

import os
import threading
from collections import Counter
from collections.abc import Iterable

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest
from fusefs.stores.protocol import Store
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger

__all__ = ["ObjectReferences"]

_LOG = get_logger(__name__)


class ObjectReferences:
    """Counts the readers of each segment in this process. Safe in threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock, self._process = threading.Lock(), os.getpid()
        self._pins: Counter[str] = Counter()
        self._deferred: dict[str, list[str]] = {}

    def pin(self, manifest: Manifest) -> None:
        """Keep the objects of a version until ``unpin``."""
        with self._lock:
            self._pins.update(segment.segment_id for segment in manifest.segments)

    def unpin(self, manifest: Manifest) -> None:
        """Release a version; its last reader also removes the objects that were condemned meanwhile."""
        if os.getpid() != self._process:
            # a forked process: the parent still reads the objects, and no thread here may be able to release the lock
            return
        doomed: list[str] = []
        with self._lock:
            for segment in manifest.segments:
                self._pins[segment.segment_id] -= 1
                if not self._pins[segment.segment_id]:
                    del self._pins[segment.segment_id]
                    doomed += self._deferred.pop(segment.segment_id, [])
        self._remove(doomed)

    def release_or_defer(self, replaced: Manifest | None, kept: Iterable[str] = ()) -> None:
        """Remove the objects of a replaced version that are not ``kept``, now or at the last ``unpin``."""
        if replaced is None:
            return
        still = set(kept)
        doomed = []
        with self._lock:
            for segment in replaced.distinct_segments():
                paths = [path for path in segment.object_paths() if path not in still]
                if self._pins.get(segment.segment_id):
                    # A reader in this process has the old version open; a reader in another mount gets ESTALE.
                    self._deferred[segment.segment_id] = paths
                else:
                    doomed += paths
        self._remove(doomed)

    def discard(self, content: Content, *, kept: Manifest | None = None) -> None:
        """Remove objects of content that was never published, except those that ``kept`` names."""
        if not isinstance(content, bytes):
            named = {s.segment_id for s in kept.segments} if kept is not None else set()
            # Skip the named segments: they may have been condemned with the version they belong to.
            loose = tuple(s for s in content if s.segment_id not in named)
            self.release_or_defer(Manifest(mtime_ns=0, segments=loose))

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                self._store.remove(path)
            except FileNotFoundError:
                continue  # another mount replaced the same version first
            except (OSError, OmniloadError) as error:
                # An orphan costs space, not data: fsck finds it.
                _LOG.info("object %s stays an orphan: %s", path, error)
