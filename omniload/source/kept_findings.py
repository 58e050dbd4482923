"""What a check found of sources, kept beside their indexes: one that has not changed since is not opened again.

A finding rests on what the mix file says of the source, its shards as the file system tells them apart, and
the tokenizer. All that is compared, none of it read: a byte that a disk turned is seen by whoever reads
it. Faults are never kept.
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

_VERSION: Literal[10] = 10
"""Raised whenever a check looks for something else, so that what it did not look for is looked at."""
_LARGEST_BYTES = 64 << 20
_NAME = "check.findings.json"
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """What is known of a source when no more than its first records were decoded."""

    name: str
    """Name in the mix file."""
    format: str
    """Format of the source, as the mix file names it."""
    shards: int
    """Files."""
    looked: int
    """Files of which some records were decoded; of tables, an index has seen the columns of all."""
    units: int
    """Parts that can be decoded on their own."""
    records: int
    """Records, counted."""
    size_bytes: int
    """Bytes of the files, as stored."""
    tokens_per_record: float
    """Mean tokens of the first records, which were decoded, over all splits; 0 where none of them gives any."""
    times: float = 1.0
    """Times as long as those of other units records of some are, by the sizes of units; 1 where that is not known."""
    along: float = 0.0
    """Part of the spread of the first records' lengths that goes by where they lie; near 1 where they are sorted."""
    firsts: int = 0
    """First records whose tokens were counted; 0 where that was not possible."""
    longer: int = 0
    """Of these, those that are longer than a row."""
    doubts: tuple[str, ...] = ()
    """What seems not to be meant, as far as its first records tell: why it may give nothing, alone, or all else."""

    @property
    def differences(self) -> Differences:
        """What is known of how lengths differ."""
        return Differences(units=self.units, along=self.along, times=self.times)


class _Findings(StrictModel):
    """The file."""

    version: Literal[10]
    sources: dict[str, tuple[str, FoundSource]]
    """Of each source, what the finding rests on and what it is."""


def key_of_tokenizer(config: TokenizerConfig | None, base_dir: Path) -> str:
    """Return a digest of what tells a tokenizer from another, or from itself at another time."""
    said = "none" if config is None else config.model_dump_json()
    path = None if config is None else file_of(config, base_dir)
    try:
        status = None if path is None else path.stat()
    except OSError:
        status = None  # whoever opens it says so
    # The inode and the time of change as well: a copy may keep the size and the time of writing.
    seen = (
        ()
        if status is None
        else (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
    )
    return _digest([said, library_of(config), *map(str, seen)])


def key_of_source(config: SourceConfig, files: Sequence[ShardFile], tokenizer: str) -> str:
    """Return a digest of all that a finding rests on."""
    shards = ("\0".join(map(str, key_of_file(file))) for file in files)
    # Another Arrow may refuse what this one reads, and the other way round.
    return _digest([pa.__version__, tokenizer, config.model_dump_json(), *shards])


def kept_findings(folder: Path | None) -> Mapping[str, tuple[str, FoundSource]]:
    """Return by source what a finding rests on and what it is; none where the file is missing or damaged."""
    if folder is None:
        return {}
    try:
        with open_file(folder / _NAME) as file:
            # What is longer than any is cut off here, is no JSON then, and is looked for anew.
            return _Findings.model_validate(orjson.loads(file.read(_LARGEST_BYTES))).sources
    except FileNotFoundError:
        return {}
    except (OSError, StateError, orjson.JSONDecodeError, ValidationError) as error:
        # Of another release or damaged; what pydantic says of it takes lines, for what nobody needs to mend.
        why = "not as this release writes it" if isinstance(error, ValidationError) else error
        _LOG.info("%s: cannot be used (%s); looking at every source", folder / _NAME, why)
        return {}


def keep_findings(folder: Path | None, found: Mapping[str, tuple[str, FoundSource]]) -> None:
    """Keep what was found; a folder that cannot be written is told, and not needed."""
    if folder is not None:
        write_kept(folder / _NAME, orjson.dumps({"version": _VERSION, "sources": found}))


def _digest(parts: Iterable[str]) -> str:
    # Paths need not be UTF-8.
    text = "\n".join(parts).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
