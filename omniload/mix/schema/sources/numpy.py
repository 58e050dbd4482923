"""What a mix file says of a source of token ids in files of numpy's, or in flat files."""

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from typing_extensions import override

from omniload.base.config import fault_at
from omniload.base.settings.quantities import Bytes, Count
from omniload.mix.columns import LOSS_MASK
from omniload.mix.schema.source_base import SourceBase
from omniload.mix.schema.sources.own_columns import (
    ColumnLabel,
    OwnColumn,
    none_named,
    require_columns,
)
from omniload.mix.schema.sources.units import TokenType, UnitBytes
from omniload.mix.schema.transforms import FilterTransform, MiddleTransform

__all__ = ["NumpySource"]


class NumpySource(SourceBase):
    """Token ids in ``.npy`` files, or in flat files of a stated type. Each document, or each row, is one record."""

    type: Literal["numpy"]
    dtype: TokenType | None = None
    """Type of the ids in a flat file, in the byte order of the machine; ``.npy`` files state their own type."""
    header: Bytes = Field(default=0, le=1 << 20)
    """Bytes before the ids of a flat file."""
    end_of_document: int | None = Field(default=None, ge=0, lt=1 << 31)
    """Token that ends every document and stays its last token. Tokens after the last such token are a document, too.
    With ``row_tokens``, records are rows as stored, and this token marks where documents inside a row begin: attention,
    positions, labels and costs then stay within documents."""
    row_tokens: Annotated[Count, Field(ge=1, le=1 << 28)] | None = None
    """Tokens of a row. The file is cut into rows from its start; its last row may be shorter."""
    unit: UnitBytes = 4 << 20
    """Records of about this size are read together."""
    columns: dict[ColumnLabel, str | OwnColumn] = Field(default_factory=dict, exclude_if=none_named)
    """Columns in files next to those of the tokens: ``loss_mask`` (0 and 1, or booleans), and your own columns. Each
    file has one value for each token of its file of tokens, in the same order, or with ``of: samples`` one number for
    each record. In the name, ``*`` stands for the name of the file of tokens without its suffix. For ``{loss_mask:
    "*.mask.npy", loss_weight: {column: "weights/*.npy", of: labels}}``, the files of ``a.npy`` are ``a.mask.npy`` and
    ``weights/a.npy``. A ``.npy`` file states its type; a flat file has the type of its column, and a flat mask has one
    byte for each token. Files of columns are not read as tokens, even if ``path`` matches them."""
    _passed_over: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _middles_are_of_documents(self) -> Self:
        for i, transform in enumerate(self.transforms):
            if self.row_tokens is not None and isinstance(transform, MiddleTransform):
                raise fault_at(
                    f"fim rearranges documents, and row_tokens {self.row_tokens} cuts rows that may hold parts of "
                    "several; say end_of_document alone, or leave fim out",
                    *("transforms", i),
                )
        return self

    @property
    @override
    def sequence_tokens(self) -> int | None:
        joined = super().sequence_tokens
        # A transform behind may shorten what it does not leave out.
        is_whole = all(isinstance(each, FilterTransform) for each in self.transforms)
        return self.row_tokens if joined is None and is_whole else joined

    @property
    @override
    def sequence_key(self) -> tuple[str | int, ...]:
        return super().sequence_key or ("row_tokens",)

    @property
    @override
    def keeps_documents_apart(self) -> bool:
        return super().keeps_documents_apart or self.rows_hold_documents

    @property
    def rows_hold_documents(self) -> bool:
        """Whether a record is a row of several documents, of which each is known to begin behind a token."""
        return self.row_tokens is not None and self.end_of_document is not None

    @model_validator(mode="after")
    def _rows_of_documents_stay_rows(self) -> Self:
        for i, transform in enumerate(self.transforms):
            if self.rows_hold_documents and not isinstance(transform, FilterTransform):
                raise fault_at(
                    f"transforms[{i}]: {transform.type} changes rows, and row_tokens {self.row_tokens} with "
                    f"end_of_document {self.end_of_document} keeps documents apart inside of them; leave "
                    "end_of_document or row_tokens out, or the transform",
                    *("transforms", i),
                )
        return self

    @model_validator(mode="after")
    def _columns_are_files_beside(self) -> Self:
        require_columns(self.columns, holds_text=False)
        for name, said in self.columns.items():
            if isinstance(said, str) and name != LOSS_MASK:
                raise fault_at(
                    f"columns.{name} is {said!r:.60}, and beside token ids in numpy there are loss_mask and columns of "
                    f"yours; leave it out, or use parquet, arrow or lance",
                    *("columns", name),
                )
            if isinstance(said, OwnColumn) and said.dtype == "text":
                raise fault_at(
                    f"columns.{name}.dtype is text, and a file beside token ids holds numbers; number the texts, or "
                    "use parquet, arrow, lance, jsonl, csv or webdataset",
                    *("columns", name, "dtype"),
                )
            _require_pattern(name, said if isinstance(said, str) else said.column)
        return self

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of files beside those of the tokens, as of ``columns``, which hold no tokens, read or not."""
        return tuple(dict.fromkeys((*self._passed_over, *self.columns_read.values())))

    @override
    def using(self, columns: Collection[str]) -> Self:
        used = super().using(columns)
        if used is not self:
            # A file of a column that is not read holds no tokens either.
            used._passed_over = self.passed_over
        return used

    @property
    @override
    def holds_text(self) -> bool:
        return False


def _require_pattern(name: str, column: str) -> None:
    """Refuse a name of files beside others that leads elsewhere, or is that of one file for all.

    Raises:
        PydanticCustomError: Says what it is.
    """
    parts = column.split("/")
    if column.count("*") != 1 or column == "*" or any(part in {"", ".", ".."} for part in parts):
        raise fault_at(
            f"columns.{name} is read from {column!r:.60}, which names no file beside each file of tokens, in its "
            'folder or below; write * once, where the name of that file goes without its suffix: "*.weights.npy" or '
            '"weights/*.npy"',
            *("columns", name),
        )
