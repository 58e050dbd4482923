"""Identifier of a run in each tool, kept in the run's folder, so that a resumed run continues under it."""

import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole

__all__ = ["RECORD_NAME", "WritersRecord", "read_record"]

RECORD_NAME = "writers.json"
"""File in the run's folder."""
_MOST_BYTES = 1 << 16
_Number = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]


class WritersRecord(StrictModel):
    """Identifiers of one run."""

    version: Literal[1] = 1
    # Chosen by us, so that it is recorded before anything is sent under it.
    wandb: _Number = Field(default_factory=lambda: secrets.token_hex(4))
    mlflow: _Number | None = None
    """Identifier chosen by MLflow."""

    def write(self, folder: Path) -> None:
        """Write the record to the folder of the run."""
        write_whole(folder / RECORD_NAME, self.model_dump_json().encode())


def read_record(folder: Path) -> WritersRecord:
    """Return the identifiers of a run, new ones for a new run.

    Raises:
        StateError: The file is not of this release.
    """
    path = folder / RECORD_NAME
    try:
        held = read_kept_file(path, most_bytes=_MOST_BYTES, what="the numbers of a run's writers")
        return WritersRecord.model_validate_json(held)
    except FileNotFoundError:
        record = WritersRecord()
        record.write(folder)
        return record
    except ValidationError as error:
        raise StateError(
            f"{path}: is not of this release ({error.error_count()} faults); remove it, and the tools know the run "
            "under new numbers from here on"
        ) from error
