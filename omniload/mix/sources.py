"""What a mix file says of a source: one model a format, in one closed table.

To add a format: its keys here, with a line in ``SourceConfig``; its reader in a module of
``omniload.source.formats`` that is named after its type; its kind in the contract suite of sources
(``tests/contract/omniload/test_source_formats.py``); its section in ``docs/how-to/data/your-data.md``. Nothing else
knows formats one by one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import override

from omniload.base.config import fault_at
from omniload.base.settings.faults import NAME_PATTERN
from omniload.mix.schema.records import OnError, ShuffleConfig
from omniload.mix.schema.source_base import Paths, SourceBase
from omniload.mix.schema.sources.numpy import NumpySource
from omniload.mix.schema.sources.own_columns import (
    ColumnLabel,
    OwnColumn,
    OwnColumns,
    none_named,
    require_columns,
)
from omniload.mix.schema.sources.units import LARGEST_UNIT_BYTES, TokenType, UnitBytes
from omniload.mix.schema.splits import Name
from omniload.mix.schema.transforms import Options

__all__ = [
    "LARGEST_UNIT_BYTES",
    "SAMPLE_NAME",
    "SOURCE_TYPES",
    "ArrowSource",
    "CsvSource",
    "JsonlSource",
    "LanceSource",
    "MdsSource",
    "MegatronSource",
    "Name",
    "NumpySource",
    "OnError",
    "ParquetSource",
    "RegisteredSource",
    "ShuffleConfig",
    "SourceBase",
    "SourceConfig",
    "TextSource",
    "TokenType",
    "UnitBytes",
    "WebDatasetSource",
    "tags_of",
    "values_per_patch_of",
]

SAMPLE_NAME = "__key__"
"""What the library of WebDataset calls the name of a sample."""
_MEMBER = re.compile(r"\.[^/.][^/]{0,63}")

Version = Annotated[int, Field(ge=1, lt=1 << 63)]
# Left out if it is not given, so that a source without it is the same as in releases that did not know it.
LaterKey = Annotated[str | None, Field(min_length=1, exclude_if=lambda key: key is None)]


class _TextOrTokens(SourceBase):
    text: str | None = None
    """Column of the text to tokenise."""
    tokens: str | None = None
    """Column of token ids (a list of integers), used unchanged."""

    @model_validator(mode="after")
    def _one_column(self) -> Self:
        if (self.text is None) == (self.tokens is None):
            if self.text is None:
                raise fault_at(
                    "has neither text nor tokens; name exactly one: text: COLUMN of texts, or tokens: COLUMN of "
                    "token ids"
                )
            raise fault_at(
                f"text is {self.text!r} and tokens is {self.tokens!r}; name exactly one column",
                "tokens",
            )
        return self

    @property
    @override
    def holds_text(self) -> bool:
        return self.tokens is None

    @property
    def holds(self) -> Literal["text", "tokens", "nested", "nested images"]:
        """What its column holds; ``nested`` is text, or lists and objects, with images among them or without."""
        if self.is_nested:
            return "nested" if self.images_transform is None else "nested images"
        return "text" if self.holds_text else "tokens"

    @property
    def column(self) -> str:
        """The column that is read."""
        return str(self.text if self.tokens is None else self.tokens)


class _HasColumns(SourceBase):
    has_columns = reads_beside = True

    @property
    @override
    def key_column(self) -> str | None:
        return getattr(self, self.key_field) if self.wants_keys else None


class _Table(_HasColumns, _TextOrTokens):
    columns: dict[ColumnLabel, str | OwnColumn] = Field(default_factory=dict)
    """Further columns of a sample, each with the column of the file that holds it. ``loss_mask``: a list of 0 and 1, or
    of booleans, one for each token; a token of 0 is read but is no label. ``labels``, in its place: a list of the
    token's own id or -100, as in transformers. ``scores``: a number, or a list of numbers, of the whole sample, as
    float32. ``text``: a text of the whole sample, such as the expected answer. Any other name is your own column, for
    each token, ``{loss_weight: {column: weights, dtype: float32, of: labels, default: 1.0}}``, or each sample,
    ``{lang: {column: language, dtype: text, of: samples, default: ""}}``. Batches bring the columns that
    ``batch.columns`` names."""
    images: str | None = None
    """Column of encoded images (JPEG, PNG, WebP, GIF, BMP): bytes, an object with a field ``bytes`` as Hugging Face
    writes them, or a list of either. A transform of type ``images`` turns them into patches."""

    @property
    @override
    def image_members(self) -> tuple[str, ...]:
        return () if self.images is None else (self.images,)

    key: str | None = None
    """Column of texts or integers that identifies a document, for splits. By default, the document's content does."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=self.holds_text)
        return self


class ParquetSource(_Table):
    """Parquet shards; each row is one record."""

    type: Literal["parquet"]


