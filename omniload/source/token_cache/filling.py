"""The samples of a block's records on their way into a token cache.

Records are tokenised as they are drawn, in the order of the shuffle, so that a first batch waits for its
own documents alone. Their tokens are written to a file without a name meanwhile, and once all of a
unit's are there, it is kept. A block that is left half read keeps the units that are whole.

Shape suffixes:
    U  units of the block        R  records of the block        B  records of one unit
    N  records of one read       M  samples, in the order in which they were made
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from omniload.base.ragged import Ragged
from omniload.source.block_memory import HeldColumn, SpilledColumn
from omniload.source.formats.format import Records
from omniload.source.token_cache.entry import EncodedUnit
from omniload.source.token_cache.names import SourceTokens
from omniload.source.transforms.encoders import Samples

__all__ = ["Filling", "UnitToFill"]

_TOKENS = "tokens"
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitToFill:
    """A unit that was decoded as text: all that its entry says but for the samples."""

    unit: int
    bad_B: NDArray[np.bool_]
    kept_B: NDArray[np.bool_]
    given_B: NDArray[np.bool_]
    wanted_B: NDArray[np.bool_]
    """Records of which samples are made, sooner or later."""
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
        """Keep what an entry says of records beside their samples."""
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
    """Gathers samples until units are whole. For one thread."""

    def __init__(
        self, tokens: SourceTokens, units: Mapping[int, UnitToFill], records: int, folder: Path
    ) -> None:
        """Begin with no sample.

        Args:
            tokens: Where whole units go.
            units: What to fill, by the first of its records in the block.
            records: Records of the block, R.
            folder: Where tokens lie meanwhile.
        """
        self._tokens, self._units, self._folder = tokens, units, folder
        self._places_R = np.full(records, -1, np.int64)
        self._spoilt_R = np.zeros(records, np.bool_)
        self._spoilt = ""
        self._wanted_R = np.zeros(records, np.bool_)
        for begin, unit in units.items():
            # Of units that were kept already nothing is wanted.
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
        """Take the samples of records, before any transform of tokens; those that are there already are passed over.

        A disk that takes no more ends the filling, not the reading.
        """
        if self._closed:
            return
        # A range may be read again, and a source of one block has its records again in the next epoch.
        new = np.flatnonzero(self._wanted_R[rows_N] & (self._places_R[rows_N] < 0))
        if not len(new):
            return
        columns = {_TOKENS: samples.tokens, **samples.others}
        try:
            for name, column in columns.items():
                if name not in self._columns:
                    # In a file: in memory the tokens of a block would be as much again as its text.
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
        """Keep every unit whose samples are all there, and take no more; tell whether all of them are kept."""
        if self._closed:
            return False
        # Mapped before the files are closed: what is mapped stays.
        held = {name: column.finish() for name, column in self._columns.items()}
        kept = [self._keep(begin, unit, held) for begin, unit in self._units.items()]
        self.close()
        return all(kept)

    def close(self) -> None:
        """Let go of what was gathered."""
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
        # Where no record of the unit gives a sample there is no column to take any from.
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
    """Return the sequence of each record of a unit, empty where there is none."""
    there = np.flatnonzero(places_B >= 0)
    taken = column.take(places_B[there])
    lengths_B = np.zeros(len(places_B), np.int64)
    lengths_B[there] = taken.lengths_N
    return Ragged(values_V=taken.values_V, offsets=np.concatenate(([0], np.cumsum(lengths_B))))
