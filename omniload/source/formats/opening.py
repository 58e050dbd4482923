"""From what a mix file says of a source to the format that reads it."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from omniload.mix.config import JsonlSource, ParquetSource, SourceConfig
from omniload.source.files import ShardFile, find_files
from omniload.source.formats.format import Format
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.formats.text import TextFormat
from omniload.source.index import IndexCache

__all__ = ["OpenFormat", "open_format"]

_COMPRESSED = frozenset({".gz", ".zst"})
_SUFFIXES = {
    "parquet": frozenset({".parquet", ".parq", ".pq"}),
    "jsonl": frozenset({".jsonl", ".json", ".ndjson", ".jsonlines"}),
}
"""What the files of a type are called; text may be called anything but the names below."""
_NO_TEXT = frozenset(
    {
        *(".tmp", ".temp", ".partial", ".part", ".crc", ".lock", ".swp", ".bak", ".index"),
        *(".tar", ".tgz", ".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".parquet", ".arrow"),
        *(".bin", ".npy", ".npz", ".pt", ".safetensors", ".so", ".pyc", ".png", ".jpg", ".pdf"),
    }
)
_NUMBER = re.compile(r"\.[0-9][0-9A-Za-z_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFormat:
    """A format and the files it reads."""

    format: Format
    files: tuple[ShardFile, ...]


def open_format(
    name: str, config: SourceConfig, *, base_dir: Path, cache: IndexCache | None = None
) -> OpenFormat:
    """Find the files of a source and index their units.

    Raises:
        ConfigError: Files or columns are missing.
        IntegrityError: A shard is cut short or corrupt.
        UnavailableError: A store did not answer.
    """
    known = partial(_knows, config.type)
    files = find_files(config.paths, base_dir, source=name, known=known)
    return OpenFormat(format=_format_of(config, files, cache), files=files)


def _knows(kind: str, name: str) -> bool:
    """Whether a type reads files of this name; a name without a suffix, or numbered, says nothing."""
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if kind == "jsonl" and suffix in _COMPRESSED:
        suffix = PurePosixPath(path.stem).suffix.lower()
    if not suffix or _NUMBER.fullmatch(suffix):
        return True
    return suffix not in _NO_TEXT if kind == "text" else suffix in _SUFFIXES[kind]


def _format_of(
    config: SourceConfig, files: tuple[ShardFile, ...], cache: IndexCache | None
) -> Format:
    if isinstance(config, ParquetSource):
        column = config.text if config.tokens is None else config.tokens
        assert column is not None, "the mix file names exactly one column"
        return ParquetFormat(files, column=column, holds_text=config.tokens is None, cache=cache)
    if isinstance(config, JsonlSource):
        return JsonlFormat(files, key=config.text, unit_bytes=config.unit, cache=cache)
    return TextFormat(files, files_per_unit=config.files_per_unit, cache=cache)
