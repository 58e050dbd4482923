"""A store that is slow for the processes that a file names, and quick for all others."""

import os
from pathlib import Path

__all__ = ["SLOW_S", "install", "make_slow"]

SLOW_S = 0.5
"""Time of a request by a process for which the store is slow."""
_FOLDER = "OMNILOAD_TEST_SLOWED"
"""Environment variable with the folder of the files that name such processes."""
_STORE = f'''\
import os
import time
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class SlowedStore(LocalFileSystem):
    protocol = "slowed"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("slowed://"))

    def _open(self, path, mode="rb", block_size=None, **options):
        return AbstractBufferedFile(self, path, mode, cache_type="none")

    def cat_file(self, path, start=None, end=None, **options):
        if Path(os.environ["{_FOLDER}"], str(os.getpid())).exists():
            time.sleep({SLOW_S})
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))
'''


def install(folder: Path, monkeypatch) -> None:
    """Register the store ``slowed`` in this process and in the processes that it starts."""
    (folder / "lab_of_stores.py").write_text(_STORE)
    about = folder / "lab-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nslowed = lab_of_stores:SlowedStore\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(_FOLDER, str(folder / "slow"))
    (folder / "slow").mkdir()
    monkeypatch.syspath_prepend(folder)
    # fsspec looks for installed stores when it is imported, which happens here.
    import fsspec  # noqa: PLC0415

    fsspec.register_implementation("slowed", "lab_of_stores.SlowedStore", clobber=True)


def make_slow(pid: int) -> None:
    """Make the store slow for a process."""
    (Path(os.environ[_FOLDER]) / str(pid)).touch()
