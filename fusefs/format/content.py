"""Unpublished content of a file, and the bytes that may stand as a plain file."""

from fusefs.format.manifest import Segment
from fusefs.format.manifest_header import MAGIC, TAIL, has_manifest_size

__all__ = ["Content", "may_be_plain"]

Content = bytes | tuple[Segment, ...]
"""Durable, unpublished content of a file: its bytes, or its segments in order."""


def may_be_plain(parts: list[bytearray]) -> bool:
    """Return whether bytes can be a plain file without being mistaken for a manifest."""
    size = sum(map(len, parts))
    # Every part but the last is long, except with tiny units: join these, so that magic cannot cross a border.
    joined = parts if size > 1 << 16 else [bytearray().join(parts)]
    # Whatever the size, because fsck takes such a file for a truncated manifest.
    if joined[0].startswith(MAGIC):
        return False
    return not (has_manifest_size(size) and bytearray().join(joined[-2:]).endswith(TAIL))
