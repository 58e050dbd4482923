"""Findings of a check about sources, kept with their indexes, so that an unchanged source is not opened again.

A finding depends on the entry of the source in the mix file, the status of its shards in the file system, and the
tokenizer. All of these are compared, but no shard is read, so only a later read notices a flipped bit on a disk. Faults
are never kept.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
import pyarrow as pa
from pydantic import ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.mix.config import TokenizerConfig
from omniload.mix.sources import SourceConfig
from omniload.source.byte_pairs.files import file_of, library_of
from omniload.source.files import ShardFile
from omniload.source.index import key_of_file, write_kept
from omniload.source.survey.spread import Differences

__all__ = ["FoundSource", "keep_findings", "kept_findings", "key_of_source", "key_of_tokenizer"]

_VERSION: Literal[12] = 12
"""Raised whenever a check looks for something else, so that what it did not look for is looked at."""
_LARGEST_BYTES = 64 << 20
_NAME = "check.findings.json"
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """Facts about a source, of which at most the first records were decoded."""

    name: str
    """Name in the mix file."""
    format: str
    """Format of the source, as the mix file names it."""
    shards: int
    """Number of files."""
    looked: int
    """Files of which some records were decoded; the index of a table has seen the columns of all files."""
    units: int
    """Parts that can be decoded separately."""
    records: int
    """Number of records, counted."""
    size_bytes: int
    """Size of the files as stored."""
    tokens_per_record: float
    """Mean tokens of the first records, which were decoded, over all splits; 0 where none of them gives any."""
    samples_per_record: float = 1.0
    """Part of the records that give a sample, by the same, over the split that is drawn."""
    times: float = 1.0
    """Ratio of the longest records' units to other units, by their sizes; 1 if it is unknown."""
    along: float = 0.0
    """Share of the variance of the first records' lengths that depends on their place; near 1 if they are sorted."""
    firsts: int = 0
    """First records whose tokens were counted; 0 if this was impossible."""
    longer: int = 0
    """Number of these that are longer than a row."""
    doubts: tuple[str, ...] = ()
    """Descriptions of what is probably unintended, judged by the first records."""

    @property
    def differences(self) -> Differences:
        """Known differences of lengths."""
        return Differences(units=self.units, along=self.along, times=self.times)


class _Findings(StrictModel):
    """Content of the file."""

    version: Literal[12]
    sources: dict[str, tuple[str, FoundSource]]
    """For each source, the key of the finding and the finding."""


def key_of_tokenizer(config: TokenizerConfig | None, base_dir: Path) -> str:
    """Return a digest that distinguishes a tokenizer from others and from its earlier states."""
    said = "none" if config is None else config.model_dump_json()
    path = None if config is None else file_of(config, base_dir)
    try:
        status = None if path is None else path.stat()
    except OSError:
        status = None  # the caller that opens it reports the error
    # Includes the inode and the time of change, because a copy may keep the size and the modification time.
    seen = (
        ()
        if status is None
        else (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
    )
    return _digest([said, library_of(config), *map(str, seen)])


def key_of_source(config: SourceConfig, files: Sequence[ShardFile], tokenizer: str) -> str:
    """Return a digest of everything that a finding depends on."""
    shards = ("\0".join(map(str, key_of_file(file))) for file in files)
    # Another release of Arrow may refuse what this one reads, and vice versa.
    return _digest([pa.__version__, tokenizer, config.model_dump_json(), *shards])


def kept_findings(folder: Path | None) -> Mapping[str, tuple[str, FoundSource]]:
    """Return key and finding by source; empty if the file is missing or damaged."""
    if folder is None:
        return {}
    try:
        with open_file(folder / _NAME) as file:
            # A file that is too long is cut off here, and is then no valid JSON, so the sources are checked again.
            return _Findings.model_validate(orjson.loads(file.read(_LARGEST_BYTES))).sources
    except FileNotFoundError:
        return {}
    except (OSError, StateError, orjson.JSONDecodeError, ValidationError) as error:
        # The file is of another release, or damaged. Pydantic's message takes several lines, and needs no action.
        why = "not as this release writes it" if isinstance(error, ValidationError) else error
        _LOG.info("%s: cannot be used (%s); looking at every source", folder / _NAME, why)
        return {}


def keep_findings(folder: Path | None, found: Mapping[str, tuple[str, FoundSource]]) -> None:
    """Store findings; a folder that cannot be written causes a warning, but no error."""
    if folder is not None:
        write_kept(folder / _NAME, orjson.dumps({"version": _VERSION, "sources": found}))


def _digest(parts: Iterable[str]) -> str:
    # Paths need not be UTF-8.
    text = "\n".join(parts).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
