"""Podman with separate storage, and a layer store of ours that it can use."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fusefs.bridge.process.launch import umount
from omniload.base.errors import StateError
from snapshot.engines.podman.mount import layer_store_settings, mount
from tests.docs.snippets import ROOT, blocks_of
from tests.support.programs import finished

__all__ = ["MountedStore", "Podman"]

RUN = ("run", "--rm", "--network=host", "--runtime=runc")
RUN += ("--ulimit=nofile=20000:20000", "--ulimit=nproc=30000:30000")


def documented_storage():
    """Return the storage.conf that the documentation shows."""
    blocks = blocks_of(ROOT / "docs/how-to/start-faster.md")
    (text,) = (b.text for b in blocks if "additionallayerstores" in b.text)
    return text


class Podman:
    """An engine whose images and containers live in a folder of its own, and are removed by ``close``.

    The folder's name is short, because with a longer name every run waits 20 s for a socket whose path is too long.

    Args:
        store: Mount point of a layer store; by default none.
    """

    def __init__(self, store=None):
        self._folder = folder = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))
        text = documented_storage()
        for known, own in (
            ("/run/containers/storage", folder / "run"),
            ("/var/lib/containers/storage", folder / "root"),
            ("/var/lib/omniload/layers", store or "/none"),
        ):
            assert text.count(known) == 1
            text = text.replace(known, str(own))
        conf = folder / "storage.conf"
        conf.write_text(text if store else text.partition("[storage.options]")[0])
        self._env = {**os.environ, "CONTAINERS_STORAGE_CONF": str(conf), "TMPDIR": str(folder)}

    def __call__(self, *words, check=True):
        """Run one of its commands; return the standard output."""
        line = ["podman", *map(str, words)]
        done = finished(line, limit_s=240, env=self._env)
        assert not check or done.returncode == 0, (words, done.returncode, done.stderr)
        self.errors = done.stderr
        return done.stdout

    def pull(self, image):
        return self("pull", "-q", "--tls-verify=false", image).strip()

    def run(self, image, *words, check=True):
        return self(*RUN, "--pull=never", image, *words, check=check)

    def close(self):
        """Remove its images and its mounts."""
        self("rm", "-af", check=False)
        self("rmi", "-af", check=False)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        points = [
            line.split()[1] for line in mounts if line.split()[1].startswith(f"{self._folder}/")
        ]
        for point in reversed(points):
            subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


class MountedStore:
    """A layer store that is mounted during a ``with``; its log records its work."""

    def __init__(self, folder, cache, *options):
        self.root, self.log = folder / "store", folder / "store.log"
        self.root.mkdir(parents=True, exist_ok=True)
        self._settings = layer_store_settings(str(self.root), (f"cache={cache}", *options))

    def __enter__(self):
        self._daemon = mount(self._settings, log_path=str(self.log))
        return self

    def __exit__(self, *_):
        try:
            umount(str(self.root))
        except StateError:
            subprocess.run(["umount", "-l", str(self.root)], check=False)
        try:
            self._daemon.wait(5)
        except subprocess.TimeoutExpired:  # another mount namespace still has it
            self._daemon.terminate()
            self._daemon.wait(60)

    def killed_and_mounted_anew(self):
        """Kill its process as the kernel does without free memory, and mount it again in the same place."""
        self._daemon.kill()
        self._daemon.wait(60)
        self.__enter__()

    def logged(self):
        return self.log.read_text()
