"""Copying units into buffers of the caller, past the cache: each is read once and copied once."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from fusefs.cache.block_cache import Data
from fusefs.cache.local_copy import runs_of
from fusefs.format.file_segments import FileSegment, check_unit
from fusefs.format.layout import UnitRun
from fusefs.read.unit_source import ReadEngine, UnitSource

__all__ = ["BufferFiller", "Placement"]

Placement = Mapping[int, list[tuple[int, memoryview]]]
"""Unit to the buffers that want bytes of it, each from a byte within the unit on."""


class BufferFiller:
    """Fills buffers from one version of a file. Safe in threads."""

    def __init__(self, engine: ReadEngine, source: UnitSource) -> None:
        self._engine = engine
        self._source = source

    def fill(self, piece: FileSegment, targets: Placement) -> Iterator[Future[None]]:
        """Copy units into buffers, past the cache; yield one future per read."""
        local, remote = self._source.parted(piece, sorted(targets))
        for units in runs_of(local, piece.layout.unit_bytes, self._engine.longest_read):
            yield self._engine.local_pool.submit(self._fill_from_copy, piece, units, targets)
        for run in self._source.runs(piece, remote):
            self._source.hold()
            yield self._engine.pool.submit(self._fill_from_store, piece, run, targets)

    def _fill_from_copy(self, piece: FileSegment, units: list[int], targets: Placement) -> None:
        found = self._source.read_copy(piece, units)
        _place(found, targets)
        for run in self._source.runs(piece, [unit for unit in units if unit not in found]):
            self._source.hold()
            self._fill_from_store(piece, run, targets)

    def _fill_from_store(self, piece: FileSegment, run: UnitRun, targets: Placement) -> None:
        try:
            if piece.data is not None:
                _place({unit: piece.cached_unit(unit) or b"" for unit in run.units}, targets)
                return
            parts = dict(self._source.read_store(piece, run))
            for unit, part in parts.items():
                check_unit(piece, unit, part)
            _place(parts, targets)
            self._source.keep(piece, parts)
        finally:
            self._source.let_go()


def _place(parts: Mapping[int, Data], targets: Placement) -> None:
    for unit, part in parts.items():
        for start, buffer in targets[unit]:
            buffer[:] = part[start : start + len(buffer)]
