"""The entries of a source in a token cache, by their names: digests of all that decides the tokens of a unit.

A folder is of one way to make tokens of text; a name in it is of one unit of one file. Neither knows the
name of the source, where its files lie, the order of its records or the transforms of token ids, which are
done each time: runs that differ in those share entries.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.mix.schema.transforms import (
    ChatTransform,
    ImagesTransform,
    MapTransform,
    PreferenceTransform,
    encoding_of,
    is_of_text,
)
from omniload.source.byte_pairs.files import library_of
from omniload.source.files import ShardFile
from omniload.source.formats.format import UnitTable
from omniload.source.formats.opening import OpenFormat
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.entry import ENTRY_VERSION, EncodedUnit

__all__ = ["MAKING_VERSION", "SourceTokens", "folder_of_source", "names_of_units", "why_not_kept"]

MAKING_VERSION = 1
"""Raised whenever the same text, tokenizer and transforms come to other tokens."""

# Of ``on_error`` neither: an entry says what is bad, and whoever reads it does as its source says.
_NOT_OF_TOKENS = {
    *("path", "tags", "shuffle", "on_error", "transforms", "max_repetition", "max_fraction"),
    *("splits", "split", "dedupe", "overlong", "drawn_before"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTokens:
    """The entries of one source."""

    cache: TokenCache
    folder: str
    names_U: Sequence[str]
    rows_U: NDArray[np.int64]
    """Records of each unit."""

    @classmethod
    def of(
        cls,
        cache: TokenCache | None,
        config: SourceConfig,
        *,
        tokenizer: TokenizerConfig | None,
        pipeline_digest: str,
        opened: OpenFormat,
    ) -> "SourceTokens | None":
        """Return the entries of a source; ``None`` where its tokens are not kept.

        Args:
            cache: Where they lie; ``None`` for nowhere.
            config: What the mix file says of the source.
            tokenizer: Tokenizer of the mix.
            pipeline_digest: Of the files that its transforms read.
            opened: Its units and their files.
        """
        if cache is None or why_not_kept(config):
            return None
        folder = folder_of_source(
            config,
            tokenizer=tokenizer,
            tokenizer_digest=cache.tokenizer_digest,
            pipeline_digest=pipeline_digest,
            seal=cache.seal.name,
        )
        units = opened.format.units()
        names_U = names_of_units(units, opened.files, digests_all=opened.digests_all)
        return cls(cache=cache, folder=folder, names_U=names_U, rows_U=units.rows_U)

    def get(self, unit: int) -> EncodedUnit | None:
        """Return what is kept of a unit, if anything."""
        return self.cache.get(f"{self.folder}/{self.names_U[unit]}", int(self.rows_U[unit]))

    def put(self, unit: int, made: EncodedUnit) -> bool:
        """Keep a unit; tell whether it is kept."""
        return self.cache.put(f"{self.folder}/{self.names_U[unit]}", made)

    def kept(self) -> int:
        """Return how many units there is something kept of; raises as ``TokenCache.names``."""
        there = self.cache.names(self.folder)
        return sum(name in there for name in self.names_U)


def why_not_kept(config: SourceConfig) -> str:
    """Return why the tokens of a source are not kept; empty where they are."""
    if not config.holds_text:
        return "it holds token ids"
    if any(isinstance(each, ImagesTransform) for each in config.transforms):
        return "it holds images"
    if any(isinstance(each, MapTransform) and is_of_text(each) for each in config.transforms):
        return "a map of its text is code, which may change while its name stays"
    return ""


def folder_of_source(
    config: SourceConfig,
    *,
    tokenizer: TokenizerConfig | None,
    tokenizer_digest: str,
    pipeline_digest: str,
    seal: str,
) -> str:
    """Return the folder of the entries of a source.

    Args:
        config: What the mix file says of it, with the columns that are read.
        tokenizer: Tokenizer of the mix.
        tokenizer_digest: Of the tokenizer's file.
        pipeline_digest: Of the files that transforms read.
        seal: Name of the seal of its entries.
    """
    encoding = encoding_of(config.transforms)
    made = encoding if isinstance(encoding, ChatTransform | PreferenceTransform) else None
    said = {
        "versions": [ENTRY_VERSION, MAKING_VERSION],
        # By what a source says, less what decides nothing: a key that is new enters of itself.
        "source": config.model_dump(mode="json", exclude=_NOT_OF_TOKENS),
        "key": config.key_column,
        # A split holds its own records alone: each is made once, by whoever draws it.
        "splits": list((config.splits or {}).items()),
        "split": config.split if config.splits else None,
        "dedupe": config.dedupe,
        "encoding": None if made is None else made.model_dump(mode="json", exclude={"template"}),
        "end": getattr(tokenizer, "end_of_document", None),
        # The library too: another release of it may cut text otherwise.
        "tokenizer": [tokenizer_digest, library_of(tokenizer)],
        "pipeline": pipeline_digest,
    }
    text = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.{seal}"


def names_of_units(
    units: UnitTable, files: Sequence[ShardFile], *, digests_all: bool
) -> tuple[str, ...]:
    """Return the name of each unit, ``[U]``.

    Args:
        units: The units.
        files: The shards.
        digests_all: Whether the digest of a shard covers every byte. Of one that covers a sample the time of writing
            counts too: an edit in between changes that, if nothing else.
    """
    content_F = [
        "\0".join(
            [
                content,
                *(
                    f"{each.size_bytes} {'' if digests_all else each.stamp}"
                    for each in (file, *file.beside)
                ),
            ]
        )
        for content, file in zip(units.contents_F, files, strict=True)
    ]
    columns = (units.starts_U, units.stops_U, units.rows_U)
    return tuple(
        hashlib.blake2b(
            f"{_content(content_F, units, unit)}\0{start}\0{stop}\0{rows}".encode(
                errors="surrogateescape"
            ),
            digest_size=16,
        ).hexdigest()
        for unit, (start, stop, rows) in enumerate(zip(*(c.tolist() for c in columns), strict=True))
    )


def _content(content_F: Sequence[str], units: UnitTable, unit: int) -> str:
    held = "\1".join(content_F[number] for number in units.files_of(unit))
    # Units of whole files had the digest of another file in their name once: their entries are not looked at.
    return f"\1{held}" if units.are_whole_files else held
