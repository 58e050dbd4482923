"""States of Mosaic Streaming, turned into the records that their unfinished epoch had drawn.

The state consists of five numbers. The order that they refer to follows from the sizes of the shards and from settings
of the training file (``omniload.importing.mosaic_order``). A mix here draws no record again before it has drawn the
others of its source. Therefore records that were drawn more often than the least drawn record are left out of the
first epoch.

Shape suffixes:
    S  streams      H  shards of a stream      R  samples of all streams, in their order
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.state import Json, shown, whole_number
from omniload.importing.fields import Report
from omniload.importing.json_states import read_json_state
from omniload.importing.mosaic_order import (
    MOST_SAMPLES,
    OrderSettings,
    Shuffle,
    chosen_of_shards,
    chosen_of_streams,
    first_places,
    places_of,
)

__all__ = ["INSTEAD", "MosaicState", "Stream", "drawn_of", "read_mosaic_state"]

_MOST_BYTES = 1 << 20
_MOST_DRAWS = 1 << 33
"""Largest number of samples of all epochs, if each epoch chooses other samples."""
INSTEAD = "begin a new epoch with the saved model: import the mix without --state"
"""Remedy if a run cannot resume from a state."""
_AS_JSON = (
    "write its dataset's state as JSON, where the checkpoint is trusted: "
    "json.dump(loader.state_dict(), file), or of Composer's checkpoint state['state']['dataset_state']['train']"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicState:
    """The content of Mosaic's ``state_dict``."""

    epoch: int
    sample_in_epoch: int
    """Number of samples that all ranks together had taken."""
    num_canonical_nodes: int
    shuffle_seed: int

    @classmethod
    def of(cls, state: Mapping[str, Json]) -> "MosaicState":
        """Check a state.

        Raises:
            StateError: It is not a state, or a number is out of its range.
        """
        known = {"epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed"}
        if missing := sorted(known - state.keys()):
            raise StateError(
                f"the state has no {missing[0]}, and holds {', '.join(map(repr, list(state)[:6])) or 'nothing'}; "
                "a state of Mosaic Streaming has epoch, sample_in_epoch, num_canonical_nodes and shuffle_seed"
            )
        # The physical nodes are not needed, because the drawn samples do not depend on the number of hosts.
        if unknown := sorted(state.keys() - known - {"initial_physical_nodes"}):
            raise StateError(f"the state has {unknown[0]!r:.60}, which is not known; {INSTEAD}")
        # Sums of these numbers are seeds of numpy, which must not be negative or exceed 64 bits.
        below = {
            "epoch": 1 << 31,
            "sample_in_epoch": MOST_SAMPLES,
            "num_canonical_nodes": 1 << 20,
            "shuffle_seed": 1 << 62,
        }
        try:
            found = {
                key: whole_number(
                    state[key], below=most, least=1 if key == "num_canonical_nodes" else 0
                )
                for key, most in below.items()
            }
        except ValueError as error:
            raise StateError(
                f"the state of Mosaic Streaming is damaged: {error}; {INSTEAD}"
            ) from error
        return cls(**found)


