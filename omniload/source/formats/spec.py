"""What a module of a format provides: one value with the names of its files and the functions that read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniload.source.files import ShardFile
from omniload.source.formats.format import Format
from omniload.source.index import IndexCache
from omniload.source.patterns import FileNames

__all__ = ["FormatSpec", "Magic"]

Magic = tuple[tuple[int, bytes], ...]
"""Pairs of offset and bytes that a file of a format contains; a match of all pairs identifies the format."""


def _as_found(files: Sequence[ShardFile], _: object) -> tuple[ShardFile, ...]:
    # In most formats, every named file is a shard.
    return tuple(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """A format as the registry stores it."""

    what: str
    """Noun for a file of the format in messages, such as ``a Parquet file``."""
    names: FileNames
    """Names of its files."""
    open: Callable[[Sequence[ShardFile], Any, IndexCache | None], Format]
    """Opens the shards of a source, from the shards, the entry in the mix file, and the place of the index."""
    magic: tuple[Magic, ...] = ()
    """Alternatives for the bytes that a file of the format contains; empty if a file may begin with any bytes."""
    digests_all: bool = False
    """Whether the digest of a shard covers every byte, not a sample."""
    knows_columns: bool = False
    """Whether opening a source checks the columns of all its files, and refuses a file without a named column."""
    shards: Callable[[Sequence[ShardFile], Any], tuple[ShardFile, ...]] = _as_found
    """Returns the shards for the files that the patterns name, and the entry in the mix file.

    Needed if a file lists other files, or needs a companion file.
    """

    find: Callable[[str, Any, Path], tuple[ShardFile, ...]] | None = None
    """Finds the shards of a source whose data set is a folder of files that do not show their type.

    Takes the name of the source, its entry in the mix file, and the folder that relative paths start from.
    """
    at_versions: Callable[[str, Any, Path, str], Any] | None = None
    """Returns the entry of a source in the mix file with the versions of its data sets named.

    Takes the name, the entry, the folder, and a digest. The versions are those whose shards have this digest, if there
    are any, else the newest.
    """

    def matches(self, head: bytes) -> bool:
        """Return whether ``head``, the beginning of a file, identifies this format."""
        return any(
            all(head[at : at + len(mark)] == mark for at, mark in marks) for marks in self.magic
        )
