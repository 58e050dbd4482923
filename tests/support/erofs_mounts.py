"""Images mounted by the kernel's EROFS, in processes of their own, for tests as root."""

import gzip
import os
import select
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from snapshot.image.erofs_probe import why_no_erofs, why_no_filling
from snapshot.image.mounting import mount
from snapshot.image.options import mount_settings
from snapshot.image.precontent_kernel import unmount
from snapshot.oci.opening import open_store
from tests.support.image_builders import a_layer, a_tar, an_image

__all__ = ["LazyMount", "drop_caches", "needs_erofs", "pushed", "until", "until_gone"]

WAITS_S = 30


def needs_erofs(folder, *, filling=True):
    """Skip, and say why, where the kernel cannot; FUSE shows images there, which is tested everywhere."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: mounts by the kernel itself need root")
    why = why_no_filling(folder) if filling else why_no_erofs(folder)
    if why is not None:
        pytest.skip(f"THIS KERNEL CANNOT, so EROFS is not used here: {why}")


def until(holds, what):
    """Return what ``holds`` says once it says something; the kernel tells nobody of what is waited for here."""
    end_s = time.monotonic() + WAITS_S
    while not (found := holds()):
        assert time.monotonic() < end_s, what
        select.select([], [], [], 0.01)
    return found


def until_gone(process):
    """Wait until a process that is no child of ours has ended."""
    psutil.wait_procs([process], timeout=WAITS_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def drop_caches():
    """Make the kernel read files again that it has read before."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def pushed(folder, *layers):
    """Push an image of layers of members to a new layout; return its reference, and the layout."""
    store, tag = open_store(f"oci:{folder}/layout:v", create=True)
    try:
        tars = [a_tar(*members) for members in layers]
        an_image(
            store, [(a_layer(store, gzip.compress(tar, mtime=0), "gzip"), tar) for tar in tars], tag
        )
    finally:
        store.close()
    return f"oci:{folder}/layout:v"


class LazyMount:
    """An image mounted for the time of a ``with``; unmounted at its end, whatever is left of it."""

    def __init__(self, reference, folder, **options):
        self.folder, self.root, self.log = folder, folder / "mnt", folder / "log"
        self.root.mkdir(exist_ok=True)
        told = {"cache": folder / "cache", "through": "erofs"} | options
        if told["through"] == "auto":
            told = {"allow_other": True} | told  # otherwise it is always FUSE
        words = tuple(f"{key}={value}" for key, value in told.items())
        self.settings = mount_settings(reference, str(self.root), words)

    def __enter__(self):
        self.process = mount(self.settings, log_path=str(self.log))
        return self

    def __exit__(self, *_):
        if os.path.ismount(self.root):
            unmount(str(self.root), lazily=False)
        self.process.wait(WAITS_S)

    @property
    def kind(self):
        """The file system that the kernel shows, and how."""
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if line.split(" ")[1] == str(self.root):
                return line.split(" ")[2]
        return None

    def guard(self, but=None):
        """The process that would deny, once there is one, and another than ``but``."""
        own = psutil.Process(self.process.pid)
        return until(
            lambda: next((p for p in own.children() if p != but and _guards(p)), None),
            "no guard",
        )

    def blobs(self, kind="layers"):
        return sorted((self.folder / "cache/erofs/v2" / kind).iterdir())


def _guards(process):
    # One that was killed stays a zombie for a moment, which has no command line.
    with suppress(psutil.Error):
        return "precontent_guard" in " ".join(process.cmdline())
    return False
