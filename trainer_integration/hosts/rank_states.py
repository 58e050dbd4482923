"""States of loaders in a checkpoint's folder: one file per rank, so that no rank overwrites another's."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from omniload.base.errors import StateError
from omniload.base.state import require_version
from omniload.base.units import counted
from omniload.base.writing import write_whole

__all__ = ["has_states", "load_states", "packed", "save_states", "unpacked"]

_VERSION = 1
_PATTERN = "omniload_loaders_rank*.pt"


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"omniload_loaders_rank{rank}.pt"


def packed(state: Mapping[str, Any]) -> bytes:
    """Return a state as one opaque value, so that checkpoint code that takes mappings apart keeps it whole."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpacked(value: object, *, of: str) -> dict[str, Any]:
    """Return the argument of ``packed``, read as tensors and plain values; no code in it runs.

    Raises:
        StateError: The value is damaged; ``of`` names it.
    """
    if not isinstance(value, bytes):
        raise StateError(f"{of} is a {type(value).__name__}; resume from an earlier checkpoint")
    try:
        # To the CPU, because the GPU of a tensor may not exist here.
        state = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    # For corrupted bytes, torch raises whatever its unpickler encounters.
    except Exception as error:
        raise StateError(
            f"{of} is damaged ({error!r:.160}); resume from an earlier checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise StateError(f"{of} holds a {type(state).__name__}; resume from an earlier checkpoint")
    return state


def save_states(
    folder: str | Path, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int
) -> None:
    """Write the states of this rank's loaders; the file appears whole or not at all."""
    place = _file_of(Path(folder), rank)
    place.parent.mkdir(parents=True, exist_ok=True)
    note = {"version": _VERSION, "rank": rank, "world_size": world_size, "loaders": list(states)}
    # By one rename: a rank that dies here leaves the file of the previous save, or none.
    write_whole(place, packed(note))


def has_states(folder: str | Path) -> bool:
    """Whether any rank has written states there; a checkpoint of another loader has none."""
    return any(Path(folder).glob(_PATTERN))


def load_states(
    folder: str | Path, count: int, *, rank: int, world_size: int, elastic: bool = False
) -> list[dict[str, Any]]:
    """Return the states of this rank's loaders, in the order they were saved.

    The file is read as tensors and plain values; no code in it runs.

    Args:
        folder: The checkpoint's folder.
        count: Number of loaders that wait for a state.
        rank: Number of this process.
        world_size: Processes of this run.
        elastic: Whether the states are the same on all ranks and fit any number of them, as those of a mix.

    Raises:
        StateError: The rank's file is missing or damaged, or was written by another number of ranks or of loaders.
    """
    found = sorted(Path(folder).glob(_PATTERN))
    place = _file_of(Path(folder), rank)
    if not place.exists() and elastic and found:
        # The states of a mix are all alike, so a new rank takes any.
        place = found[0]
    if not place.exists():
        raise StateError(
            f"{folder} holds loader states of {counted(len(found), 'rank')} and none of rank {rank}; resume with the "
            "number of ranks that saved, from a checkpoint whose files are all there"
        )
    note = unpacked(place.read_bytes(), of=str(place))
    require_version(note, _VERSION, of="rank")
    saved, loaders = note.get("world_size"), note.get("loaders")
    if saved != world_size and not elastic:
        raise StateError(
            f"{place} was written by rank {note.get('rank')!r} of {saved!r}, this is rank {rank} of {world_size}: the "
            f"samples are dealt to another number of ranks; resume on as many as it is of, {saved!r}"
        )
    if not isinstance(loaders, list) or len(loaders) != count:
        held = len(loaders) if isinstance(loaders, list) else loaders
        raise StateError(
            f"{place} holds the states of {held!r} loaders, this run has {count}; prepare the same loaders in "
            "the same order"
        )
    return loaders
