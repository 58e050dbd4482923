"""The tokens of a source in a token cache: the names of its entries, and the path of records into them.

A folder belongs to one way of making tokens of text. A name in it is a digest of everything that affects the tokens of
one unit of one file. Neither depends on the name of the source, the place of its files, the order of its records or the
transforms of token ids, which are applied each time. Runs that only differ in these share entries.

Records are tokenised when they are drawn, in the order of the shuffle, so that a first batch waits only for its own
documents. Their tokens are collected in a file without a name. Once all tokens of a unit are there, its entry is
written. If the rest of a block is not read, its complete units are still stored.

Shape suffixes:
    U  units of the block        R  records of the block        B  records of one unit
    N  records of one read       M  samples, in the order in which they were made
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.config import SourceConfig, TokenizerConfig
from omniload.mix.schema.messages import ChatTransform, MessageTransform
from omniload.mix.schema.transforms import (
    ImagesTransform,
    MapTransform,
    encoding_of,
    is_of_text,
)
from omniload.mix.sources import JsonlSource, WebDatasetSource
from omniload.source.byte_pairs.files import library_of
from omniload.source.files import ShardFile
from omniload.source.formats.format import Records, UnitTable
from omniload.source.formats.opening import OpenFormat
from omniload.source.parts.held_column import HeldColumn, SpilledColumn
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.entry import ENTRY_VERSION, EncodedUnit
from omniload.source.transforms.encoders import Samples

__all__ = [
    "ANSWER_MAKING_VERSION",
    "CHAT_MAKING_VERSION",
    "INSIDE_MAKING_VERSION",
    "MAKING_VERSION",
    "Filling",
    "SourceTokens",
    "UnitToFill",
    "folder_of_source",
    "names_of_units",
    "why_not_kept",
]

MAKING_VERSION = 1
"""Increased whenever the same text, tokenizer and transforms give other tokens."""
CHAT_MAKING_VERSION = 3
"""The same for conversations: if a template receives other messages, entries of texts stay valid."""
ANSWER_MAKING_VERSION = 4
"""The same for prompts with one or two answers, if their masks are found in another way."""
INSIDE_MAKING_VERSION = 1
"""The same for lines and archive objects with nested keys, because releases that did not find such keys
cached defaults."""

# ``on_error`` is left out too: an entry records bad records, and each source treats them by its own rule.
_NOT_OF_TOKENS = {
    *("path", "tags", "shuffle", "on_error", "transforms", "max_repetition", "max_fraction"),
    *("splits", "split", "dedupe", "overlong", "pack", "drawn_before"),
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
        """Return the entries of a source; ``None`` if its tokens are not cached.

        Args:
            cache: The token cache; ``None`` for none.
            config: Entry of the source in the mix file.
            tokenizer: Tokenizer of the mix.
            pipeline_digest: Digest of the files that its transforms read.
            opened: Units of the source, and their files.
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
        """Return the entry of a unit, if there is one."""
        return self.cache.get(f"{self.folder}/{self.names_U[unit]}", int(self.rows_U[unit]))

    def put(self, unit: int, made: EncodedUnit) -> bool:
        """Store a unit; return whether it is stored."""
        return self.cache.put(f"{self.folder}/{self.names_U[unit]}", made)


def why_not_kept(config: SourceConfig) -> str:
    """Return why the tokens of a source are not cached; empty if they are."""
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
        config: Entry of the source in the mix file, with the columns that are read.
        tokenizer: Tokenizer of the mix.
        tokenizer_digest: Digest of the tokenizer's file.
        pipeline_digest: Digest of the files that transforms read.
        seal: Name of the seal of its entries.
    """
    encoding = encoding_of(config.transforms)
    made = None
    if isinstance(encoding, MessageTransform):
        is_chat = isinstance(encoding, ChatTransform)
        version = CHAT_MAKING_VERSION if is_chat else ANSWER_MAKING_VERSION
        made = encoding.model_dump(mode="json", exclude={"template"}) | {"version": version}
    said = {
        "versions": [ENTRY_VERSION, MAKING_VERSION],
        # All keys of the source except those without effect, so that a new key takes part by default.
        "source": config.model_dump(mode="json", exclude=_NOT_OF_TOKENS),
        "key": config.key_column,
        # A split only has its own records, and each record is tokenised by the run that draws it.
        "splits": list((config.splits or {}).items()),
        "split": config.split if config.splits else None,
        "dedupe": config.dedupe,
        "encoding": made,
        "end": getattr(tokenizer, "end_of_document", None),
        # Only added if they are set, so that older entries stay valid.
        **(
            {}
            if (begin := getattr(tokenizer, "begin_of_document", None)) is None
            else {"begin": begin}
        ),
        **({"inside": INSIDE_MAKING_VERSION} if _leads_inside(config) else {}),
        # The library takes part, because another release of it may divide text differently.
        "tokenizer": [tokenizer_digest, library_of(tokenizer)],
        "pipeline": pipeline_digest,
    }
    text = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.{seal}"


def _leads_inside(config: SourceConfig) -> bool:
    """Return whether a name may be a nested key in a JSON object."""
    if not isinstance(config, JsonlSource | WebDatasetSource):
        return False
    read = (config.text, *config.beside_columns, *config.columns_read.values(), *config.where)
    # A name that begins with a dot is a member of an archive.
    return any("." in name[1:] for name in (*read, config.key_column or ""))


def names_of_units(
    units: UnitTable, files: Sequence[ShardFile], *, digests_all: bool
) -> tuple[str, ...]:
    """Return the name of each unit, ``[U]``.

    Args:
        units: The units.
        files: The shards.
        digests_all: Whether the digest of a shard covers every byte. If it covers a sample, the modification time takes
            part, too, because an edit between the sampled ranges changes only that time.
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
    # The names of whole-file units once had the digest of another file, and such entries must not be found.
    return f"\1{held}" if units.are_whole_files else held


