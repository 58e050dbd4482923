"""What a short profile measured of a source, kept beside its index for later starts.

It says how much work a source is, and so where it is read; never which samples it gives. One
that is gone, damaged or of another time is measured again or done without.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.reading import open_file
from omniload.source.index import write_kept

__all__ = ["KeptProfile", "keep", "kept_profiles"]

_LARGEST_BYTES = 4_096


class KeptProfile(StrictModel):
    """The costs of a source."""

    version: Literal[1] = 1
    preprocess_s_per_token: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    """Processor seconds of decoding and tokenising."""
    block_bytes: Annotated[int, Field(ge=0, le=1 << 50)]
    """Memory of the largest decoded block."""


def keep(folder: Path, source: str, profile: KeptProfile) -> None:
    """Keep what was measured; a folder that cannot be written is told, and not needed."""
    write_kept(_path(folder, source), orjson.dumps(profile.model_dump()))


def kept_profiles(folder: Path | None, sources: Iterable[str]) -> dict[str, KeptProfile]:
    """Return what is kept of the sources; those of which nothing is, or nothing that can be read, are left out."""
    found: dict[str, KeptProfile] = {}
    for source in sources if folder is not None and folder.is_dir() else ():
        assert folder is not None
        try:
            with open_file(_path(folder, source)) as file:
                found[source] = KeptProfile.model_validate(orjson.loads(file.read(_LARGEST_BYTES)))
        # Not told: it costs a measurement, and changes nothing that is drawn.
        except (OSError, StateError, orjson.JSONDecodeError, ValidationError):
            continue
    return found


def _path(folder: Path, source: str) -> Path:
    return folder / f"{source}.profile.json"
