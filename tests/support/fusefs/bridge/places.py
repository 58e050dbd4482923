"""Places where tests of daemons mount: a store and a mount point on a fast disk, removed at the end."""

import contextlib
import shutil
import subprocess

from fusefs.mounts.lifecycle import MountConfig
from tests.support.fusefs.model import TINY, fast_directory


@contextlib.contextmanager
def a_place(name, *more):
    """Make a folder with ``store`` and ``mount``, and further folders named in ``more``."""
    base = fast_directory(f"fusefs-{name}-")
    for each in ("store", "mount", *more):
        (base / each).mkdir()
    try:
        yield base
    finally:
        subprocess.run(["fusermount3", "-uzq", base / "mount"], check=False)
        shutil.rmtree(base)


def config_of(place, **settings):
    """Return the mount's configuration for such a place, with small files unless ``settings`` say otherwise."""
    return MountConfig(
        store=str(place / "store"),
        mountpoint=str(place / "mount"),
        **{"files": TINY, **settings},
    )
