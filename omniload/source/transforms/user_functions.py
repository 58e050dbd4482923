"""Users' functions that map batches of records, with checks of their results.

::

    def strip(texts: pa.LargeStringArray, *, marker: str = "--") -> pa.Array: ...     of: text
    def shift(tokens: pa.LargeListArray, *, by: int = 0) -> pa.Array: ...             of: tokens, lists of int32

The size of a batch depends on the read, so a record must not depend on other records of its batch. Otherwise a resume,
which forms other batches, would give other samples. The first batch is mapped as a whole and in halves, and a function
that gives different results is refused.

Shape suffixes:
    N  records of a batch        K  records that a map of text leaves in
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, offsets_of
from omniload.base.settings.registry import FAILURES, Registered, registered
from omniload.mix.schema.transforms import MapTransform
from omniload.source.transforms.encoders import Samples

__all__ = ["GROUP", "MapFunction", "spread"]

GROUP = "omniload.transforms"
"""Group of entry points."""
_TEXT, _TOKENS = pa.large_string(), pa.large_list(pa.int32())
_LOOKED_AT = 64
"""Records of the first batch that are mapped again in halves."""


class MapFunction:
    """A registered function with its options. Not thread-safe."""

    def __init__(self, source: str, config: MapTransform) -> None:
        """Find the function.

        Raises:
            ConfigError: No installed package registers the function, or it cannot be imported.
        """
        self._config = config
        self._where = f"sources.{source}.transforms: map {config.function!r}"
        try:
            self._registered: Registered = registered(GROUP, config.function)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        self._type = _TEXT if config.of == "text" else _TOKENS
        self._trusted = False

    @property
    def identity(self) -> str:
        """Name of the function and of its distribution, which is part of the fingerprint of a run."""
        return f"{self._registered.name} of {self._registered.distribution}"

    def of_texts(self, texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64] | None]:
        """Return the texts that are left in, and their rows; ``None`` for all rows.

        Raises:
            ConfigError: The function fails, or its result is not allowed.
        """
        import pyarrow.compute as pc  # noqa: PLC0415 -- it takes longer to load than a check takes for 300 sources

        texts = texts.cast(_TEXT)
        made = self._called(texts)
        empty_N = np.asarray(pc.binary_length(made).fill_null(0)) == 0
        # A text that was empty gives no sample anyway, and nothing of it is left out.
        self._require_whole(empty_N[np.asarray(pc.binary_length(texts)) > 0])
        if not empty_N.any():
            return made, None
        left_K = np.flatnonzero(~empty_N)
        return made.take(pa.array(left_K)), left_K

    def of_samples(self, samples: Samples) -> Samples:
        """Return the samples with new tokens; a sample that is left out is empty.

        Raises:
            ConfigError: As for ``of_texts``.
        """
        tokens = samples.tokens
        given_N = np.flatnonzero(tokens.lengths_N)
        if not len(given_N):
            return samples
        lists = pa.LargeListArray.from_arrays(  # without empty lists, which take no room
            pa.array(np.append(tokens.offsets[given_N], tokens.offsets[-1])),
            pa.array(np.ascontiguousarray(tokens.values_V, np.int32)),
        )
        made = self._called(lists)
        lengths_K = np.asarray(made.value_lengths().fill_null(0))
        self._require_whole(lengths_K == 0)
        ids = np.asarray(made.flatten())
        if ids.min(initial=0) < 0:
            raise self._refused(f"gives the token id {int(ids.min())}; ids are 0 or more")
        whole = Ragged(values_V=ids, offsets=offsets_of(lengths_K))
        return replace(samples, tokens=_scattered(whole, given_N, len(tokens)))

    def _called(self, records: pa.Array) -> pa.Array:
        made = self._asked(records)
        # A single record shows nothing, so the next batch is checked instead.
        if not self._trusted and len(records) > 1:
            self._require_alone(records, made)
            self._trusted = True
        return made

    def _asked(self, records: pa.Array) -> pa.Array:
        """Call the function, and check that its result has a record of the right type for each input record."""
        try:
            made = self._registered.function(records, **_plain(self._config.options))
        except FAILURES as error:
            raise self._refused(
                f"fails on {len(records)} records: {type(error).__name__}: {error!s:.300}"
            ) from error
        if isinstance(made, pa.ChunkedArray):
            made = made.combine_chunks()
        if not isinstance(made, pa.Array):
            raise self._refused(f"gives a {type(made).__name__}, not an array of Arrow")
        if len(made) != len(records):
            raise self._refused(
                f"gives {len(made)} records for {len(records)}; leave one out by a null in its place, with drops: true"
            )
        try:
            # The result is cast if it fits, because a function may return strings with 32-bit offsets, or ids of
            # another width.
            made = made.cast(self._type)
        except pa.ArrowException as error:
            raise self._refused(f"gives {made.type}, not {self._type}: {error!s:.120}") from error
        if self._type is _TOKENS and made.flatten().null_count:
            raise self._refused("gives a null for a token id")
        return made

    def _require_whole(self, empty_N: NDArray[np.bool_]) -> None:
        if empty_N.any() and not self._config.drops:
            raise self._refused(
                f"leaves {int(empty_N.sum())} of {len(empty_N)} records out, but drops is false; write drops: true, "
                "or let it return a value for each record"
            )

    def _require_alone(self, records: pa.Array, made: pa.Array) -> None:
        """Raise for a function whose result depends on other records or on chance, as far as one batch shows."""
        # Only a few records, because the check makes the first batch slower, and most such functions show at once.
        looked_at = np.arange(min(len(records), _LOOKED_AT))
        # Copied, because functions access the offsets and values of lists, and a slice has all of its parent's.
        halves = [records.take(pa.array(rows)) for rows in np.array_split(looked_at, 2)]
        again = pa.concat_arrays([self._asked(half) for half in halves])
        if not again.equals(made.slice(0, len(again))):
            i = next(i for i in range(len(again)) if not again[i].equals(made[i]))
            raise self._refused(
                f"returns {made[i].as_py()!r:.60} for one record, but {again[i].as_py()!r:.60} for the same record in "
                "another batch; let it decide from that record alone, and without chance"
            )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._where} ({self._registered.distribution}): {why}")


def spread(samples: Samples, rows_K: NDArray[np.int64], count: int) -> Samples:
    """Return samples of ``count`` records; the records ``rows_K`` have the given samples, and others are empty."""
    bad_N = None
    if samples.bad_N is not None:
        bad_N = np.zeros(count, np.bool_)
        bad_N[rows_K] = samples.bad_N
    return replace(
        samples,
        tokens=_scattered(samples.tokens, rows_K, count),
        others={name: _scattered(each, rows_K, count) for name, each in samples.others.items()},
        extents=None if samples.extents is None else _scattered(samples.extents, rows_K, count),
        bad_N=bad_N,
    )


def _scattered(column: Ragged, rows_K: NDArray[np.int64], count: int) -> Ragged:
    lengths_N = np.zeros(count, np.int64)
    lengths_N[rows_K] = column.lengths_N
    return Ragged(values_V=column.values_V, offsets=offsets_of(lengths_N))


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """Return options as a function expects them, with a list for several values."""
    return {
        key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in options.items()
    }
