"""Small disks that fill up."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["a_tmpfs"]


@contextmanager
def a_tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory over a folder; skip the test if that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"A FULL DISK IS NOT TESTED: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", os.fspath(folder)], check=True)
