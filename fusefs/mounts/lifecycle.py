"""Mounting: one process for each mount, ready when this returns, gone when the block ends."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.process.launch import clear_dead_mount, start_daemon
from fusefs.bridge.process.unmount_notice import UnmountClient, umount
from fusefs.config import FilesConfig
from omniload.base.config import checked
from omniload.base.settings.quantities import Bytes, Seconds

__all__ = ["WATCHED", "MountConfig", "is_watched", "mount", "start", "umount"]

WATCHED = "watched"
"""Word to a daemon: another process mounts again when the daemon dies."""


class MountConfig(BridgeOptions):
    """One mount of a store."""

    store: str
    """URL of the store."""
    mountpoint: str
    """An empty directory."""
    store_options: dict[str, Any] = Field(default_factory=dict)
    """For the store's fsspec client."""
    files: FilesConfig = FilesConfig()
    """Striping, caches and windows."""
    spool_directory: str | None = None
    """Directory of randomly written files until they are closed."""
    spool_limit: Bytes = 64 << 30
    """Largest randomly written file."""
    give_up_after: Seconds = 30.0
    """How long an outage of the store is waited out before a call fails."""
    durable_at: Literal["fsync", "close"] = "fsync"
    """When a small file in a local store is durable: at its fsync, and two seconds after its close at the
    latest, as on a local disk; or when it is closed. Larger ones, and other stores, are at the close."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on loopback that answers scrapes of the mount's numbers; none unless given."""


def start(
    config: MountConfig,
    *,
    log_path: str | None = None,
    watched: bool = False,
    words: Sequence[str] = (),
) -> "subprocess.Popen[bytes]":
    """Start the daemon of a mount and return when the mount is usable.

    Args:
        config: The mount.
        log_path: Log file of the daemon; standard error if not given.
        watched: Start a process that mounts again whenever the daemon dies, and return that process.
        words: Arguments for the daemon.

    Raises:
        ConfigError: The mount point is no directory, or pyfuse3 is not installed.
        UnavailableError: The store does not answer.
        StateError: The mount point is a mount already.
    """
    # Pass it on standard input, not as arguments, because a URL may contain secrets, which ps shows.
    settings = config.model_dump_json().encode()
    module = "fusefs.mounts.supervisor" if watched else "fusefs.mounts.daemon"
    return start_daemon(module, settings, config.mountpoint, log_path=log_path, words=words)


def is_watched(mountpoint: str) -> bool:
    """Return whether another process mounts again when the daemon of a mount dies."""
    waiter = UnmountClient.of(mountpoint)
    if waiter is None:
        return False
    waiter.close()
    return bool(waiter.about.get(WATCHED))


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
    process = start(checked(fields, MountConfig, name="mount settings"))
    try:
        yield Path(mountpoint)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Does nothing if the daemon unmounted; a killed daemon leaves a dead mount behind.
        clear_dead_mount(str(mountpoint))
