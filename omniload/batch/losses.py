"""Losses as a loop has them (of labels, of rows, of documents, or one of all), summed by document.

One rule for every form: **a mean counts at each label that it goes over**. So the mean of any labels, over any ranks,
is the sum of losses over the sum of labels.

Shape suffixes:
    R  rows        T  tokens in a row, or in the slice of a cp peer        K  pieces        D  pieces and padding
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch

__all__ = ["DocumentLosses", "Over", "losses_by_document", "means_of_source"]

Over: TypeAlias = Literal["document", "row", "rows", "source"]
"""What a reported mean is taken over: the document itself, its row, all rows, or its whole source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLosses:
    """Reported losses of the pieces of some rows."""

    keys_K4: NDArray[np.int64]
    """Source, position, sub and first token."""
    sums_K: NDArray[np.float64]
    """Sum over its labels."""
    labels_K: NDArray[np.int64]
    """Labels; 0 for a piece that none is trained on of."""
    over: Over = "document"
    """What each reported loss is a mean over."""
    columns: tuple[int, int] | None = None
    """First column and width of a cp peer's slice, whose labels are only a part of each piece's."""

    def of_source(self, source: int) -> tuple[int, NDArray[np.int64] | None]:
        """Return the labels of a source, by its number, and the key of its first piece, ``[4]``, if any."""
        mine_K = self.keys_K4[:, 0] == source
        labels = int(self.labels_K[mine_K].sum())
        return labels, self.keys_K4[mine_K][0] if labels else None


def losses_by_document(
    rows: Microbatch | CpSlice,
    labels_RT: NDArray[Any],
    losses: object = None,
    *,
    document_losses: object = None,
) -> DocumentLosses:
    """Sum losses by document.

    Args:
        rows: The rows; a cp peer's slice of them counts the labels that it holds.
        labels_RT: Their labels as the trainer has them.
        losses: Loss of each label, ``[R, T]``, any values where there is none, also flat, ``[R*T]``; or the mean over
            the labels of each row, ``[R]``, or of all rows, ``[]``.
        document_losses: Instead of them, the mean over the labels of each piece, ``[K]``.

    Raises:
        ConfigError: The losses have another shape, or are no numbers.
    """
    of_D = _PiecesOf(rows)
    labelled = labels_RT.reshape(-1) != IGNORE_LABEL
    labels_K = of_D.summed(labelled.astype(np.int64))
    given = _numbers(losses if document_losses is None else document_losses)
    over: Over = "document"
    if document_losses is not None:
        if given.shape != labels_K.shape:
            raise ConfigError(
                f"document_losses have shape {list(given.shape)}, and the rows hold {len(labels_K)} documents; give "
                "one for each of pieces(), in their order (of a preference pair, one for both sides)"
            )
        sums_K = _spread(given, labels_K)
    elif given.shape in {labels_RT.shape, (labels_RT.size,)}:
        # Chosen, not multiplied by 0: without a label a loss may be nan. As doubles: a float32 has 7 digits, and a
        # sum goes over thousands of tokens.
        sums_K = of_D.summed(np.where(labelled, given.reshape(-1), 0.0).astype(np.float64))
    elif given.shape == labels_RT.shape[:1]:
        over, sums_K = "row", _spread(given[of_D.rows_K], labels_K)
    elif not given.shape:
        over, sums_K = "rows", _spread(np.full(len(labels_K), given), labels_K)
    else:
        # Losses [T, R] hold as many values, in the order of other documents.
        raise ConfigError(
            f"losses have shape {list(given.shape)}, labels {list(labels_RT.shape)}; give one loss for each label, "
            "as cross_entropy(..., reduction='none') does, the mean of each row, [R], or one mean of all"
        )
    # Most pieces may lie outside this slice; the peers report those.
    told_K = labels_K > 0 if isinstance(rows, CpSlice) else slice(None)
    return DocumentLosses(
        keys_K4=rows.keys_K4[told_K],
        sums_K=sums_K[told_K],
        labels_K=labels_K[told_K],
        over=over,
        columns=(int(rows.indices_C[0]), len(rows.indices_C))
        if isinstance(rows, CpSlice)
        else None,
    )


class _PiecesOf:
    """Sums what stands at tokens by the piece that they are of; padding is none."""

    def __init__(self, rows: Microbatch | CpSlice) -> None:
        self._starts_D, self._holds_D = rows.cu_seqlens[:-1], rows.sources_D >= 0
        self._pieces_N: NDArray[np.int64] | None = None
        if isinstance(rows, CpSlice):
            num_rows = len(rows.tokens_RC)
            length = int(rows.cu_seqlens[-1]) // max(num_rows, 1)
            at_RC = np.arange(num_rows)[:, None] * length + rows.indices_C
            self._pieces_N = rows.cu_seqlens.searchsorted(at_RC.reshape(-1), side="right") - 1
        else:
            length = rows.tokens_RT.shape[1]
        self.rows_K = self._starts_D[self._holds_D] // max(length, 1)
        """Row that each piece lies in."""

    def summed(self, values_N: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of values of all tokens, row by row, for each piece, ``[K]``."""
        if self._pieces_N is None:
            # Padding is summed too and then left out: reduceat goes from one start to the next, over any gap.
            return np.add.reduceat(values_N, self._starts_D)[self._holds_D]
        sums_D = np.zeros(len(self._holds_D), values_N.dtype)
        np.add.at(sums_D, self._pieces_N, values_N)
        return sums_D[self._holds_D]


def _spread(means_K: NDArray[Any], labels_K: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of pieces whose labels have some means; without a label a mean may be nan."""
    spread: NDArray[np.float64] = np.where(labels_K > 0, means_K.astype(np.float64), 0.0) * labels_K
    return spread


def _numbers(given: object) -> NDArray[Any]:
    try:
        many = [_on_host(each) for each in given] if isinstance(given, list | tuple) else given
        held = np.asarray(_on_host(many))
    except (RuntimeError, TypeError, ValueError) as error:  # lists of several lengths
        raise ConfigError(
            f"losses are no table of numbers ({error!s:.120}); give a tensor"
        ) from error
    if held.dtype.kind == "V":  # a type of another library, such as JAX's bfloat16
        with suppress(TypeError, ValueError):
            held = held.astype(np.float32)
    if held.dtype.kind not in "iuf":
        raise ConfigError(f"losses are of type {held.dtype}; give numbers, as a tensor or a list")
    return held


def _on_host(given: object) -> object:
    # A tensor may lie on a device, in a type that numpy has not; one copy of 4 bytes a value.
    tensor: Any = given
    return tensor.detach().float().cpu() if hasattr(given, "detach") else given


def means_of_source(loss: object, reward: object) -> tuple[float | None, float | None]:
    """Return the means of a source that a loop gives, numbers or tensors of one.

    Returns:
        The loss, which may be nan of a step that went wrong, and the reward; ``None`` for what is not given.

    Raises:
        ConfigError: One is no number, or a reward is not finite.
    """
    found: list[float | None] = []
    for name, given in (("loss", loss), ("reward", reward)):
        # A tensor of one value tells it by ``item``, wherever it lies.
        try:
            value = given.item() if hasattr(given, "item") else given
        except (ValueError, RuntimeError) as error:  # it has several values
            raise ConfigError(
                f"{name} of a source is no single number ({error!s:.120}); give its mean"
            ) from error
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ConfigError(f"{name} of a source is {value!r:.80}; give its mean, a number")
        if name == "reward" and value is not None and not math.isfinite(value):
            raise ConfigError(f"reward of a source is {value!r}; give a finite number")
        found.append(None if value is None else float(value))
    return found[0], found[1]