class LanceSource(_Table):
    """Lance data sets, each a folder with its versions; each row is one record. Deleted rows are left out."""

    type: Literal["lance"]
    path: Paths
    """Folders of data sets, or their URLs (``s3``, ``gs``, ``az``), each with ``_versions`` in it; globs and braces
    work."""
    version: Version | tuple[Version, ...] | None = None
    """Version to read of each data set, or a list of versions in the order of the data sets. By default, the newest
    version when the run starts, which the run then keeps."""
    unit: UnitBytes = 4 << 20
    """A fragment is cut into ranges of rows of about this size, as stored, for random access."""


class _Texts(_HasColumns):
    columns: OwnColumns = Field(default_factory=dict, exclude_if=none_named)
    """Your own columns of whole samples, by name: a text, a number or a boolean of each record. For ``csv``, another
    column; an empty field counts as absent unless it is a text. For ``webdataset``, a key of the JSON object,
    ``__key__`` (the name of the sample), or a member by its extension: ``.cls`` with digits or a text, or
    ``.score.npy`` with one number."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=True, may_hold_tokens=False)
        return self


class JsonlSource(_HasColumns):
    """Lines of JSON objects, plain or compressed (``.zst``, ``.gz``); each line is one record."""

    type: Literal["jsonl"]
    text: str = "text"
    """Key of the text to tokenise."""
    tokens: LaterKey = None
    """In place of a text: key of token ids (a list of integers), used unchanged."""
    columns: dict[ColumnLabel, str | OwnColumn] = Field(default_factory=dict, exclude_if=none_named)
    """Further columns of a sample, each with its key. With ``tokens``, as in a table: ``loss_mask`` or ``labels``,
    ``scores``, ``text``, and your own columns with a value for each token. With a text or tokens: your own columns of
    whole samples, each a text, a number or a boolean of the record."""
    key: str | None = None
    """Key of a text or an integer that identifies a document, for splits. By default, the document's content does."""
    unit: UnitBytes = 4 << 20
    """Lines are read in ranges of about this size. A compressed shard is entered at the nearest place before a range: a
    zstd frame, or one of many places in gzip. Going on from the range before decompresses only what lies between."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        # The key of a text has a default, which is written out with the rest of a mix.
        if self.tokens is not None and self.text != type(self).model_fields["text"].default:
            raise fault_at(
                f"text is {self.text!r} and tokens is {self.tokens!r}; name exactly one key",
                "tokens",
            )
        return self

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=self.holds_text)
        of_table = [name for name, said in self.columns.items() if isinstance(said, str)]
        if self.holds_text and of_table:
            name = of_table[0]
            raise fault_at(
                f"columns.{name} stands beside token ids alone in lines of JSON; say tokens: KEY, or a column of yours "
                f"by another name: {{column: {self.columns[name]}, dtype: float32, of: samples}}",
                *("columns", name),
            )
        return self

    @property
    @override
    def holds_text(self) -> bool:
        return self.tokens is None


class TextSource(SourceBase):
    """Plain text in UTF-8; each file is one record. Line ends are kept; a byte-order mark at the start is left out."""

    type: Literal["text"]
    files_per_unit: int = Field(default=64, ge=1, le=65_536)
    """Number of files read together."""


class ArrowSource(_Table):
    """Arrow IPC files and streams, and folders of Hugging Face ``save_to_disk``; each row is one record."""

    type: Literal["arrow"]


class MegatronSource(SourceBase):
    """Megatron's ``.bin`` and ``.idx``; each document of token ids is one record. The path may leave out the suffix."""

    type: Literal["megatron"]
    unit: UnitBytes = 4 << 20
    """Documents of about this size are read together."""

    @property
    @override
    def holds_text(self) -> bool:
        return False


_IN_SMALL_LETTERS = AfterValidator(str.lower)
"""As extensions of an archive's members are read, so that one in capitals is that of a member."""


