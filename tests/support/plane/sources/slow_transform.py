"""A transform that waits for each document, like one that uses a service, and leaves it unchanged."""

import os
from pathlib import Path

__all__ = ["install"]

_TRANSFORM = """\
import time


def slowly(tokens, *, milliseconds=0.0):
    time.sleep(len(tokens) * milliseconds / 1e3)
    return tokens
"""


def install(folder: Path, monkeypatch) -> None:
    """Register the transform ``slowly`` in this process and in the processes that it starts."""
    (folder / "lab_of_transforms.py").write_text(_TRANSFORM)
    about = folder / "slow-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[omniload.transforms]\nslowly = lab_of_transforms:slowly\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(folder)
