"""Mounting: a process of its own per mount, ready when this returns, gone when the block ends."""

# ruff: noqa: S603 -- our own interpreter and fusermount3, no shell
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fusefs.config import FilesConfig
from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.units import Bytes, Seconds

__all__ = ["MountConfig", "mount", "start", "umount"]

_CODES = {2: ConfigError, 3: UnavailableError, 4: StateError}


class MountConfig(StrictModel):
    """One mount."""

    store: str
    """URL of the store."""
    mountpoint: str
    """An empty directory."""
    store_options: dict[str, Any] = Field(default_factory=dict)
    """For the store's fsspec client."""
    files: FilesConfig = FilesConfig()
    """Striping, caches and windows."""
    read_only: bool = False
    """Refuse every change."""
    allow_other: bool = False
    """Let other users in, under the permission bits of each file."""
    spool_directory: str | None = None
    """Where randomly written files lie until they are closed."""
    spool_limit: Bytes = 64 << 30
    """Largest randomly written file."""
    kernel_read_ahead: Bytes = 4 << 20
    """Read-ahead of the kernel, set where the daemon may (root); ours works for everyone."""
    max_background: int = Field(default=64, ge=1, le=1024)
    """Requests the kernel keeps in flight, set where the daemon may."""
    give_up_after: Seconds = 30.0
    """How long an outage of the store is waited out before a call fails."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on loopback that answers scrapes of the mount's numbers; none unless given."""


def start(config: MountConfig, *, log_path: str | None = None) -> "subprocess.Popen[bytes]":
    """Start the daemon of a mount and return when the mount is usable.

    Args:
        config: The mount.
        log_path: Where the daemon logs; standard error if not given.

    Raises:
        ConfigError: The mount point is no directory, or pyfuse3 is not installed.
        UnavailableError: The store does not answer.
        StateError: The mount point is a mount already.
    """
    _clear_dead_mount(config.mountpoint)
    ready, told = os.pipe()
    log = open(log_path, "ab") if log_path else None  # noqa: SIM115, PTH123 -- closed below
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fusefs.daemon", str(told)],
            stdin=subprocess.PIPE,
            stderr=log,
            pass_fds=[told],
            start_new_session=True,
        )
    finally:
        os.close(told)
        if log is not None:
            log.close()
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json().encode())
    process.stdin.close()
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read()
    if answer != b"ready":
        code = process.wait()
        message = answer.decode(errors="replace") or f"the daemon ended with {code}; see its log"
        raise _CODES.get(code, StateError)(message)
    return process


@contextlib.contextmanager
def mount(
    store: str, mountpoint: str | Path, settings: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Mount a store for the length of a block.

    Args:
        store: URL of the store.
        mountpoint: An empty directory.
        settings: Further fields of ``MountConfig``.

    Yields:
        The mount point.

    Raises:
        ConfigError, UnavailableError, StateError: As ``start``.
    """
    fields = {"store": store, "mountpoint": str(mountpoint), **(settings or {})}
    process = start(MountConfig.model_validate(fields))
    try:
        yield Path(mountpoint)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Nothing where the daemon unmounted; a killed one leaves a dead mount behind.
        _clear_dead_mount(str(mountpoint))


def umount(mountpoint: str) -> None:
    """Unmount; the daemon ends by itself.

    Raises:
        StateError: It is not a mount, or it is in use.
    """
    tool = shutil.which("fusermount3") or "fusermount3"
    done = subprocess.run([tool, "-u", mountpoint], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StateError(f"{mountpoint!r} stays mounted: {done.stderr.strip()}")


def _clear_dead_mount(mountpoint: str) -> None:
    """Take a mount away whose daemon is gone ("Transport endpoint is not connected")."""
    try:
        os.stat(mountpoint)  # noqa: PTH116 -- the errno is what is asked for
    except FileNotFoundError:
        raise ConfigError(f"mount point {mountpoint!r} is not there; make it first") from None
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        tool = shutil.which("fusermount3") or "fusermount3"
        subprocess.run([tool, "-uz", mountpoint], check=False, capture_output=True)
