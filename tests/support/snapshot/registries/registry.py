"""A real registry, Debian's ``docker-registry``, on a free port of this machine."""

import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["needs", "running_registry"]

_CONFIG = """
version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http:
  addr: 127.0.0.1:0
"""


def needs(*programs):
    """Skip the test if a program is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"NOT TESTED: {program} is not installed; run scripts/system_packages.sh")


@contextmanager
def running_registry(folder: Path):
    """Run a registry that keeps its files in ``folder``; yield ``127.0.0.1:PORT``."""
    needs("docker-registry")
    config = folder / "registry.yml"
    config.write_text(_CONFIG.format(root=folder / "registry"))
    process = subprocess.Popen(
        ["docker-registry", "serve", str(config)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # The registry makes a buffer of 4 MB for each range that is read. With rare garbage collection, ranges take
        # half of the time.
        env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none", "GOGC": "800"},
    )
    reader = None
    try:
        # The registry prints its address once it listens.
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (127\.0\.0\.1:\d+)", line):
                break
        else:
            raise RuntimeError("docker-registry ended: " + "".join(lines))
        # If nothing reads the pipe, the registry stops when the pipe is full.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield found[1]
    finally:
        process.kill()
        process.wait()
        if reader is not None:
            reader.join()
        process.stderr.close()
