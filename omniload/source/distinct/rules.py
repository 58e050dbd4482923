"""Which records of a source become samples: those of its split, that conditions leave in and no earlier one equals.

Shape suffixes:
    B  records of one unit
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import OnError
from omniload.mix.schema.splits import TRAIN, content_keys, in_split
from omniload.source.distinct.drawn_before import DrawnBefore
from omniload.source.distinct.mask import DistinctRecords
from omniload.source.formats.format import Records

__all__ = ["RecordRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRules:
    """Which records become samples."""

    on_error: OnError = field(default_factory=OnError)
    """What happens to one that cannot be decoded."""
    splits: Mapping[str, float] = field(default_factory=dict)
    """Splits of the source."""
    split: str = TRAIN
    """The split that is drawn of it."""
    distinct: DistinctRecords | None = None
    """The records that no earlier one equals, where those alone are drawn."""
    drawn_before: DrawnBefore | None = None
    """The records that the first epoch leaves out, where another loader had drawn any."""

    def drawn_of(self, unit: int, records: Records) -> NDArray[np.bool_]:
        """Tell which records of a unit the split has, and conditions and earlier records leave in."""
        every = np.ones(len(records.column), np.bool_)
        kept_B = every if records.kept_B is None else records.kept_B
        if self.distinct is not None:
            kept_B = kept_B & self.distinct.of_unit(unit)
        if not self.splits:
            return kept_B
        keys_B = content_keys(records.column) if records.keys_B is None else records.keys_B
        return kept_B & in_split(keys_B, self.splits, self.split)
