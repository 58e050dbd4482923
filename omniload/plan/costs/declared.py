"""Columns of metadata that costs and strategies read, and the cost that a mix file names.

A function says by its attribute ``of`` which columns it reads; nothing else is made, asked for or sent::

    lengths, sources, patches    of every piece; patches are those of its images, 0 where it has none
    tags.NAME                    a tag of its source, as the mix file has it
    columns.NAME                 a tag of its sample: a column of whole samples, under ``batch.columns``

Shape suffixes:
    P  pieces        S  sources
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.base.settings.registry import registered
from omniload.mix.columns import column_kind, name_outside
from omniload.mix.config import BalanceConfig, MixConfig
from omniload.plan.cost import CostFunction, QuadraticCost
from omniload.plan.costs.words import fault_of_words
from omniload.plan.records import CostedRows

__all__ = [
    "column_of_tag",
    "columns_of",
    "columns_read_by",
    "cost_of",
    "tags_of_no_source",
    "tags_read",
]

_COSTS = "omniload.costs"
"""Group of entry points."""
_OF_SOURCES, _OF_SAMPLES = "tags.", "columns."
"""Begin the names of columns that hold a tag of each piece's source, or sample."""
_PATCHES = "patches"
_LENGTHS = ("lengths",)
_OF_PIECES = (*_LENGTHS, "sources", _PATCHES)


def columns_read_by(
    function: Callable[..., Any], said: str, default: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the columns that a function reads, as its attribute ``of`` says.

    Args:
        function: A cost or a strategy.
        said: What a mix file says to have it, for messages.
        default: Columns of a function without that attribute.

    Raises:
        ConfigError: The attribute is not a tuple of names, or one of them is of no column.
    """
    columns = getattr(function, "of", default)
    if not isinstance(columns, tuple) or not all(isinstance(name, str) for name in columns):
        raise ConfigError(f"{said} has of={columns!r:.80}; give a tuple of names of columns")
    names = cast("tuple[str, ...]", columns)
    for name in names:
        if name not in _OF_PIECES and not name.startswith((_OF_SOURCES, _OF_SAMPLES)):
            raise ConfigError(
                f"{said} reads {name!r}, which no step has; there are {', '.join(_OF_PIECES)}, {_OF_SOURCES}NAME of a "
                f"source and {_OF_SAMPLES}NAME of a sample"
            )
    return names


def cost_of(balance: BalanceConfig) -> tuple[CostFunction, tuple[str, ...]]:
    """Return the cost function of a mix file, and the columns it is called with.

    A registered function is called with the lengths of the pieces, or with the columns that
    its attribute ``of`` names; ``tags.NAME`` is a tag of the source of each, empty where it has none.

    Raises:
        ConfigError: None is registered under that name, several are, it cannot be imported, or ``of`` is no tuple of
            names.
    """
    if balance.cost == "quadratic":
        return QuadraticCost(linear=balance.linear, quadratic=balance.quadratic), _LENGTHS
    function = registered(_COSTS, balance.cost, ("quadratic",)).function
    columns = columns_read_by(function, f"balance.cost {balance.cost!r}", _LENGTHS)
    return cast("CostFunction", function), columns


def column_of_tag(tag: str) -> str:
    """Return the column of metadata that holds a tag of samples, a column of a mix as known inside."""
    return f"{_OF_SAMPLES}{name_outside(tag)}"


def tags_read(mix: MixConfig, columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the tags of samples among the columns that a mix's cost and strategy read, as known inside, sorted.

    A tag that no batch brings is refused: a record whose tag cannot be read is a bad one, and which records those are
    is for what is trained on to say, not for how it is balanced.

    Args:
        mix: The mix.
        columns: Those that each reads, by its key below ``balance``.

    Raises:
        ConfigError: The mix has no such column of whole samples under ``batch.columns``, or one whose default is no
            text that a cost is given.
    """
    every = {column for read in columns.values() for column in read}
    wanted = {column for column in every if column.startswith(_OF_SAMPLES)}
    if not wanted:
        return ()
    had = {column_of_tag(name): name for name in mix.columns_used if column_kind(name).is_tag}
    if missing := sorted(wanted - had.keys()):
        name = missing[0].removeprefix(_OF_SAMPLES)
        raise ConfigError(
            f"{_said_to_read(mix.balance, columns, missing[0])} {missing[0]!r}, and batches have "
            f"{sorted(had) or 'no column of whole samples'}; name {name!r} under batch.columns, and under columns of "
            "sources with of: samples"
        )
    tags = tuple(sorted(had[column] for column in wanted))
    for tag in tags:
        _require_default(mix, tag, _said_to_read(mix.balance, columns, column_of_tag(tag)))
    return tags


def tags_of_no_source(mix: MixConfig, columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what is to be said of each tag of sources that a mix's cost or strategy reads and no source has.

    A doubt, and no refusal: a cost may serve many mixes, and a source that has the tag may be added.

    Args:
        mix: The mix.
        columns: Those that each reads, by its key below ``balance``.
    """
    had = {f"{_OF_SOURCES}{tag}" for source in mix.sources.values() for tag in source.tags}
    wanted = {name for read in columns.values() for name in read if name.startswith(_OF_SOURCES)}
    return [
        f"{_said_to_read(mix.balance, columns, name)} {name!r}, which is empty for every piece: no source has that "
        f"tag, there are {sorted(had) or 'none'}; name {name.removeprefix(_OF_SOURCES)!r} under tags of a source"
        for name in sorted(wanted - had)
    ]


def _said_to_read(balance: BalanceConfig, columns: Mapping[str, Sequence[str]], column: str) -> str:
    """Return who reads a column, the cost, the strategy or both, and that they do: the first has its line told."""
    readers = [key for key, read in columns.items() if column in read]
    said = " and ".join(f"balance.{key} {getattr(balance, key)!r}" for key in readers)
    return f"{said} {'read' if len(readers) > 1 else 'reads'}"


def _require_default(mix: MixConfig, tag: str, said: str) -> None:
    kind, name = column_kind(tag), name_outside(tag)
    if not isinstance(kind.default, str):
        return
    if fault := fault_of_words(Ragged.of([kind.default_V], np.uint8)):
        source = next(s for s, each in mix.sources.items() if tag in each.columns_read)
        raise ConfigError(
            f"sources.{source}.columns.{name}.default: {said} it, and it is {fault}, or give another default"
        )


def columns_of(
    rows: CostedRows, tags_S: Sequence[Mapping[str, str]], wanted: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return the metadata of a step's pieces in addition to their lengths.

    Args:
        rows: The rows of the step, their images where it may have any, and the tags of samples.
        tags_S: Tags of each source.
        wanted: Requested columns; tags that are not requested are not computed.
    """
    pieces, images = rows.pieces, rows.images
    patches = {}
    if images is not None:
        patches = {_PATCHES: images.patches_P(len(pieces))}
    elif _PATCHES in wanted:
        # Also of a step that happens to hold no image: a cost that reads them deals that one too.
        patches = {_PATCHES: np.zeros(len(pieces), np.int64)}
    tags = {
        # A source without the tag has an empty one: a cost function sees a column of text, whole.
        column: np.array([held.get(column.removeprefix(_OF_SOURCES), "") for held in tags_S])
        for column in wanted
        if column.startswith(_OF_SOURCES)
    }
    of_sources = {column: values_S[pieces.sources_P] for column, values_S in tags.items()}
    return {"sources": pieces.sources_P} | patches | of_sources | dict(rows.tags)
