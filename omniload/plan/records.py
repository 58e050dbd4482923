"""Records of a plan: the pieces of every row of a step, and the place of each row.

Shape suffixes:
    R  rows of the step        P  their pieces
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.pieces import PieceTable
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable

__all__ = [
    "CostedRows",
    "PieceFacts",
    "PieceTags",
    "StepPlan",
    "TagsOf",
    "documents_between",
    "of_documents",
]

PieceTags: TypeAlias = Mapping[str, NDArray[Any]]
"""Tags of the sample of each piece, ``[P]``, by the columns that costs and strategies know them as."""
TagsOf: TypeAlias = Callable[[PieceTable], PieceTags]
"""Finds the tags of the samples of some pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFacts:
    """Metadata of the pieces of a step in addition to their lengths."""

    labels_left_out: int = 0
    """Labels that are not trained on."""
    images: ImageTable | None = None
    """Their images; ``None`` where they hold none."""
    documents: Ragged | None = None
    """Lengths of the documents of each piece; ``None`` where each is one."""
    tags: PieceTags = field(default_factory=dict)
    """Tags that costs and strategies read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: which pieces make up which row, and which microbatch of which rank trains on it.

    Membership (``pieces`` and ``row_offsets``) does not depend on the number of ranks;
    ``dp_ranks_R`` and ``microbatches_R`` alone do.
    """

    step: int
    """Number of the step, from 0."""
    pieces: PieceTable
    """All pieces, grouped by row."""
    row_offsets: NDArray[np.int64]
    """Boundaries of the rows in ``pieces``, ``[R + 1]``."""
    dp_ranks_R: NDArray[np.int32]
    """Data-parallel rank of each row."""
    microbatches_R: NDArray[np.int32]
    """Microbatch of each row within its rank."""
    num_microbatches: int
    """Microbatches of every rank in this step."""
    imbalance: float
    """Heaviest rank over the mean, by cost."""
    bound: float
    """Least possible ``imbalance`` for these rows: the same quotient for the reachable lower bound."""
    tokens_S: tuple[int, ...]
    """Tokens of each source in the whole step."""
    loss_tokens: int
    """Labels predicted in the whole step."""
    image_table: ImageTable | None = None
    """The images of the step, for placing it anew; not in parts of it."""
    documents: Ragged | None = None
    """Lengths of the documents of each piece; ``None`` where each is one. As ``image_table``, not in parts of it."""
    images: ImagePlan | None = None
    """Where images are encoded; ``None`` if each rank encodes the images of its rows, or there are none."""
    microbatch_imbalance: float = 1.0
    """Heaviest microbatch over the mean of all, by cost."""
    microbatch_bound: float = 1.0
    """Least possible ``microbatch_imbalance`` for these rows."""
    mix_revision: int = 0
    """Revision of the mix under which the step was drawn."""

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.row_offsets) - 1

    def membership_digest(self) -> str:
        """Return a digest of what is trained on: equal whatever the ranks, loaders or timing."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.int64(self.step).tobytes())
        # A fixed width and byte order, because journals are compared on other machines.
        digest.update(self.row_offsets.astype("<i8").tobytes())
        digest.update(self.pieces.to_bytes())
        return digest.hexdigest()

    def part_of(self, dp_ranks: Sequence[int]) -> "StepPlan":
        """Return the plan with the rows of ``dp_ranks`` only; what is said of the whole step stays."""
        is_theirs_R = _are_among(self.dp_ranks_R, dp_ranks)
        # Small jobs have one constructor: it is given the plan itself.
        if is_theirs_R.all():
            return self
        pieces, offsets = self._cut(rows := is_theirs_R.nonzero()[0])
        images = None if self.images is None else self.images.part_of(dp_ranks)
        return self._with(rows, pieces, offsets, images)

    def parts_of(self, ranks_of: Sequence[Sequence[int]]) -> list["StepPlan"]:
        """Return ``part_of`` each of some ranks, all in one pass over the rows: there may be hundreds of constructors.

        Args:
            ranks_of: Data-parallel ranks of each data constructor; no rank is of two.
        """
        if len(ranks_of) < 2:
            return [self.part_of(dp_ranks) for dp_ranks in ranks_of]
        images = self.images
        size = int(self.dp_ranks_R.max(initial=-1)) + 1
        owners_D = _owners_of(ranks_of, size if images is None else images.tree.size_of("dp"))
        owners_R = owners_D[self.dp_ranks_R]
        order_R = owners_R.argsort(kind="stable")
        bounds = owners_R[order_R].searchsorted(range(len(ranks_of) + 1)).tolist()
        cut, offsets = self._cut(order_R)
        images_C = (
            [None] * len(ranks_of) if images is None else images.parts_of(owners_D, len(ranks_of))
        )
        parts = []
        for n, (a, b) in enumerate(pairwise(bounds)):
            if b - a == self.num_rows:
                parts.append(self)  # as ``part_of`` does
                continue
            # Whole arrays, as a plan has: what is cut of one that lies otherwise is sent by another, slower way.
            pieces = PieceTable(cut.columns_CP[:, offsets[a] : offsets[b]].copy())
            own = offsets[a : b + 1] - offsets[a]
            parts.append(self._with(order_R[a:b], pieces, own, images_C[n]))
        return parts

    def _cut(self, rows: NDArray[np.int64]) -> tuple[PieceTable, NDArray[np.int64]]:
        """Return the pieces of some rows, and the boundaries of those rows in them."""
        counts = self.row_offsets[rows + 1] - self.row_offsets[rows]
        offsets = np.concatenate(([0], counts.cumsum()))
        # Places of the pieces of each row, without a loop: a step may have a million rows.
        pieces = (self.row_offsets[rows] - offsets[:-1]).repeat(counts) + np.arange(offsets[-1])
        return self.pieces.take(pieces), offsets

    def _with(
        self,
        rows: NDArray[np.int64],
        pieces: PieceTable,
        row_offsets: NDArray[np.int64],
        images: ImagePlan | None,
    ) -> "StepPlan":
        """Return the plan with some rows only, of which pieces and images are found."""
        return replace(
            self,
            pieces=pieces,
            row_offsets=row_offsets,
            dp_ranks_R=self.dp_ranks_R[rows],
            microbatches_R=self.microbatches_R[rows],
            image_table=None,
            documents=None,
            images=images,
        )

    def rows_by_microbatch(self, dp_rank: int) -> tuple[NDArray[np.int64], list[int]]:
        """Return the rows of a data-parallel rank, microbatch by microbatch in plan order, and how many each has."""
        rows = (self.dp_ranks_R == dp_rank).nonzero()[0]
        microbatches = self.microbatches_R[rows]
        counts: list[int] = np.bincount(microbatches, minlength=self.num_microbatches).tolist()
        return rows[microbatches.argsort(kind="stable")], counts


def _are_among(dp_ranks_R: NDArray[np.int32], dp_ranks: Sequence[int]) -> NDArray[np.bool_]:
    """Return which rows go to the given ranks, which may be consecutive, as for a constructor, or not."""
    if not dp_ranks:
        return np.zeros(len(dp_ranks_R), np.bool_)
    first, last = min(dp_ranks), max(dp_ranks)
    if last - first + 1 == len(set(dp_ranks)):
        return (dp_ranks_R >= first) & (dp_ranks_R <= last)
    return np.isin(dp_ranks_R, dp_ranks)


def _owners_of(ranks_of: Sequence[Sequence[int]], size: int) -> NDArray[np.int64]:
    """Return the number of each data-parallel rank's constructor, ``[D]``; for ranks without one, their count."""
    owners_D = np.full(size, len(ranks_of))
    theirs = np.concatenate([np.asarray(ranks, np.int64) for ranks in ranks_of])
    owners = np.arange(len(ranks_of)).repeat([len(ranks) for ranks in ranks_of])
    have_rows = theirs < size
    owners_D[theirs[have_rows]] = owners[have_rows]
    return owners_D


