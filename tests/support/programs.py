"""Programs that a test runs to their end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["finished"]


def finished(
    words: Sequence[str | Path], *, limit_s: float, **more: Any
) -> "subprocess.CompletedProcess[str]":
    """Return a program that has ended, with any exit code, with both outputs as text; after its limit it is killed."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=limit_s, check=False, **more
    )
