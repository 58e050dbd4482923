"""The part of a shared batch that one rank gets: the columns of its pipeline stage, and the images that it encodes.

::

    stage along pp    first             middle          last
    by default        tokens, images                    labels, scores, text, own
    always            rows and columns of the batch, bounds of documents, positions, sources and keys of pieces

What attention needs follows from the bounds, so a middle stage has no value of a token. A stage that holds both the
first and the last layers, as of a schedule in the shape of a V, is given the columns of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from omniload.batch.absent import absent_array, absent_column, is_absent
from omniload.batch.microbatch import Batch, CpSlice, Microbatch, aligned_of
from omniload.mix.columns import COLUMNS, DOCUMENT_STARTS, IMAGE_COLUMNS, IMAGES, REJECTED_AT

__all__ = ["LABELS", "OWN", "TOKENS", "Stage", "StageName", "column_of", "own_part"]

StageName: TypeAlias = Literal["first", "middle", "last"]
"""Position of a stage along pp."""
TOKENS, LABELS, OWN, _ALL = "tokens", "labels", "own", "all"
_BOUNDS = {REJECTED_AT, DOCUMENT_STARTS}
"""Columns of whole samples that bound documents: attention needs them in every stage."""
_COLUMN_OF: dict[str, str] = {
    **dict.fromkeys(("tokens_RT", "tokens_RC"), TOKENS),
    **dict.fromkeys(("next_D", "trained_RT", "labels_RC"), LABELS),
    **dict.fromkeys(IMAGE_COLUMNS, IMAGES),
    **dict.fromkeys(_BOUNDS, ""),
}


def column_of(name: str, *, is_array: bool) -> str:
    """Return the column that an array of a microbatch, or a column of whole samples, is of; none for every stage's."""
    # Every other name is a user's column; a user's column cannot have a name of this list.
    return _COLUMN_OF.get(name, "" if is_array else name if name in COLUMNS else OWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline: the ranks at one place along pp."""

    number: int
    """Its place along pp, from 0."""
    count: int
    """Stages along pp."""
    name: StageName
    columns: frozenset[str]
    """Its columns in addition to those of every stage."""

    @classmethod
    def at(cls, number: int, count: int, columns_of: Mapping[str, Sequence[str]]) -> Self:
        """Return a stage by its place, with the columns of its name."""
        name: StageName = "first" if not number else "last" if number == count - 1 else "middle"
        return cls(number=number, count=count, name=name, columns=frozenset(columns_of[name]))

    def has(self, column: str) -> bool:
        """Return whether its ranks have ``tokens``, ``labels``, ``images``, ``own``, or a whole-sample column."""
        return not column or column in self.columns or _ALL in self.columns

    def refusal(self, column: str, called: str = "") -> str:
        """Return why its ranks have no such column, and how to ask for it; ``called`` as the user calls it."""
        wanted = sorted({*self.columns, column})
        return (
            f"this rank is of stage {self.number} of {self.count} along pp, {self._said}, which gets "
            f"{', '.join(sorted(self.columns)) or 'no column'}, and no {called or column}; to have it in such a stage "
            f"open the mix with pipeline={{{self.name!r}: {wanted}}}, or set batch.pipeline.{self.name} of it"
        )

    @property
    def _said(self) -> str:
        return "a middle one" if self.name == "middle" else f"the {self.name} one"


def own_part(batch: Batch, peer: int, ranks_W: Sequence[int], stage: Stage | None = None) -> Batch:
    """Return a batch with only the images that one rank encodes and the columns that its stage uses.

    Args:
        batch: What the data plane hands out at a place along dp and cp, or what has come of it to this rank.
        peer: Number of the rank among those that take the batch.
        ranks_W: Job-wide numbers of all ranks in the order of their places; empty if they are numbered in that order.
        stage: The stage of the rank along pp; ``None`` without several.
    """
    shares = [microbatch.encoding for microbatch in batch.microbatches]
    parts = batch.microbatches
    if ranks_W or any(share is not None and share.others for share in shares):
        # A share without others is of this rank: the others' were dropped before it was sent.
        own = [
            share and (share.of_peer(peer) if share.others else share).numbered(ranks_W)
            for share in shares
        ]
        parts = tuple(replace(part, encoding=each) for part, each in zip(parts, own, strict=True))
    if stage is not None:
        parts = tuple(_cut(part, stage) for part in parts)
    return batch if parts is batch.microbatches else replace(batch, microbatches=parts)


def _cut(part: Microbatch | CpSlice, stage: Stage) -> Microbatch | CpSlice:
    """Return rows without the columns that a stage does not use."""
    changed: dict[str, Any] = {
        "columns_K": {
            name: column
            if stage.has(of := column_of(name, is_array=False))
            else absent_column(stage.refusal(of, name if of == OWN else ""))
            for name, column in part.columns_K.items()
        }
    }
    is_whole = isinstance(part, Microbatch)
    if not stage.has(OWN):
        changed["aligned_RT" if is_whole else "aligned_RC"] = {
            name: absent_array(stage.refusal(OWN, name), values)
            for name, values in aligned_of(part).items()
        }
    if not stage.has(LABELS):
        name = "next_D" if is_whole else "labels_RC"
        changed[name] = absent_array(stage.refusal(LABELS), getattr(part, name))
        if is_whole:
            changed["trained_RT"] = None
    if not stage.has(TOKENS):
        name = "tokens_RT" if is_whole else "tokens_RC"
        changed[name] = absent_array(stage.refusal(TOKENS), tokens := getattr(part, name))
        # Labels of whole rows are the tokens, one further: they are what travels for both.
        if is_whole and stage.has(LABELS) and not is_absent(tokens):
            changed["label_tokens_RT"] = tokens
    return replace(part, **changed)
