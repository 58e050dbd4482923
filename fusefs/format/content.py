"""Content of a file that is not published yet, and which bytes may stand as a plain file."""

from fusefs.format.manifest import Segment
from fusefs.format.manifest_header import MAGIC, TAIL, has_manifest_size

__all__ = ["Content", "may_be_plain"]

Content = bytes | tuple[Segment, ...]
"""Durable content of a file that is not published yet: its bytes, or its segments in order."""


def may_be_plain(parts: list[bytearray]) -> bool:
    """Return whether bytes can stand as a plain file without being taken for a manifest."""
    size = sum(map(len, parts))
    # No part but the last is short, so that magic cannot lie across parts of a tiny unit.
    joined = parts if size > 1 << 16 else [bytearray().join(parts)]
    # Whatever its size: fsck takes such a file for a manifest that was cut short.
    if joined[0].startswith(MAGIC):
        return False
    return not (has_manifest_size(size) and bytearray().join(joined[-2:]).endswith(TAIL))