def read_mosaic_state(path: Path) -> MosaicState:
    """Read a state that was written as JSON.

    Raises:
        ConfigError: There is no such file, or it is too large.
        StateError: The file is a torch checkpoint, which is not loaded, or not a state.
    """
    state = read_json_state(
        path, most_bytes=_MOST_BYTES, what="a state of Mosaic Streaming", remedy=_AS_JSON
    )
    if not isinstance(state, dict):
        raise StateError(f"{path}: holds {shown(state)}, no object; {_AS_JSON}")
    try:
        return MosaicState.of(state)
    except StateError as error:
        raise StateError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream of a dataset."""

    source: str
    """Name of the source that it becomes."""
    shards: Mapping[str, int]
    """Number of samples of each shard that has any, by name of the shard."""
    key: str
    """Kind of its share: ``proportion``, ``repeat`` or ``choose``; empty for its size."""
    value: float

    @property
    def samples_H(self) -> NDArray[np.int64]:
        """Number of samples of each shard."""
        return np.array(list(self.shards.values()), np.int64)


def drawn_of(
    state: MosaicState, settings: OrderSettings, streams: Sequence[Stream], report: Report
) -> dict[str, dict[str, NDArray[np.int64]]]:
    """Return the records of each shard to leave out of the first epoch, by source.

    Args:
        state: The state.
        settings: Settings of the order of its dataset.
        streams: The streams of the dataset, in order.
        report: Receives a note on every source, and the faults.
    """
    sizes_S = np.array([stream.samples_H.sum() for stream in streams], np.int64)
    kinds = {stream.key == "proportion" for stream in streams}
    # These faults are already reported by their keys.
    if report.faults or not streams or len(kinds) > 1:
        return {}
    if not sizes_S.all():
        report.refuse("", "a stream holds no sample, of which no state is known")
        return {}
    # Each value is finite, but the sum of two values such as 1e308 is not.
    total = sum(stream.value for stream in streams)
    if kinds == {True} and not 0 < total < math.inf:
        report.refuse("", f"the streams have proportions that sum to {total:g}; give shares of 1")
        return {}
    epoch = _Epochs(state, settings, streams, sizes_S)
    if said := epoch.refused():
        report.refuse("--state", said)
        return {}
    left_out_R = epoch.left_out()
    block = epoch.block_size if settings.block_size is None else settings.block_size
    report.note(
        "--state",
        f"epoch {state.epoch}, {state.sample_in_epoch} of {epoch.size} samples drawn; as of streaming 0.6 to 0.13, "
        + (
            "not shuffled"
            if settings.algorithm == "none"
            else f"shuffled by {settings.algorithm} with shuffle_block_size {block}"
        ),
    )
    found: dict[str, dict[str, NDArray[np.int64]]] = {}
    begin = 0
    for stream in streams:
        records: dict[str, NDArray[np.int64]] = {}
        first = begin
        for shard, samples in stream.shards.items():
            at = np.flatnonzero(left_out_R[begin : begin + samples])
            begin += samples
            if len(at):
                records[shard] = at
        left_out = sum(map(len, records.values()))
        report.note(
            "--state",
            f"{left_out} of {begin - first} records of {stream.source} are left out of its first epoch",
        )
        if records:
            found[stream.source] = records
    return found


class _Epochs:
    """The epochs of a dataset up to the place of a state."""

    def __init__(
        self,
        state: MosaicState,
        settings: OrderSettings,
        streams: Sequence[Stream],
        sizes_S: NDArray[np.int64],
    ) -> None:
        self._state, self._settings, self._streams = state, settings, streams
        self._sizes_S = sizes_S
        self._chosen_S = self._chosen()
        self.size = int(self._chosen_S.sum())
        """Number of samples of an epoch."""
        self._whole = bool((self._chosen_S == sizes_S).all())
        """Whether an epoch passes over every stream once."""
        self.block_size = max(4_000_000 // state.num_canonical_nodes, 1 << 18)
        """Default of Mosaic, if the file does not give a size."""

    def refused(self) -> str:
        """Return why the drawn records cannot be determined; empty if they can."""
        state, most = self._state, max(self.size, int(self._sizes_S.sum()))
        if most > MOST_SAMPLES:
            return f"an epoch goes through {most} samples, more than {MOST_SAMPLES}; {INSTEAD}"
        if self.size <= state.num_canonical_nodes:
            return (
                f"an epoch has {self.size} samples, not more than the {state.num_canonical_nodes} canonical nodes, so "
                f"that samples come again in it; {INSTEAD}"
            )
        # Samples that make an epoch even over ranks are drawn at its end.
        if state.sample_in_epoch > 2 * self.size:
            return (
                f"{state.sample_in_epoch} samples were drawn of an epoch of {self.size}; is it of this data, and are "
                "these the streams?"
            )
        if (
            not self._whole
            and self._settings.balanced
            and ((state.epoch + 1) * self.size > _MOST_DRAWS)
        ):
            return (
                f"{state.epoch + 1} epochs of {self.size} samples, each of others, are more than {_MOST_DRAWS}; "
                + INSTEAD
            )
        return ""

    def left_out(self) -> NDArray[np.bool_]:
        """Return which samples were drawn more often than the least drawn sample of their stream, ``[R]``."""
        counts_R = np.zeros(int(self._sizes_S.sum()), np.int32)
        # Epochs over everything draw each record equally often.
        if not self._whole:
            self._count_whole_epochs(counts_R)
        samples: NDArray[np.int64] | None = None  # None: in their numbering
        if self._whole:
            units_U = np.concatenate([stream.samples_H for stream in self._streams])
        else:
            units_U, samples = self._epoch(self._state.epoch)
        shuffle = Shuffle(
            algorithm=self._settings.algorithm,
            seed=self._state.shuffle_seed,
            epoch=self._state.epoch,
            block_size=self._settings.block_size or self.block_size,
        )
        stretches = self._state.num_canonical_nodes
        firsts = first_places(self.size, stretches, self._state.sample_in_epoch)
        for first, places in zip(
            firsts.tolist(), places_of(units_U, stretches, shuffle), strict=True
        ):
            drawn = places[:first]
            # Not ``counts_R[...] += 1``, which would count a repeated record only once.
            np.add.at(counts_R, drawn if samples is None else samples[drawn], 1)
        bounds = [0, *np.cumsum(self._sizes_S).tolist()]
        return np.concatenate([counts_R[a:b] > counts_R[a:b].min() for a, b in pairwise(bounds)])

    def _chosen(self) -> NDArray[np.int64]:
        """Return the samples of each stream in an epoch."""
        streams, sizes_S = self._streams, self._sizes_S
        total = self._settings.epoch_size or int(sizes_S.sum())
        if streams[0].key == "proportion":
            proportions = [stream.value for stream in streams]
            return chosen_of_streams(sizes_S, proportions, total, self._state.shuffle_seed)
        if self._settings.epoch_size and not any(stream.key for stream in streams):
            return chosen_of_streams(sizes_S, None, total, self._state.shuffle_seed)
        wanted_S = [
            stream.value * (size if stream.key == "repeat" else 1) if stream.key else size
            for stream, size in zip(streams, sizes_S.tolist(), strict=True)
        ]
        # Capped to fit an integer of numpy; ``refused`` then reports that it is too much.
        return np.array([int(min(wanted, MOST_SAMPLES + 1)) for wanted in wanted_S], np.int64)

    def _count_whole_epochs(self, counts_R: NDArray[np.int32]) -> None:
        epochs = self._state.epoch
        if not self._settings.balanced and epochs:
            _, samples = self._epoch(0)
            counts_R += np.bincount(samples, minlength=len(counts_R)).astype(np.int32) * epochs
            return
        for epoch in range(epochs):
            _, samples = self._epoch(epoch)
            counts_R += np.bincount(samples, minlength=len(counts_R)).astype(np.int32)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the units of an epoch, and the samples in them, end to end."""
        seed, settings = self._state.shuffle_seed, self._settings
        random = np.random.default_rng(seed + epoch if settings.balanced else seed)
        of_shards = seed + epoch if settings.balanced and settings.algorithm != "none" else seed
        units: list[int] = []
        samples: list[NDArray[np.int64]] = []
        begin = 0
        for stream, chosen in zip(self._streams, self._chosen_S.tolist(), strict=True):
            sizes_H = stream.samples_H
            chosen_H = chosen_of_shards(sizes_H, chosen, settings.granularity, of_shards)
            for size, wanted in zip(sizes_H.tolist(), chosen_H.tolist(), strict=True):
                times, rest = divmod(wanted, size)
                units += [size] * times
                samples += [np.arange(begin, begin + size, dtype=np.int64)] * times
                if rest:
                    units.append(rest)
                    samples.append(begin + np.sort(random.choice(size, rest, replace=False)))
                begin += size
        return np.array(units, np.int64), np.concatenate(samples)
