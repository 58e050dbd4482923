"""Facts that a mount shows about itself: ``/.omnifs/stats.json`` and the layout of a file."""

import os
import time
from typing import Any

import orjson

from fusefs.metrics.counters import LATENCY_BOUNDS_S, Numbers
from fusefs.tree.namespace import StripedFiles
from fusefs.tree.walk import files_below
from omniload.base.secrets import without_secrets

__all__ = [
    "DROP_XATTR",
    "LAYOUT_XATTR",
    "Statistics",
    "drop_cached",
    "drop_json",
    "layout_json",
    "layout_of",
]

LAYOUT_XATTR = "user.omnifs.layout"
DROP_XATTR = "user.omnifs.drop"
"""Attribute whose reading drops the cached bytes of a path; no other call reaches a read-only mount."""
# Numbers grow, and a reader that trusts the size of an earlier stat must still get all of them.
_VIEW_BYTES = 8192
_XATTR_BYTES = 60 << 10
"""Most bytes of our attributes; the kernel passes on 64 KiB of an extended attribute."""


class Statistics:
    """Counts of a mount, taken on request."""

    def __init__(self, files: StripedFiles) -> None:
        self._files = files
        self._started_s = time.monotonic()
        self.open_views: dict[int, bytes] = {}
        """Text of each open handle, fixed when it was opened."""

    def as_json(self) -> bytes:
        """Return the numbers as JSON, padded to a fixed size so that an earlier stat fits."""
        files = self._files
        found = files.numbers()
        memory, disk = found.tiers["memory"], files.disk
        numbers = {
            "version": 1,
            "store": without_secrets(files.store.location),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "requests": found.requests,
            "cache": {
                "capacity_bytes": files.config.cache,
                "used_bytes": found.cache_bytes["memory"],
                "hits": memory.hits,
                "misses": memory.misses,
            },
            "disk_cache": None
            if disk is None
            else {
                "capacity_bytes": disk.capacity_bytes,
                "used_bytes": found.cache_bytes["disk"],
                "writable": disk.is_writable,
            },
            "write_window": {
                "capacity_bytes": files.config.write_window,
                "used_bytes": found.window_bytes,
            },
            "tiers": found.tiers,
            "store_calls": found.store_calls,
            "retries": found.retries,
            "abandoned_calls": {"total": found.abandoned, "hanging": found.hanging},
            "store_reads": _latencies(found),
        }
        text = orjson.dumps(numbers, option=orjson.OPT_INDENT_2)
        return text.ljust(_VIEW_BYTES - 1) + b"\n"


def _latencies(numbers: Numbers) -> dict[str, Any]:
    """Return the number of store reads up to each bound, and the time of all reads."""
    bounds = [str(bound) for bound in LATENCY_BOUNDS_S] + ["more"]
    return {
        "total_s": round(numbers.store_read_s, 6),
        "by_seconds": dict(zip(bounds, numbers.store_reads_by_latency, strict=True)),
    }


def layout_of(files: StripedFiles, path: str) -> dict[str, Any]:
    """Return a description of how a file is stored."""
    info = files.stat(path)
    found: dict[str, Any] = {
        "path": path,
        "kind": info.kind,
        "size_bytes": info.size_bytes,
        "mode": f"{info.mode:04o}",
        "mtime_ns": info.mtime_ns,
        "stored": info.stored,
    }
    manifest = files.manifest(path) if info.stored == "manifest" else None
    if manifest is not None:
        found["inline_bytes"] = len(manifest.inline)
        found["segments"] = [
            {
                "id": segment.segment_id,
                "size_bytes": segment.size_bytes,
                "unit_bytes": segment.layout.unit_bytes,
                "stripe_count": segment.layout.stripe_count,
                "objects": segment.object_paths(),
            }
            for segment in manifest.segments
        ]
    return found


def layout_json(files: StripedFiles, path: str) -> bytes:
    """Return ``layout_of``, and the cached bytes of the file, as JSON."""
    found = layout_of(files, path)
    # JSON cannot hold other bytes of a name; the text is for people.
    found["path"] = os.fsencode(path).decode(errors="backslashreplace")
    if found["kind"] == "file":
        # Do not fetch the bytes, because a look must not change the cache.
        with files.open(path, brings=False) as file:
            memory, disk = file.reader.cached.held_bytes()
        found["cached"] = {"memory_bytes": memory, "disk_bytes": disk}
    text = orjson.dumps(found)
    if len(text) > _XATTR_BYTES and "segments" in found:
        # An attribute holds no more than this, so only the first segments of a long file are named.
        found["num_segments"], segments = len(found["segments"]), found["segments"]
        found["segments"] = []
        left = _XATTR_BYTES - len(orjson.dumps(found))
        for segment in segments:
            left -= len(orjson.dumps(segment)) + 1
            if left < 0:
                break
            found["segments"].append(segment)
        text = orjson.dumps(found)
    return text


def drop_cached(files: StripedFiles, path: str) -> tuple[int, int]:
    """Forget everything cached for a file, or for all files below a directory: attributes, blocks, local copies.

    This is for a plain file that was changed without a change of its size or time stamp, or to make
    room by hand. Open versions stay readable.

    Returns:
        Bytes that were dropped from memory and from the disk.
    """
    path = files.visible(path)
    # First, or outdated knowledge of the path would decide what is dropped.
    files.catalog.forget(path)
    memory = disk = 0
    for file_path, _ in files_below(files, path):
        with files.open(file_path, brings=False) as file:
            dropped = files.opener.versions.drop(file)
        memory, disk = memory + dropped[0], disk + dropped[1]
    return memory, disk


def drop_json(files: StripedFiles, path: str) -> bytes:
    """Forget everything cached for a path, and return the number of dropped bytes as JSON."""
    memory, disk = drop_cached(files, path)
    return orjson.dumps({"memory_bytes": memory, "disk_bytes": disk})
