"""A mount whose health is checked after every action on it."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import orjson

from fusefs.mounts.lifecycle import MountConfig, start
from fusefs.stores.url import open_store
from fusefs.tools.fsck import verify
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.model import fast_directory

NO_MOUNT = not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None
WHY_NO_MOUNT = "MOUNT NOT TESTED: no /dev/fuse or fusermount3"


def without(*programs):
    """Return arguments of ``skipif`` for a test that needs programs of the system."""
    missing = [name for name in programs if shutil.which(name) is None]
    reason = f"NOT TESTED: {missing} not installed; run scripts/system_packages.sh"
    return {"condition": bool(missing), "reason": reason}


class ProvenMount:
    """A mount, its store and its log."""

    def __init__(self, base, store=None, **settings):
        self.root, self.log = base / "mnt", base / "log"
        self.store = store or str(base / "store")
        for folder in (base / "store", self.root):
            folder.mkdir(parents=True, exist_ok=True)
        self.config = MountConfig(store=self.store, mountpoint=str(self.root), **settings)
        self.process = start(self.config, log_path=str(self.log))

    def folder(self, name):
        made = self.root / name
        made.mkdir()
        return made

    def run(self, *command, cwd=None, timeout=60, **named):
        """Run a program to its end; if it fails, the message is its output."""
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **named,
        )
        said = f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        return done.stdout + done.stderr

    def check(self):
        """Check that the mount answers, its daemon met no defect, and the store has the expected objects."""
        assert self.process.poll() is None, self.log.read_text()
        numbers = orjson.loads((self.root / ".omnifs/stats.json").read_bytes())
        assert numbers["version"] == 1
        assert "defect" not in self.log.read_text()
        self._verify(lambda report: report.harmful == [])

    def end(self):
        """Unmount; nothing may be left over in the store."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0
        assert "defect" not in self.log.read_text()
        assert not os.path.ismount(self.root)
        self._verify(lambda report: report.faults == [])

    def remount(self):
        """Unmount and mount again: everything that is there afterwards comes from the store."""
        self.end()
        self.process = start(self.config, log_path=str(self.log))

    def _verify(self, is_fine):
        files = StripedFiles(open_store(self.store, None))
        try:
            report = verify(files, read_data=True, grace_s=0)
        finally:
            files.close()
        assert is_fine(report), report.faults[:5]


@contextlib.contextmanager
def proven_mount(**settings):
    base = fast_directory("fusefs-proof-")
    mounted = ProvenMount(base, **settings)
    try:
        yield mounted
        mounted.end()
    finally:
        if mounted.process.poll() is None:
            mounted.process.kill()
            mounted.process.wait()
        subprocess.run(["fusermount3", "-uzq", mounted.root], check=False, capture_output=True)
        shutil.rmtree(Path(base), ignore_errors=True)
