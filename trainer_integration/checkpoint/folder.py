"""Committed checkpoints on disk, without torch: their steps, and the loader states in them."""

import re
from pathlib import Path

import orjson

from omniload.base.errors import IntegrityError
from omniload.base.state import JsonObject, require_version
from trainer_integration.checkpoint.file_digests import FileDigest, read_sealed_json

__all__ = [
    "LOADER",
    "META",
    "VERSION",
    "loader_state_of",
    "path_of",
    "steps_in",
]

VERSION = 1
"""Version of the format of a checkpoint."""
META = "meta.json"
"""File that describes the content of a checkpoint."""
LOADER = "loader.json"
"""File of the data plane's state in a checkpoint."""

# The whole name must match: a name that ends in ``.partial`` or ``.aside-1`` is no checkpoint.
_COMMITTED = re.compile(r"step-(\d{8,})")


def steps_in(folder: Path) -> tuple[int, ...]:
    """Return the steps of the committed checkpoints in ``folder``, rising."""
    if not folder.is_dir():
        return ()
    matches = (_COMMITTED.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return folder / f"step-{step:08d}"


def loader_state_of(path: Path) -> JsonObject:
    """Return the data plane's state in a committed checkpoint; only the sizes of tensors are checked.

    Raises:
        IntegrityError: The state is not what was saved, or a file is missing or of another size.
        StateError: The checkpoint was written by another release.
    """
    meta = read_sealed_json(path / META)
    require_version(meta, VERSION, of=f"checkpoint {path}")
    files = meta["files"]
    assert isinstance(files, dict), "the digest of meta.json fits, so its form does"
    digests = {name: FileDigest.from_json(digest) for name, digest in files.items()}
    sizes = (digest.size_fault_in(path / name) for name, digest in sorted(digests.items()))
    # The state is read whole, because the data plane opens with it; ranks check every byte of tensors when they load.
    fault = digests[LOADER].fault_in(path / LOADER) or next(filter(None, sizes), None)
    if fault is not None:
        raise IntegrityError(f"{fault}; resume from an earlier checkpoint")
    state: JsonObject = orjson.loads((path / LOADER).read_bytes())
    return state