class WebDatasetSource(_Texts):
    """WebDataset's tar archives, plain or compressed. Each sample, the members that share a key, is one record."""

    reads_beside, key_field = False, "known_by"
    type: Literal["webdataset"]
    text: Annotated[str, Field(pattern=r"^[^/.][^/]{0,63}$"), _IN_SMALL_LETTERS] = "txt"
    """Extension of the member with the text, in either case. If it ends in ``json``, the member is an object."""
    key: str = "text"
    """Key of the text in the JSON object."""
    known_by: LaterKey = None
    """What identifies a document, for splits: ``__key__``, the name of its sample (``a/000`` of ``a/000.txt``), or a
    key of a text or an integer in its JSON object. By default, the document's content does. The JSON object, which
    ``where`` reads too, is the member under ``text`` if that is JSON, else the member ``.json``."""
    images: tuple[Annotated[str, Field(pattern=r"^[^/.][^/.]{0,15}$"), _IN_SMALL_LETTERS], ...] = ()
    """Extensions of the members that hold images, in upper or lower case, such as ``[jpg, png]``. A sample's images are
    its members with one of them, in the order of the archive. A transform of type ``images`` turns them into
    patches."""
    unit: UnitBytes = 4 << 20
    """A plain archive is cut into ranges of about this size for random access; a compressed archive is one range."""

    @field_validator("columns", mode="after")
    @classmethod
    def _members_in_small_letters(cls, columns: OwnColumns) -> OwnColumns:
        # With a name in capitals, every sample would get the default.
        return {
            name: said.model_copy(update={"column": said.column.lower()})
            if said.column.startswith(".")
            else said
            for name, said in columns.items()
        }

    @model_validator(mode="after")
    def _members_can_be(self) -> Self:
        for name, said in self.columns.items():
            if not said.column.startswith("."):
                continue
            if _MEMBER.fullmatch(said.column) is None:
                raise fault_at(
                    f"columns.{name}.column is {said.column!r:.80}, and a member is named by a dot and its extension, "
                    "such as .cls: 64 characters at most, with no slash and no second dot before them",
                    *("columns", name, "column"),
                )
            if said.column.endswith(".npy") and said.dtype == "text":
                raise fault_at(
                    f"columns.{name}.dtype is text, and {said.column} is an array of one number; say int64, float32, "
                    "float64 or bool, or name a member of text",
                    *("columns", name, "dtype"),
                )
        return self

    @property
    @override
    def image_members(self) -> tuple[str, ...]:
        return self.images


class MdsSource(_HasColumns, _TextOrTokens):
    """Mosaic's MDS: a folder with ``index.json`` and shards, plain or compressed by zstd; each sample is one record."""

    reads_beside = False
    type: Literal["mds"]
    dtype: TokenType | None = None
    """Type of the ids in a column of ``bytes``; columns of ``ndarray`` state their own type."""
    unit: UnitBytes = 4 << 20
    """A plain shard is cut into ranges of about this size for random access; a compressed shard is one range."""
    columns: OwnColumns = Field(default_factory=dict, exclude_if=none_named)
    """Your own columns, by name. For each token: arrays of numbers (``ndarray``), or ``bytes`` of numbers of their
    ``dtype``. For whole samples: a text (``str``) or a number (``int``, ``uint8`` to ``float64``)."""
    key: LaterKey = None
    """Column of texts (``str``) or integers (``int``, ``uint8``, ...) that identifies a document, for splits. By
    default, its content does."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=self.holds_text)
        return self


class CsvSource(_Texts):
    """Comma-separated values with a header, plain or compressed (``.zst``, ``.gz``); each row is one record."""

    type: Literal["csv"]
    text: str = "text"
    """Column of the text."""
    key: LaterKey = None
    """Column that identifies a document, for splits. By default, the document's content does."""
    # Any character except the quote, which begins a field of another kind.
    delimiter: Annotated[str, Field(pattern=r"^[\x09\x20-\x21\x23-\x7e]$")] = ","
    """Separator of fields: one character, such as a tab."""
    quoted: bool = True
    """Whether fields may be quoted (``"``) and so hold newlines. If not, a quote is an ordinary character."""
    unit: UnitBytes = 4 << 20
    """A plain shard is cut into ranges of about this size for random access; a compressed shard is one range."""


class RegisteredSource(SourceBase):
    """Files in your own format, decoded by a reader that an installed distribution registers."""

    type: Literal["registered"]
    reader: Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
    """Name of the reader among the entry points ``omniload.readers``."""
    holds: Literal["text", "tokens"] = "text"
    """What the reader returns for each record: ``text`` to tokenise, or ``tokens``, ids that are used unchanged."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments for the reader."""

    @property
    @override
    def holds_text(self) -> bool:
        return self.holds == "text"

    @property
    @override
    def rests_on_more(self) -> bool:
        return True  # a reader of another version may find other records


# A closed list. The file names a format, never a class to import.
SourceConfig = Annotated[
    ParquetSource
    | JsonlSource
    | TextSource
    | CsvSource
    | ArrowSource
    | LanceSource
    | MdsSource
    | WebDatasetSource
    | MegatronSource
    | NumpySource
    | RegisteredSource,
    Field(discriminator="type"),
]

SOURCE_TYPES: tuple[str, ...] = tuple(
    str(get_args(model.model_fields["type"].annotation)[0])
    for model in get_args(get_args(SourceConfig)[0])
)
"""Types of sources, as a mix file writes them."""


def values_per_patch_of(sources: Mapping[str, SourceBase]) -> int:
    """Return the values of a patch of the images of a mix, which are all of one size; 0 where it has none."""
    found = (source.images_transform for source in sources.values())
    return next((each.values_per_patch for each in found if each is not None), 0)


def tags_of(sources: Mapping[str, SourceBase]) -> dict[str, dict[str, str]]:
    """Return the tags of the sources that have any, by name."""
    return {name: source.tags for name, source in sources.items() if source.tags}
