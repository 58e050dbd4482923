"""What a source says of its own packing: whether its documents are cut, and which documents lie beside them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at

__all__ = ["SourcePack", "SourcePacking", "is_cut"]


class SourcePack(StrictModel):
    """How documents of one source become rows, if different from other sources."""

    cut: Literal["never", "allow"] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """``never``: each document lies whole in one row. ``allow``: a document may be cut where a row ends, which fills
    rows to the last token. By default ``pack.method`` decides: ``concat_and_split`` cuts, ``best_fit`` does not."""
    rows: Literal["shared", "own", "alone"] = Field(
        default="shared", exclude_if=lambda value: value == "shared"
    )
    """Which documents may be in one row: ``shared`` mixes documents of all sources, ``own`` only documents of this
    source, and ``alone`` gives each document a row to itself."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.cut is None and self.rows == "shared":
            raise fault_at(
                "pack says nothing; say cut: never or allow, or rows: own or alone, or leave pack out"
            )
        if self.cut == "allow" and self.rows == "alone":
            raise fault_at(
                "cut is allow and rows is alone: a document that has a row to itself is not cut to fill one; leave "
                "cut out",
                "cut",
            )
        return self


def is_cut(pack: SourcePack | None, method: str) -> bool:
    """Tell whether documents of a source are cut where a row ends.

    Args:
        pack: What the source says.
        method: ``pack.method`` of its mix.
    """
    if pack is None or (pack.cut is None and pack.rows != "alone"):
        return method == "concat_and_split"
    return pack.cut == "allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePacking:
    """How documents of each source become rows.

    Shape suffixes: S  sources
    """

    cut_S: NDArray[np.bool_]
    """Whether its documents are cut where a row ends."""
    own_S: NDArray[np.bool_]
    """Whether no other source lies in its rows."""
    alone_S: NDArray[np.bool_]
    """Whether each of its documents has a row to itself."""

    @classmethod
    def of(cls, packs: Iterable[SourcePack | None], method: str) -> Self | None:
        """Return how each source is packed; ``None`` where all are as ``method`` has it, as in most mixes."""
        packs = list(packs)
        if not any(packs) or method == "none":
            return None
        rows = [pack.rows if pack is not None else "shared" for pack in packs]
        found = cls(
            cut_S=np.array([is_cut(pack, method) for pack in packs]),
            own_S=np.array([said == "own" for said in rows]),
            alone_S=np.array([said == "alone" for said in rows]),
        )
        alike = (found.cut_S == (method == "concat_and_split")).all()
        return None if alike and set(rows) == {"shared"} else found
