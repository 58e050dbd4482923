"""What a module of a format hands over: one value that says what its files are called and who reads them."""

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
"""Where a file of a format holds which bytes; all of them together show what it is."""


def _as_found(files: Sequence[ShardFile], _: object) -> tuple[ShardFile, ...]:
    # Most formats: every file that is named is a shard.
    return tuple(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """A format, as the registry holds it."""

    what: str
    """What a file of it is, such as ``a Parquet file``, for messages."""
    names: FileNames
    """What its files are called."""
    open: Callable[[Sequence[ShardFile], Any, IndexCache | None], Format]
    """Opens the shards of a source of this type: the shards, what the mix file says, where their index is kept."""
    magic: tuple[Magic, ...] = ()
    """Bytes that a file of it holds, one of these; none where it may begin with anything."""
    digests_all: bool = False
    """Whether the digest of a shard covers every byte of it, and not a sample."""
    knows_columns: bool = False
    """Whether whoever opens a source looks at the columns of all its files: one that lacks what is named is refused."""
    shards: Callable[[Sequence[ShardFile], Any], tuple[ShardFile, ...]] = _as_found
    """From the files that the patterns name, and what the mix file says, to the shards, where a file lists others or
    needs one beside it."""

    find: Callable[[str, Any, Path], tuple[ShardFile, ...]] | None = None
    """Finds the shards of a source by itself, where a data set is a folder whose files say nothing of what they are:
    name of the source, what the mix file says, and the folder that relative paths start at."""
    at_versions: Callable[[str, Any, Path, str], Any] | None = None
    """Returns what a mix file says of a source with the versions of its data sets named: those whose shards have a
    digest, where some have; else the newest. Takes the name, what the file says, the folder, and the digest."""

    def matches(self, head: bytes) -> bool:
        """Whether a file that begins with ``head`` shows that it is of this format."""
        return any(
            all(head[at : at + len(mark)] == mark for at, mark in marks) for marks in self.magic
        )
