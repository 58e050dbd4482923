"""The edits of a run in its folder: ``edits.json``, sealed and written as a whole by the holder of the plane.

The file outlives every attempt. A run that resumes from an earlier step finds the edits of later steps in the file,
and they apply at the same steps again::

    {"version": 2, "mix": "6b0c...", "edits": [{"revision": 1, "step": 120, ...}], "blake2b": "..."}

``mix`` is a digest of the mix that the edits belong to. The version is 6 with a fitted cost, otherwise 5 with a stage
that began by epochs, otherwise 4 with an edit of amounts, otherwise 3 with one that skips a shard, otherwise 2 with
one that skips steps, otherwise 1.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError, StateError, system_refusals
from omniload.base.reading import read_kept_file
from omniload.base.state import Json, sealed, unsealed
from omniload.base.units import counted
from omniload.base.writing import write_whole
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import MOST_EDITS, BeginStage, Edit, FitCost, SkipShard
from omniload.mix.edits.found import require_named
from omniload.mix.edits.history import History
from omniload.mix.journal.room import Room

__all__ = ["EDITS_NAME", "edits_in", "read_history", "write_history"]

EDITS_NAME = "edits.json"
"""Name of the file in the run's folder."""
_MOST_BYTES = 1 << 30


class _Kept(StrictModel):
    version: Literal[1, 2, 3, 4, 5, 6] = 1
    mix: str
    edits: Annotated[tuple[Edit, ...], Field(max_length=MOST_EDITS)]


def read_history(run_dir: Path | None, mix: MixConfig) -> History:
    """Return a mix with the edits of a run; there are none without a folder or a file in it.

    Raises:
        StateError: The file is damaged, of another version, or belongs to another mix.
    """
    if run_dir is None:
        return History(mix)
    path = run_dir / EDITS_NAME
    try:
        found = orjson.loads(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="the edits of a run")
        )
        kept = _Kept.model_validate(unsealed(found, of=str(path)))
    except (FileNotFoundError, NotADirectoryError):
        return History(mix)
    except (OSError, ValueError, AttributeError, ValidationError, IntegrityError) as error:
        raise StateError(
            f"{path}: not the edits of a run, or damaged ({error!s:.200}); restore it, or move it away to go on "
            "without them"
        ) from error
    # The numbers of sources, and the weights between edits, are valid only for this mix.
    if kept.mix != _digest(mix):
        raise StateError(
            f"{path}: holds {counted(len(kept.edits), 'edit')} of a mix with digest {kept.mix}, this one has "
            f"{_digest(mix)}: go on with the old mix file, or give another run_dir"
        )
    return require_named(History(mix, _in_order(kept.edits, str(path))), str(path))


@system_refusals("the run's edits")
def write_history(run_dir: Path, history: History, room: Room | None = None) -> None:
    """Save the edits of a run durably; if the disk is full, wait in ``room``.

    Raises:
        OmniloadError: The disk is full, or the folder cannot be written.
    """
    # The lowest sufficient version, so that older releases read what they know and refuse the rest by its version.
    version: Literal[1, 2, 3, 4, 5, 6] = 2 if any(edit.behind for edit in history.edits) else 1
    if any(isinstance(edit.change, SkipShard) for edit in history.edits):
        version = 3
    if any(edit.amounts is not None for edit in history.edits):
        version = 4
    if any(isinstance(edit.change, BeginStage) for edit in history.edits):
        version = 5
    if any(isinstance(edit.change, FitCost) for edit in history.edits):
        version = 6
    # All edits, even those at lost steps: the journal drops lost work, but an edit is a user's decision.
    kept = _Kept(version=version, mix=_digest(history.base), edits=history.edits)
    content: dict[str, Json] = kept.model_dump(mode="json")
    place, data = run_dir / EDITS_NAME, orjson.dumps(sealed(content))
    write = partial(write_whole, place, data, durable=True)
    if room is None:
        write()
    else:
        room.write(write, place, run_dir)


def edits_in(state: Mapping[str, Json] | None) -> tuple[Edit, ...]:
    """Return the edits in a loader state.

    Raises:
        StateError: The edits are damaged.
    """
    if not isinstance(state, Mapping) or "edits" not in state:
        return ()
    try:
        edits = _edits_adapter().validate_python(state["edits"])
    except ValidationError as error:
        raise StateError(
            f"the edits in the mix state are damaged ({error.errors()[0]['msg']}); resume from an earlier checkpoint"
        ) from error
    return _in_order(edits, "the mix state")


# Built when first needed, because few states carry edits and a model of every change takes a while to build.
@cache
def _edits_adapter() -> TypeAdapter[tuple[Edit, ...]]:
    return TypeAdapter(tuple[Edit, ...])


def _in_order(edits: Sequence[Edit], where: str) -> tuple[Edit, ...]:
    revisions = [edit.revision for edit in edits]
    if revisions != list(range(1, len(edits) + 1)):
        raise StateError(
            f"{where}: its edits have revisions {revisions[:8]}, they count from 1; restore it from a backup"
        )
    late = [edit for edit in edits if edit.undoes is not None and edit.undoes >= edit.revision]
    if late:
        raise StateError(
            f"{where}: edit {late[0].revision} undoes edit {late[0].undoes}, and one before it can be undone alone; "
            "restore it from a backup"
        )
    return tuple(edits)


def _digest(mix: MixConfig) -> str:
    """Return a digest of what edits change: the seed, the names of the sources, and the weights."""
    # Paths are left out, because data may move.
    said: dict[str, Json] = {
        "seed": str(mix.seed),
        "sources": list(mix.names),
        "mix": mix.mix.model_dump(mode="json"),
    }
    text = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=8).hexdigest()