def documents_between(
    begins_P: NDArray[np.int64], ends_P: NDArray[np.int64], starts: Sequence[NDArray[np.int64]]
) -> Ragged | None:
    """Return the lengths of the documents of each piece; ``None`` where each is one.

    Args:
        begins_P: Where each piece begins among the tokens of all, end to end.
        ends_P: Where it ends.
        starts: Where documents begin inside of pieces, in any order.
    """
    if not sum(map(len, starts)):
        return None
    bounds = np.sort(np.concatenate((begins_P, ends_P[-1:], *starts)))
    return Ragged(
        values_V=np.diff(bounds).astype(np.int32),
        offsets=np.append(np.searchsorted(bounds, begins_P), len(bounds) - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedRows:
    """The rows of a step as costs and strategies see them: each document is a piece."""

    pieces: PieceTable
    row_offsets: NDArray[np.int64]
    images: ImageTable | None
    tags: PieceTags


def of_documents(
    pieces: PieceTable, row_offsets: NDArray[np.int64], facts: PieceFacts
) -> CostedRows:
    """Return the rows of a step with each document that a sample joins and keeps apart as a piece of its own.

    Args:
        pieces: The pieces, grouped by row.
        row_offsets: Boundaries of the rows in the pieces, ``[R + 1]``.
        facts: Their images, documents and tags.
    """
    images, documents = facts.images, facts.documents
    if documents is None:
        return CostedRows(pieces=pieces, row_offsets=row_offsets, images=images, tags=facts.tags)
    owners = np.repeat(np.arange(len(pieces)), documents.lengths_N)
    ends = np.cumsum(documents.values_V, dtype=np.int64)
    # Relative to the piece, which is also the beginning of the sample: pieces of several documents are never cut.
    before_P = np.append(0, ends)[documents.offsets[:-1]]
    stops = ends - before_P[owners] + pieces.starts_P[owners]
    found = pieces.take(owners).between(stops - documents.values_V, stops)
    if images is not None:
        # A piece with images is one document.
        images = replace(images, pieces_I=documents.offsets[images.pieces_I])
    return CostedRows(
        pieces=found,
        row_offsets=documents.offsets[row_offsets],
        images=images,
        tags={column: values_P[owners] for column, values_P in facts.tags.items()},
    )
