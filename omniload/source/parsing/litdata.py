"""Chunks of litdata, which are recognised by the index next to them, because their bytes could be token ids."""

import re
from collections.abc import Sequence

from omniload.base.errors import ConfigError, IntegrityError
from omniload.source.files import ShardFile, beside, reading

__all__ = ["REMEDY", "refuse_chunks"]

REMEDY = (
    "name the files that optimize() was given, or write its samples as Parquet or MDS, as "
    "docs/migrate/litdata.md shows"
)
_CHUNK = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.[\w.]+)?\.bin$")
_INDEX = re.compile(rb'\s*\{\s*"(?:chunks|config)"\s*:')
_HEAD_BYTES = 4 << 10


def refuse_chunks(files: Sequence[ShardFile]) -> None:
    """Raise an error for files that have the name of a chunk and an index of litdata next to them.

    Files with other names cost nothing.

    Raises:
        ConfigError: A file is such a chunk.
        UnavailableError: The store did not answer.
    """
    # One file per folder, because each check costs a store two requests.
    called_so = {
        file.path.rpartition("/")[0]: file for file in reversed(files) if _CHUNK.search(file.path)
    }
    for file in called_so.values():
        if _index_is_of_litdata(file):
            raise ConfigError(
                f"{file.path}: is a chunk of litdata, as index.json beside it says, and no flat file of token ids; "
                f"{REMEDY}"
            )


def _index_is_of_litdata(file: ShardFile) -> bool:
    try:
        index = beside(file, "index.json")
    except IntegrityError:  # there is no index
        return False
    with reading(index, "its beginning"):
        # Entries for chunks may follow; keys are sorted, so the first key shows that the index is litdata's.
        head = index.read_range(0, min(_HEAD_BYTES, index.size_bytes))
    return _INDEX.match(head) is not None
