"""Identification of versions of a file by their content, because a store's time stamps may be too coarse."""

import hashlib
from collections.abc import Hashable, Iterable, Sequence

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest, Segment
from fusefs.stores.protocol import Entry

__all__ = [
    "content_digest",
    "content_name",
    "identity_of",
    "ids_of",
    "is_content",
    "segments_of",
    "spliceable",
]


def content_name(manifest: Manifest) -> Hashable:
    """Return a permanent name of a manifest's content: segments never change, and their names are never reused."""
    return _named(manifest.segments), manifest.inline, manifest.target


def content_digest(manifest: Manifest) -> str:
    """Return ``content_name`` as one short word."""
    return hashlib.blake2b(repr(content_name(manifest)).encode(), digest_size=16).hexdigest()


def identity_of(manifest: Manifest | None, entry: Entry) -> str:
    """Return a text that identifies a version among all versions of its path, for another process.

    Args:
        manifest: Manifest of the version; None for a plain file.
        entry: The store's entry of the version.
    """
    if manifest is not None:
        return f"striped {content_digest(manifest)}"
    return f"plain {entry.size_bytes} {entry.mtime_ns} {entry.version}"


def is_content(manifest: Manifest, content: Content) -> bool:
    """Return whether a manifest holds exactly this content."""
    if isinstance(content, bytes):
        return not manifest.segments and manifest.inline == content and manifest.target is None
    return _named(manifest.segments) == _named(content) and not manifest.inline


def segments_of(content: Content) -> tuple[Segment, ...]:
    """Return the segments of content; bytes have none."""
    return () if isinstance(content, bytes) else content


def ids_of(segments: Iterable[Segment]) -> set[str]:
    """Return the ids of the segments that these are ranges of."""
    return {segment.segment_id for segment in segments}


def spliceable(manifest: Manifest | None) -> tuple[Segment, ...]:
    """Return the segments of a version that another version can share; bytes in a manifest are not shared."""
    return manifest.segments if manifest is not None and not manifest.inline else ()


def _named(segments: Sequence[Segment]) -> tuple[tuple[str, int, int], ...]:
    return tuple((s.segment_id, s.before_bytes, s.size_bytes) for s in segments)
