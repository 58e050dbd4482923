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
    """Column of text, to be tokenised."""
    tokens: str | None = None
    """Column of token ids (a list of integers), used as they are."""

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
    """Further columns of a sample, and the column of the file that each is read from: ``loss_mask`` (a list of 0 and 1,
    or of booleans, one for each token; a token of 0 is read but is no label) or in place of it ``labels`` (as
    transformers has them: a list of the token's own id, or -100), ``scores`` (a number, or a list of numbers, of the
    whole sample, kept as float32), ``text`` (a text of the whole sample, such as the expected answer). Any other name
    is one of yours, a value for each token, such as ``{loss_weight: {column: weights, dtype: float32, of: labels,
    default: 1.0}}``, or for each sample, such as ``{lang: {column: language, dtype: text, of: samples, default: ""}}``;
    batches bring it where ``batch.columns`` names it."""
    images: str | None = None
    """Column of images as they were encoded (JPEG, PNG, WebP, GIF, BMP): bytes, an object with a field ``bytes`` as
    Hugging Face writes them, or a list of either. A transform of type ``images`` makes patches of them."""

    @property
    @override
    def image_members(self) -> tuple[str, ...]:
        return () if self.images is None else (self.images,)

    key: str | None = None
    """Column of texts or integers that a document is known by, for splits; else its content is."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=self.holds_text)
        return self


class ParquetSource(_Table):
    """Parquet shards; one row is one record."""

    type: Literal["parquet"]


class LanceSource(_Table):
    """Lance data sets, each a folder with its versions; one row is one record. Deleted rows are no records."""

    type: Literal["lance"]
    path: Paths
    """Folders of data sets, or URLs of them (``s3``, ``gs``, ``az``), each with ``_versions`` in it; globs and braces
    name several."""
    version: Version | tuple[Version, ...] | None = None
    """Version that is read of each data set, or a list in their order; without it the newest that a run finds as it
    starts, and then that one to its end."""
    unit: UnitBytes = 4 << 20
    """A fragment is cut into ranges of rows of about this size, as stored, for random access."""


class _Texts(_HasColumns):
    columns: OwnColumns = Field(default_factory=dict, exclude_if=none_named)
    """Columns of yours of whole samples, by name: a text, a number or a boolean of each record. Of ``csv`` in
    another column, where an empty field that is no text is none; of ``webdataset``
    under a key of the JSON object, or in a member, named by its extension: ``.cls`` of digits or a text, ``.score.npy``
    of one number; or ``__key__``, the name of the sample."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=True, may_hold_tokens=False)
        return self


class JsonlSource(_HasColumns):
    """Lines of JSON objects, plain or compressed (``.zst``, ``.gz``); one line is one record."""

    type: Literal["jsonl"]
    text: str = "text"
    """Key of the text, to be tokenised."""
    tokens: LaterKey = None
    """In place of a text, key of token ids (a list of integers), used as they are."""
    columns: dict[ColumnLabel, str | OwnColumn] = Field(default_factory=dict, exclude_if=none_named)
    """Further columns of a sample, and the key that each is read from. Beside ``tokens`` as of a table: ``loss_mask``
    or ``labels``, ``scores``, ``text``, and of yours values for each token. Beside a text or tokens values of yours of
    whole samples: a text, a number or a boolean of each record."""
    key: str | None = None
    """Key of a text or an integer that a document is known by, for splits; else its content is."""
    unit: UnitBytes = 4 << 20
    """Lines of about this size are read together. A compressed shard is entered before them: at a frame of zstd, or at
    one of many places in gzip; what is read on from the lines before takes what lies between alone."""

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
    """Plain text in UTF-8; one file is one record. Its line ends stay, and a byte-order mark before it is left out."""

    type: Literal["text"]
    files_per_unit: int = Field(default=64, ge=1, le=65_536)
    """Files read together."""


class ArrowSource(_Table):
    """Arrow IPC files and streams, and folders of Hugging Face ``save_to_disk``; one row is one record."""

    type: Literal["arrow"]


class MegatronSource(SourceBase):
    """Megatron's ``.bin`` and ``.idx``; one document of token ids is one record. The path may leave the suffix out."""

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
    """WebDataset's tar archives, plain or compressed; one sample, the members of one key, is one record."""

    reads_beside, key_field = False, "known_by"
    type: Literal["webdataset"]
    text: Annotated[str, Field(pattern=r"^[^/.][^/]{0,63}$"), _IN_SMALL_LETTERS] = "txt"
    """Extension of the member that holds the text, in whichever letters; one that ends in ``json`` is a JSON object."""
    key: str = "text"
    """Key of the text in a JSON object."""
    known_by: LaterKey = None
    """What a document is known by, for splits: ``__key__``, the name of its sample (``a/000`` of ``a/000.txt``), or a
    key of a text or an integer in its JSON object; else its content is. That object, which ``where`` reads too, is the
    member under ``text`` where that is one, else the member ``.json``."""
    images: tuple[Annotated[str, Field(pattern=r"^[^/.][^/.]{0,15}$"), _IN_SMALL_LETTERS], ...] = ()
    """Extensions of the members that hold images, in whichever letters, such as ``[jpg, png]``: a sample's images are
    the members whose name ends in one of them, in the order of the archive. A transform of type ``images`` makes
    patches of them."""
    unit: UnitBytes = 4 << 20
    """A plain archive is cut into ranges of about this size for random access; compressed ones are one range."""

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
    """Mosaic's MDS: a folder with ``index.json``, its shards plain or compressed by zstd; one sample is one record."""

    reads_beside = False
    type: Literal["mds"]
    dtype: TokenType | None = None
    """Type of the ids in a column of ``bytes``; columns of ``ndarray`` say their own."""
    unit: UnitBytes = 4 << 20
    """A plain shard is cut into ranges of about this size for random access; compressed ones are one range."""
    columns: OwnColumns = Field(default_factory=dict, exclude_if=none_named)
    """Columns of yours, by name: arrays of numbers (``ndarray``), a value for each token, or ``bytes`` of numbers of
    their ``dtype``; of whole samples a text (``str``) or a number (``int``, ``uint8`` to ``float64``)."""
    key: LaterKey = None
    """Column of texts (``str``) or integers (``int``, ``uint8``, ...) that a document is known by, for splits; else its
    content is."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_columns(self.columns, holds_text=self.holds_text)
        return self


class CsvSource(_Texts):
    """Comma-separated values with a header, plain or compressed (``.zst``, ``.gz``); one row is one record."""

    type: Literal["csv"]
    text: str = "text"
    """Column of the text."""
    key: LaterKey = None
    """Column that a document is known by, for splits; else its content is."""
    # Any character except the quote, which begins a field of another kind.
    delimiter: Annotated[str, Field(pattern=r"^[\x09\x20-\x21\x23-\x7e]$")] = ","
    """What stands between fields: one character, such as a tab."""
    quoted: bool = True
    """Whether fields may be quoted (``"``) and then hold newlines; where not, a quote is a letter like others."""
    unit: UnitBytes = 4 << 20
    """A plain shard is cut into ranges of about this size for random access; compressed ones are one range."""


class RegisteredSource(SourceBase):
    """Files of a format of yours, which a reader decodes that an installed distribution registers."""

    type: Literal["registered"]
    reader: Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
    """Its name among the entry points ``omniload.readers``."""
    holds: Literal["text", "tokens"] = "text"
    """What it gives of each record: ``text``, to be tokenised, or ``tokens``, ids that are used as they are."""
    options: Options = Field(default_factory=dict)
    """What it is made with, by keyword."""

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
