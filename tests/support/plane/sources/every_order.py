"""Records of a source compared with those that another reader found, in every order and from any position."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.record_source import RecordSource, open_source
from omniload.source.spec import SourceSpec
from tests.support.examples import few

__all__ = ["METHODS", "UNITS", "Found", "emptied", "require_records", "seldom"]

Found = tuple[int, ...] | None
"""Token ids of a record, empty for an empty record; ``None`` is a bad record."""
METHODS = ("none", "shards", "block", "units", "full")
UNITS = st.sampled_from([1, 40, 3_000, 1 << 20])
"""Bytes of a unit: one record, a few records, or a whole file."""
_SKIPPING = {"policy": "skip", "limit": "100%"}
_SOURCE: TypeAdapter[Any] = TypeAdapter(SourceConfig)

seldom = settings(
    few(25, soak=500),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Settings of properties whose examples write files and open each of them ten times."""


def emptied(folder: Path) -> Path:
    """Return a folder without the files of the example before."""
    for path in folder.iterdir():
        path.unlink()
    return folder


def require_records(
    folder: Path,
    expected: Sequence[Found],
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    methods: Collection[str] = METHODS,
    **config: Any,
) -> None:
    """Compare a source with its records in the order of the files.

    Args:
        folder: Folder of its files.
        expected: The records that the other reader found.
        draw: Draws the positions where reading resumes.
        methods: Orders of ``shuffle`` that the files can be read in.
        config: The mix file's entry for the source; by default all files of the folder.
    """
    count, told = len(expected), None
    for method in methods:
        keys = {"shuffle": {"method": method}, "on_error": _SKIPPING, "path": "*", **config}
        spec = SourceSpec(
            "web",
            _SOURCE.validate_python(keys),
            seed=3,
            tokenizer=ByteTokenizer(type="bytes"),
            base_dir=folder,
        )
        source = open_source(spec)
        assert source.positions_per_epoch == count
        found, places = _records_of(source, 0, count)
        if method == "none":
            assert list(found.values()) == list(expected)
            told = places
        assert sorted(found.values(), key=str) == sorted(expected, key=str)
        assert places == told
        assert len(places) == list(expected).count(None)
        start = draw(st.integers(0, 2 * count - 1))
        stop = draw(st.integers(start + 1, 2 * count))
        whole, _ = _records_of(source, 0, 2 * count)
        resumed, _ = _records_of(open_source(spec), start, stop)
        assert resumed == {at: whole[at] for at in range(start, stop)}


def _records_of(source: RecordSource, start: int, stop: int) -> tuple[dict[int, Found], list[Any]]:
    """Return the records of positions, and the places of the bad ones."""
    block = source.read(start, stop)
    found: dict[int, Found] = dict.fromkeys(range(start, stop), ())
    found |= dict.fromkeys(block.table.bad_N.tolist())
    for i, position in enumerate(block.table.positions_N.tolist()):
        found[position] = tuple(block.tokens[i].tolist())
    return found, sorted(block.table.places)
