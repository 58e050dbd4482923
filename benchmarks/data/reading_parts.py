"""Time of each part of our reading of text: the time in functions of a real read, without functions they call."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.data.library_ways import Way, batch_ways, lines_ways, same_duties
from omniload.mix.order import Order
from omniload.source import columns
from omniload.source.formats import jsonl, parquet
from omniload.source.parsing import compressed
from omniload.source.parsing.json_lines import many_lines

__all__ = ["PARTS", "SAME", "parts_of"]

PARTS = ("decoding", "checks", "laid end to end", "order and views", "all else")
"""Names of the parts.

Decoding of lines is decompressing and parsing. Texts of Parquet are checked while they are laid end to end, and long
lines are checked by their parser.
"""
SAME = "pyarrow, same duties"
"""Name of a reader that does the same work with pyarrow alone; only for Parquet."""
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("decoding", parquet.ParquetFormat, "_laid_texts"),
    ("decoding", parquet.ParquetFormat, "_indexed_texts"),
    ("decoding", compressed.ForwardReader, "range_of"),
    ("decoding", many_lines.PlainLines, "read"),
    *(("decoding", jsonl, name) for name in ("text_bytes", "object_of", "text_in")),
    *(("checks", parquet, name) for name in ("is_utf8", "nulls_of", "text_bytes", "_are_within")),
    *(("checks", many_lines, name) for name in ("is_utf8", "_are_apart", "_are_flat")),
    *(
        ("laid end to end", columns.Layer, name)
        for name in ("__init__", "lay_values", "lay_texts", "finish")
    ),
    ("laid end to end", columns.Pieces, "take"),
    ("order and views", columns.Pieces, "texts"),
    ("order and views", Order, "block_of"),
)
"""Functions by part; the time of a function excludes measured functions that it calls."""


def parts_of(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return the processor seconds of each part of one read of a folder, in order and shuffled: medians of turns."""
    is_parquet = any(folder.glob("*.parquet"))
    ways = (batch_ways if is_parquet else lines_ways)(folder)
    same = same_duties(folder) if is_parquet else {}
    return {
        order: {
            **_medians([_measured(ways[order]) for _ in range(repeats + 1)][1:]),
            **({SAME: median(same[order]()[1] for _ in range(repeats))} if same else {}),
        }
        for order in ("in order", "shuffled")
    }


def _medians(turns: list[Mapping[str, float]]) -> dict[str, float]:
    return {part: median(turn[part] for turn in turns) for part in PARTS}


def _measured(way: Way) -> dict[str, float]:
    spent: Counter[str] = Counter()
    with _told_apart(spent):
        _, whole_s = way()
    known = {part: spent[part] for part in PARTS[:-1]}
    return {**known, PARTS[-1]: whole_s - sum(known.values())}


@contextmanager
def _told_apart(spent: Counter[str]) -> Iterator[None]:
    """Add the time within the functions of each part to ``spent``."""
    within: list[float] = []
    with ExitStack() as patched:
        for part, holder, name in _PLACES:
            counted = _counted(getattr(holder, name), part, spent, within)
            patched.enter_context(patch.object(holder, name, counted))
        yield


def _counted(
    function: Callable[..., object], part: str, spent: Counter[str], within: list[float]
) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **keys: object) -> object:
        within.append(0.0)
        began_s = time.process_time()
        try:
            return function(*args, **keys)
        finally:
            took_s = time.process_time() - began_s
            spent[part] += took_s - within.pop()
            if within:
                within[-1] += took_s

    return call
