"""Packed rows as tensors.

Shape suffixes:
    R  rows      T  tokens in a row      D  documents of all rows; padding at a row's end counts as one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.batch.absent import is_absent
from omniload.batch.arrays import Arrays
from omniload.batch.images import EncodingArrays, ImageArrays, dealt_images, own_images
from omniload.batch.losses import DocumentLosses, losses_by_document
from omniload.batch.microbatch import (
    CpSlice,
    Microbatch,
    aligned_of,
    brings_labels,
    rows_of,
    source_ids_of,
)
from omniload.batch.rows import (
    Documents,
    Piece,
    documents_of,
    pieces_of,
    unshifted,
    work_of,
)
from omniload.mix.journal.rewards import SourceRewards
from omniload.plan.groups.verdicts import checked_rewards, rewards_of_sources

__all__ = ["Fields", "Labels", "PackedRows"]

Labels: TypeAlias = Literal["shifted", "unshifted"]
"""``shifted``: the label of a token is the next one, for a loop that compares logits and labels in place.
``unshifted``: the label of a token is itself, for models that shift by themselves (Hugging Face)."""
_FIELDS = frozenset(
    {
        *("tokens", "labels", "position_ids", "columns_in_row", "source_ids", "cu_seqlens"),
        *("document_sources", "padding_mask", "attention_mask", "pairs"),
    }
)
"""Names of the tensors of rows. Each tensor is made when it is first asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields in use of a batch."""

    whole: frozenset[str] = frozenset()
    """Fields of all rows together."""
    parts: frozenset[str] = frozenset()
    """Fields of the microbatches."""


class PackedRows:
    """Rows of packed documents. Each field is a tensor that is made when you first read it."""

    def __init__(
        self,
        part: Microbatch | CpSlice,
        arrays: Arrays,
        labels: Labels,
        device: object = None,
        values_per_patch: int = 0,
    ) -> None:
        self._part, self._arrays, self._labels, self._device = part, arrays, labels, device
        self._values_per_patch = values_per_patch
        self._parts: Sequence[Microbatch | CpSlice] = (part,)
        self._columns: dict[str, Any] = {}
        self._put: Callable[[Any], Any] | None = None

    @cached_property
    def tokens(self) -> Any:  # noqa: ANN401
        """Token ids ``[R, T]``, int64; 0 in the padding."""
        return self._tensor(rows_of(self._part, "tokens"), np.int64)

    @cached_property
    def labels(self) -> Any:  # noqa: ANN401
        """Tokens to predict ``[R, T]``, int64; -100 where nothing is predicted."""
        rows = rows_of(self._part, "labels")
        return self._tensor(rows if self._labels == "shifted" else unshifted(rows), np.int64)

    @cached_property
    def position_ids(self) -> Any:  # noqa: ANN401
        """Position of each token in its document ``[R, T]``, int64."""
        return self._tensor(self._documents.positions, np.int64)

    @cached_property
    def columns_in_row(self) -> Any:  # noqa: ANN401
        """Column of each of ``tokens`` in the whole row ``[T]``, int64, the same for all rows.

        From 0 to T - 1. If cp peers share the rows, the columns of the two parts that this rank holds.
        """
        if isinstance(self._part, CpSlice):
            return self._tensor(self._part.indices_C, np.int64)
        return self._tensor(np.arange(self._part.tokens_RT.shape[1]), np.int64)

    @cached_property
    def source_ids(self) -> Any:  # noqa: ANN401
        """Source of each token, as an index into the sorted names ``[R, T]``, int64; -1 in the padding."""
        return self._tensor(source_ids_of(self._part), np.int64)

    @cached_property
    def cu_seqlens(self) -> Any:  # noqa: ANN401
        """Bounds of the documents in the flattened rows ``[D + 1]``, int32, as varlen attention takes them."""
        return self._tensor(self._documents.cu_seqlens, np.int32)

    @cached_property
    def document_sources(self) -> Any:  # noqa: ANN401
        """Source of each document of ``cu_seqlens`` ``[D]``, int64; -1 for padding."""
        # Counted by the pieces that the documents begin in, because a pair, or joined documents, are one piece with
        # several bounds.
        pieces_D = np.searchsorted(
            self._part.cu_seqlens, self._documents.cu_seqlens[:-1], side="right"
        )
        return self._tensor(self._part.sources_D[pieces_D - 1], np.int64)

    @cached_property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return int(np.diff(self._documents.cu_seqlens).max(initial=0))

    @cached_property
    def pairs(self) -> Any:  # noqa: ANN401
        """Chosen and rejected document of each preference pair, as numbers in ``cu_seqlens`` ``[P, 2]``, int64."""
        return self._tensor(self._documents.pairs_P2, np.int64)

    @cached_property
    def _documents(self) -> Documents:
        return documents_of(self._part)

    @cached_property
    def padding_mask(self) -> Any:  # noqa: ANN401
        """True where a row holds a token ``[R, T]``, bool; the mask for models that take unpacked rows.

        Such a model treats a packed row as one document, so use ``pack: {method: none}``.
        """
        return self._tensor(source_ids_of(self._part) >= 0, np.bool_)

    @cached_property
    def attention_mask(self) -> Any:  # noqa: ANN401
        """For attention without varlen: bool ``[R, 1, T, T]``, true where a token attends.

        A token attends to itself and to earlier tokens of its own document. The mask takes ``R * T * T`` bytes.
        """
        if isinstance(self._part, CpSlice):
            raise ConfigError(
                "rows shared among cp peers have no attention_mask of their own; use cu_seqlens"
            )
        num_rows, length = self._part.tokens_RT.shape
        # The first document has number 0, so its start is not counted, and the last bound starts no document.
        starts = self._documents.cu_seqlens[1:-1]
        document_RT = (
            np.bincount(starts, minlength=num_rows * length).cumsum().reshape(num_rows, length)
        )
        same_RTT = document_RT[:, :, None] == document_RT[:, None, :]
        mask = same_RTT & np.tri(length, dtype=np.bool_)
        # The axis of length 1 is the axis of heads: all heads share one mask, and broadcasting does not copy it.
        return self._tensor(mask[:, None], np.bool_)

    def column(self, name: str) -> tuple[Any, Any]:
        """Return a column of whole samples that ``batch.columns`` of the mix names.

        Returns:
            Values ``[V]``, and their bounds by piece ``[K + 1]``, int64; pieces are those of ``pieces``. Your own
            columns are with every piece, texts as UTF-8; ``scores`` and ``text`` are only with the first piece of a
            document that was cut.

        Raises:
            ConfigError: The rows bring no such column.
        """
        found = self._part.columns_K.get(name)
        if found is None:
            raise ConfigError(
                f"the rows bring no column {name!r}, only {sorted(self._part.columns_K) or 'tokens'}; name it under "
                "batch.columns of the mix, and under columns of a source"
            )
        return (
            self._tensor(found.values_V, found.values_V.dtype.type),
            self._tensor(found.offsets, np.int64),
        )

    def token_column(self, name: str) -> Any:  # noqa: ANN401
        """Return your own column with a value for each token, which ``batch.columns`` of the mix names.

        Returns:
            Values ``[R, T]`` of its ``dtype``, at the places of ``tokens``; 0 in the padding. With ``of: labels``, each
            value stands where ``labels`` have its token, and is 0 where a document ends without a label.

        Raises:
            ConfigError: The rows bring no such column.
        """
        if name not in self._columns:
            found = aligned_of(self._part).get(name)
            if found is None:
                raise ConfigError(
                    f"the rows bring no column {name!r} of tokens, only {list(self.token_columns) or 'tokens'}; name "
                    "it under batch.columns of the mix, and under columns of a source"
                )
            self._columns[name] = self._tensor(found, found.dtype.type)
        return self._columns[name]

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Names of your own columns with a value for each token, sorted; in a pipeline, only those of the stage."""
        found = aligned_of(self._part).items()
        return tuple(sorted(name for name, values in found if not is_absent(values)))

    def pieces(self) -> list[Piece]:
        """Return the documents of the rows one by one, each with its key and tokens; numpy arrays on the host.

        Documents that a sample joins form one piece.

        Raises:
            ConfigError: The rows are shared among cp peers.
        """
        return pieces_of(self._part)

    @property
    def deals_images(self) -> bool:
        """Whether ``balance.strategy`` deals images separately from rows. If so, use ``encoding``, else ``images``."""
        return any(part.encoding is not None for part in self._parts)

    @cached_property
    def images(self) -> ImageArrays:
        """The images of the rows, and the places of their embeddings; ``ConfigError`` if the rows do not have them."""
        return own_images(self._part, self._parts, self._tensor, self._values_per_patch)

    @cached_property
    def encoding(self) -> EncodingArrays:
        """The images that this rank encodes for the microbatch, and the destination of their embeddings."""
        return dealt_images(self._part, self._tensor)

    def losses_by_document(
        self, losses: object = None, *, document_losses: object = None
    ) -> DocumentLosses:
        """Return the loss on each document, or on documents that a sample joins together.

        Args:
            losses: Loss of each of ``labels``, ``[R, T]``, as ``cross_entropy(..., reduction="none")`` returns it; or
                the mean over the labels of each row, ``[R]``, or over all, ``[]``.
            document_losses: In place of ``losses``, the mean over the labels of each of ``pieces()``, ``[K]``.

        Raises:
            ConfigError: The losses have another shape, or are not numbers.
        """
        labels = rows_of(self._part, "labels")
        labels = labels if self._labels == "shifted" else unshifted(labels)
        return losses_by_document(self._part, labels, losses, document_losses=document_losses)

    def work(self) -> tuple[int, int]:
        """Return the tokens of the documents of the rows, and the sum of their squared lengths, for costs.

        Padding counts as nothing. If cp peers share the rows, each peer has the work of the whole rows.
        """
        return work_of(self._part)

    def rewards_of_sources(self, rewards: object) -> dict[int, SourceRewards]:
        """Return the rewards of the answers to documents of each source, by the number of the source.

        Args:
            rewards: Reward of each answer to each piece, ``[K, G]``.

        Raises:
            ConfigError: The rewards have another shape.
        """
        sources_K = np.array([piece.key[0] for piece in self.pieces()], np.int64)
        return rewards_of_sources(sources_K, checked_rewards(rewards, len(sources_K)))

    def parts(self) -> Sequence[Microbatch | CpSlice]:
        """Return the rows of the data plane that they are: of a batch those of each of its microbatches."""
        return self._parts

    @property
    def label_form(self) -> Labels:
        """Whether a label is the next token or the token itself."""
        return self._labels

    @property
    def num_rows(self) -> int:
        """Number of rows ``R``."""
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of ``tokens`` and ``labels``; known in every stage of a pipeline."""
        rows, columns = rows_of(self._part, "tokens").shape
        return int(rows), int(columns)

    def has(self, column: str) -> bool:
        """Tell whether the rows bring ``tokens``, ``labels``, your own column, or one of whole samples: ``images``.

        Without a pipeline, rows bring tokens and labels; a pipeline stage brings the columns in ``batch.pipeline``.
        """
        if column == "labels":
            return brings_labels(self._part)
        if column == "tokens":
            return not is_absent(rows_of(self._part, "tokens"))
        if column in aligned_of(self._part):
            return column in self.token_columns
        return column in self._part.columns_K and not is_absent(self._part.columns_K[column])

    def to(self, device: object, *, non_blocking: bool = False) -> "PackedRows":  # noqa: ARG002 -- as torch's is called
        """Return the same rows on a device; copies to CUDA never block, whatever ``non_blocking`` is."""
        # An unknown device is refused here, because fields are made later, far from the call that names the device.
        self._arrays.check(device)
        return PackedRows(self._part, self._arrays, self._labels, device, self._values_per_patch)

    def made(self) -> frozenset[str]:
        """Return the names of the tensors made so far, columns of yours among them."""
        # ``cached_property`` keeps its values there.
        return (_FIELDS & self.__dict__.keys()) | self._columns.keys()

    def make(self, names: frozenset[str], put: Callable[[Any], Any]) -> None:
        """Make tensors, each put where it is to be by ``put``."""
        self._put = put
        try:
            for name in sorted(names):
                getattr(self, name) if name in _FIELDS else self.token_column(name)
        finally:
            self._put = None

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse what a loop asks of a mapping, or of a tuple."""
        raise TypeError(
            f"a batch has fields and no items, found [{key!r:.40}]: read batch.tokens, batch.labels and so on. What "
            "takes a mapping needs one made of them, as collate_fn=model_inputs does for Hugging Face's Trainer"
        )

    @override
    def __repr__(self) -> str:
        return f"PackedRows({self._described()})"

    def _described(self) -> str:
        shape = list(self.shape)
        if isinstance(self._part, CpSlice):
            return f"tokens={shape}"
        return f"tokens={shape}, documents={np.count_nonzero(_starts_RT(self._part))}"

    def _tensor(self, array: NDArray[Any], dtype: type[np.generic]) -> Any:  # noqa: ANN401
        # A copy even if the type is right, because the arrays of the plane are shared and read-only.
        tensor = self._arrays.of(array.astype(dtype))
        if self._put is not None:
            return self._put(tensor)
        return tensor if self._device is None else self._arrays.to(tensor, self._device)


def _starts_RT(part: Microbatch) -> NDArray[np.bool_]:
    """Return where a document, or the continuation of one, begins in a row; padding counts as none."""
    begins: NDArray[np.bool_] = (part.positions_RT == 0) & (part.source_ids_RT >= 0)
    return begins
