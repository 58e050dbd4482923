"""Writing what a spool holds to the store: the changes, spliced in, or the whole file anew."""

from collections.abc import Iterator, Sequence

from fusefs.format.content import Content
from fusefs.format.manifest import Segment
from fusefs.tree.namespace import StripedFiles
from fusefs.write.splice import filled, is_worn, splice
from fusefs.write.spool import Spool

__all__ = ["granule_bytes_of", "written_from"]

_COPY_BYTES = 8 << 20
_GRANULE_BYTES = 64 << 10
"""Most bytes fetched and published for a write of one byte."""


def granule_bytes_of(files: StripedFiles, path: str) -> int:
    """Return the granule of a spool for the file at a path."""
    return min(_GRANULE_BYTES, files.config.striping_of(path).unit)


def written_from(
    spool: Spool, base: Sequence[Segment], files: StripedFiles, path: str, *, most_ranges: int
) -> Content:
    """Make what a spool holds durable and return the content to publish.

    Args:
        spool: The file.
        base: Segments that the spool lies over and the content may keep; none where they
            are gone, so that all of it is written.
        files: Where to.
        path: Decides the striping.
        most_ranges: As ``is_worn``.

    Raises:
        OSError: ``ESTALE`` where bytes are to be written anew that only a version holds
            which another mount has replaced; what the store raised.
    """
    if base:
        changed = spool.granules.changed()
        plan = splice(base, spool.granules.size_bytes, changed)
        if not is_worn(plan, most_ranges=most_ranges):
            if not changed:
                return filled(plan, None)
            size, unit = sum(map(len, changed)), files.config.striping_of(path).unit
            scattered = size < unit * len(changed)
            patch = files.writers.patch(
                path,
                _bytes_of(spool, changed),
                unit_bytes=min(_GRANULE_BYTES, unit) if scattered else unit,
                size_bytes=size,
            )
            return filled(plan, patch)
    writer = files.writers.file(path)
    try:
        for data in _bytes_of(spool, [range(spool.granules.size_bytes)]):
            writer.write(data)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _bytes_of(spool: Spool, ranges: Sequence[range]) -> Iterator[bytes]:
    for span in ranges:
        for at in range(span.start, span.stop, _COPY_BYTES):
            yield spool.read(at, min(_COPY_BYTES, span.stop - at))
