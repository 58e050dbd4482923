"""Record of a run's latest launch: the training file as it was read then, and versions."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError, StateError, system_refusals
from omniload.base.extras import DISTRIBUTION
from omniload.base.reading import read_kept_file
from omniload.base.units import counted
from omniload.base.writing import write_whole
from trainer_integration.config import TrainConfig

__all__ = ["LAUNCH_RECORD_NAME", "LaunchRecord", "read_launch_record", "write_launch_record"]

LAUNCH_RECORD_NAME = "train.json"
"""File of the record in the run's folder."""
_MOST_BYTES = 16 << 20
_PACKAGES = (DISTRIBUTION, "torch", "ray", "numpy", "pyarrow", "tokenizers")


class LaunchRecord(StrictModel):
    """One launch."""

    version: Literal[1] = 1
    config_name: str
    """Name of the training file."""
    train: TrainConfig
    versions: dict[str, str]
    """Versions of Python and of packages that compute or transport samples; a missing package is left out."""
    machine: str
    """System, processor architecture and cores."""


@system_refusals("the record of the launch")
def write_launch_record(run_dir: Path, config: Path, train: TrainConfig) -> None:
    """Record a launch in the folder of its run."""
    record = LaunchRecord(
        config_name=config.name,
        train=train,
        versions={"python": platform.python_version()} | _installed(),
        machine=f"{platform.system()} {platform.machine()}, {counted(os.cpu_count() or 0, 'core')}",
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    # Pydantic's own text would turn an infinity, which clip_norm may be, into null.
    text = json.dumps(record.model_dump(mode="json"), indent=2)
    write_whole(run_dir / LAUNCH_RECORD_NAME, text.encode())


def read_launch_record(run_dir: Path) -> LaunchRecord:
    """Return the record of the latest launch.

    Raises:
        StateError: There is no record, or it is damaged or of another version.
    """
    path = run_dir / LAUNCH_RECORD_NAME
    try:
        return LaunchRecord.model_validate_json(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="the record of a launch")
        )
    except FileNotFoundError:
        raise StateError(f"{path}: no record of a launch; give the folder of a run") from None
    except IntegrityError as error:
        raise StateError(str(error)) from error
    except OSError as error:
        raise StateError(
            f"{path}: cannot be read: {error.strerror}; give the folder of a run"
        ) from error
    except ValidationError as error:
        raise StateError(
            f"{path}: not a record of this release ({error.errors()[0]['msg']}); launch the run again"
        ) from error


def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
