"""From what a mix file says of a source to the format that reads it."""

from dataclasses import dataclass
from pathlib import Path

from omniload.mix.config import JsonlSource, ParquetSource, SourceConfig
from omniload.source.files import ShardFile, find_files
from omniload.source.formats.format import Format
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.formats.text import TextFormat
from omniload.source.index import IndexCache

__all__ = ["OpenFormat", "open_format"]


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
    files = find_files(config.paths, base_dir, source=name)
    return OpenFormat(format=_format_of(config, files, cache), files=files)


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
