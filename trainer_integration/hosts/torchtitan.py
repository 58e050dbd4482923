"""torchtitan: a loader that follows its ``BaseDataLoader`` contract.

The trainer takes ``(inputs, labels)`` from ``iter(loader)``, turns the end of the data into an error of its own, and
passes the loader to DCP. DCP takes a state apart by key and keeps rank 0's value of equal keys. Therefore each rank has
a key of its own, with one opaque value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import require_version
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration.hosts.rank_states import packed, unpacked
from trainer_integration.loader.data_loader import DataLoader

__all__ = ["TitanLoader"]

_VERSION = 1
_MIX = "mix"
"""Key of a mix's state, which is the same on all ranks and fits any number of them."""


class TitanLoader:
    """One data-parallel rank's loader, for torchtitan and similar trainers."""

    def __init__(self, loader: DataLoader, *, dp_rank: int, dp_world_size: int) -> None:
        """Hand out the batches of ``loader``.

        Args:
            loader: Loader of this rank's samples, or of a mix.
            dp_rank: Number of the data-parallel rank; peers in tp and pp have the same.
            dp_world_size: Data-parallel ranks.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= dp_rank < dp_world_size:
            raise ConfigError(
                f"dp_rank is {dp_rank} of {dp_world_size} data-parallel ranks; ranks count from 0"
            )
        self._loader, self._dp_world_size = loader, dp_world_size
        # Ranks of tp and pp have the same batches, so one key serves them all.
        self._key = _MIX if loader.is_mix else f"dp_rank_{dp_rank}"

    def __iter__(self) -> Iterator[Any]:
        """Yield ``({"input": [R, T], "positions": [R, T]}, labels [R, T])`` of a mix.

        Batches of a dataset come unchanged.

        Raises:
            ConfigError: The mix is open with unshifted labels, but the trainer's loss needs the next token.
        """
        # Not a generator: an error would end it, and the next call would tell the trainer that the data has ended.
        return self._loader.loop(_taken)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position, in the form that DCP keeps together with those of the other ranks."""
        return {
            "version": _VERSION,
            "dp_world_size": self._dp_world_size,
            # One value of bytes, because DCP would take a mapping apart, and merge the keys of all ranks.
            self._key: packed(self._loader.state_dict()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken; an empty one changes nothing.

        Raises:
            StateError: The state has no position for this rank, or is of another number of ranks.
        """
        if not state_dict:
            return
        require_version(state_dict, _VERSION, of="torchtitan loader")
        saved = state_dict.get("dp_world_size")
        if saved != self._dp_world_size and self._key != _MIX:
            raise StateError(
                f"the state is of {saved!r} data-parallel ranks, this run has {self._dp_world_size}: the samples are "
                f"dealt otherwise; resume on {saved!r} ranks, or use a mix"
            )
        if self._key not in state_dict:
            held = sorted(key for key in state_dict if key not in {"version", "dp_world_size"})
            raise StateError(
                f"the state holds {held}, and nothing for {self._key}; resume from a checkpoint that this rank is in"
            )
        self._loader.load_state_dict(
            unpacked(state_dict[self._key], of=f"the state of {self._key}")
        )

    def close(self) -> None:
        """End the workers, or the data plane of a mix."""
        self._loader.close()


def _taken(batch: Any) -> Any:
    """Return a batch in the trainer's form."""
    return _trainers(batch) if isinstance(batch, TrainingBatch) else batch


def _trainers(batch: TrainingBatch) -> tuple[dict[str, Any], Any]:
    if batch.label_form != "shifted":
        raise ConfigError(
            f"the labels are {batch.label_form}, and the trainer's loss compares each output with the next token; "
            "open the mix with labels='shifted'"
        )
    return {"input": batch.tokens, "positions": batch.position_ids}, batch.labels