_TOKENS = "tokens"
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitToFill:
    """A unit that was decoded as text: all data of its entry except the samples."""

    unit: int
    bad_B: NDArray[np.bool_]
    kept_B: NDArray[np.bool_]
    given_B: NDArray[np.bool_]
    wanted_B: NDArray[np.bool_]
    """Records of which samples are made sooner or later."""
    keys_B: NDArray[np.uint64] | None
    reason: str

    @classmethod
    def of(
        cls,
        unit: int,
        records: Records,
        *,
        given_B: NDArray[np.bool_],
        wanted_B: NDArray[np.bool_],
    ) -> Self:
        """Keep the data of an entry about records, apart from their samples."""
        return cls(
            unit=unit,
            bad_B=records.bad_B,
            kept_B=np.ones_like(given_B) if records.kept_B is None else records.kept_B,
            given_B=given_B,
            wanted_B=wanted_B,
            keys_B=records.keys_B,
            reason=records.reason,
        )


class Filling:
    """Collects samples until units are complete. Not thread-safe."""

    def __init__(
        self, tokens: SourceTokens, units: Mapping[int, UnitToFill], records: int, folder: Path
    ) -> None:
        """Begin without samples.

        Args:
            tokens: Entries that complete units are written to.
            units: Units to fill, by the first of their records in the block.
            records: Records of the block, R.
            folder: Folder of the tokens meanwhile.
        """
        self._tokens, self._units, self._folder = tokens, units, folder
        self._places_R = np.full(records, -1, np.int64)
        self._spoilt_R = np.zeros(records, np.bool_)
        self._spoilt = ""
        self._wanted_R = np.zeros(records, np.bool_)
        for begin, unit in units.items():
            # Units that are cached already need no samples.
            self._wanted_R[begin : begin + len(unit.wanted_B)] = unit.wanted_B
        self._left = int(np.count_nonzero(self._wanted_R))
        self._made = 0
        self._columns: dict[str, SpilledColumn] = {}
        self._closed = False

    @property
    def is_whole(self) -> bool:
        """Whether every sample is there."""
        return not self._left and not self._closed

    def add(self, rows_N: NDArray[np.int64], samples: Samples) -> None:
        """Add the samples of records, before any transform of tokens; samples that are there already are skipped.

        A full disk ends the collection, not the reading.
        """
        if self._closed:
            return
        # A range may be read again, and a source of one block has the same records in the next epoch.
        new = np.flatnonzero(self._wanted_R[rows_N] & (self._places_R[rows_N] < 0))
        if not len(new):
            return
        columns = {_TOKENS: samples.tokens, **samples.others}
        try:
            for name, column in columns.items():
                if name not in self._columns:
                    # In a file, because in memory the tokens of a block would take as much again as its text.
                    self._columns[name] = SpilledColumn(self._folder, column.values_V.dtype)
                self._columns[name].append(column if len(new) == len(rows_N) else column.take(new))
        except OmniloadError as error:
            _LOG.warning("tokens are not kept in %s: %s", self._tokens.cache.location, error)
            self.close()
            return
        rows = rows_N[new]
        self._places_R[rows] = self._made + np.arange(len(rows))
        if samples.bad_N is not None:
            self._spoilt_R[rows] = samples.bad_N[new]
            self._spoilt = self._spoilt or samples.reason
        self._made += len(rows)
        self._left -= len(rows)

    def keep_whole_units(self) -> bool:
        """Store every complete unit, and end the collection; return whether all of them are stored."""
        if self._closed:
            return False
        # Mapped before the files are closed; maps stay valid.
        held = {name: column.finish() for name, column in self._columns.items()}
        kept = [self._keep(begin, unit, held) for begin, unit in self._units.items()]
        self.close()
        return all(kept)

    def close(self) -> None:
        """Release the collected samples."""
        self._closed = True
        for column in self._columns.values():
            column.close()
        self._columns.clear()

    def _keep(self, begin: int, unit: UnitToFill, held: Mapping[str, HeldColumn]) -> bool:
        rows_B = slice(begin, begin + len(unit.wanted_B))
        places_B = self._places_R[rows_B]
        if (places_B[unit.wanted_B] < 0).any():
            return False
        made = {name: _of_unit(column, places_B) for name, column in held.items()}
        spoilt_B = self._spoilt_R[rows_B]
        # If no record of the unit gives a sample, there may be no column to take any from.
        nothing = Ragged(
            values_V=np.empty(0, np.int32), offsets=np.zeros(len(places_B) + 1, np.int64)
        )
        return self._tokens.put(
            unit.unit,
            EncodedUnit(
                tokens=made.pop(_TOKENS, nothing),
                others=made,
                bad_B=unit.bad_B,
                kept_B=unit.kept_B,
                given_B=unit.given_B,
                made_B=unit.wanted_B,
                spoilt_B=spoilt_B,
                keys_B=unit.keys_B,
                reason=unit.reason,
                spoilt=self._spoilt if spoilt_B.any() else "",
            ),
        )


def _of_unit(column: HeldColumn, places_B: NDArray[np.int64]) -> Ragged:
    """Return the sequence of each record of a unit, empty for records without one."""
    there = np.flatnonzero(places_B >= 0)
    taken = column.take(places_B[there])
    lengths_B = np.zeros(len(places_B), np.int64)
    lengths_B[there] = taken.lengths_N
    return Ragged(values_V=taken.values_V, offsets=offsets_of(lengths_B))
