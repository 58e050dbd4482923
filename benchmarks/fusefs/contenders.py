"""The contenders: the ways to mount one store, and the S3 server that some of them read."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusefs.mounts.lifecycle import MountConfig, start

__all__ = [
    "CACHE",
    "KEYS",
    "NATIVE",
    "OURS",
    "PLAIN",
    "TASKS",
    "Contender",
    "mounted",
    "ours",
    "program",
    "rclones",
    "s3_server",
]

TASKS = ("sequential read", "4 readers, scattered 4 MiB", "write")
OURS = "fusefs"
PLAIN = "fusefs, the peers' plain file"
NATIVE = "fusefs, hdfs+native"
CACHE = "rclone-cache"
"""Folder next to the mount point that is emptied before each mount: a contender caches its reads there."""
KEYS = {
    "AWS_ACCESS_KEY_ID": "S3RVER",
    "AWS_SECRET_ACCESS_KEY": "S3RVER",
    # s3rver stores the trailers of newer clients as content.
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to mount a store."""

    name: str
    mount: Callable[[Path], "subprocess.Popen[bytes]"]
    """Function that starts the mount at a mount point; its process ends when it is unmounted."""
    file: str
    """The file that it reads, written by the contender that will read it."""
    tasks: tuple[str, ...] = TASKS


@contextmanager
def mounted(contender: Contender, root: Path) -> Iterator[int]:
    """Make a fresh mount, without caches of an earlier one in it or in the kernel; yield its process."""
    process = contender.mount(root)
    try:
        end, pause = time.monotonic() + 30, threading.Event()
        while not os.path.ismount(root):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{contender.name} did not mount: {process.poll()}")
            pause.wait(0.05)
        yield process.pid
    finally:
        subprocess.run(["fusermount3", "-uz", root], check=False)
        process.wait(timeout=60)


def ours(store: str, log: Path) -> Callable[[Path], "subprocess.Popen[bytes]"]:
    """Return how we mount: with a user's default settings."""

    def mount(root: Path) -> "subprocess.Popen[bytes]":
        config = MountConfig(store=store, mountpoint=str(root))
        return start(config, log_path=str(log))

    return mount


def program(
    *command: str | Path, environment: Mapping[str, str] | None = None, log: Path
) -> Callable[[Path], "subprocess.Popen[bytes]"]:
    """Return how a peer is mounted: in the foreground, with the mount point in the place of ``@``."""

    def mount(root: Path) -> "subprocess.Popen[bytes]":
        with log.open("ab") as out:
            return subprocess.Popen(
                [str(root) if part == "@" else str(part) for part in command],
                stdout=out,
                stderr=out,
                env={**_without_proxies(), **(environment or {})},
            )

    return mount


def _without_proxies() -> dict[str, str]:
    # rclone ends if a bundle of certificates is configured and the server speaks plain HTTP.
    return {
        k: v for k, v in os.environ.items() if k != "AWS_CA_BUNDLE" and "PROXY" not in k.upper()
    }


def rclones(remote: str, base: Path, log: Path) -> list[Contender]:
    """Return rclone with its defaults, and with its disk cache in memory, which reads ahead much further."""
    common = ["rclone", "mount", remote, "@", "--config", "/dev/null"]
    cached = [
        "--vfs-cache-mode", "full", "--cache-dir", base / CACHE,
        "--buffer-size", "32M", "--vfs-read-ahead", "64M",
    ]  # fmt: skip
    return [
        Contender("rclone", program(*common, log=log), "plain"),
        # Its close returns before the upload starts, so its writes cannot be compared.
        Contender("rclone, cache on", program(*common, *cached, log=log), "plain", TASKS[:2]),
    ]


@contextmanager
def s3_server(base: Path, s3rver: str) -> Iterator[int]:
    """Run an S3 server that keeps its files in ``base``; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [s3rver, "-d", base / "s3", "-a", "127.0.0.1", "-p", str(port), "-s"]
    process = subprocess.Popen(
        [*command, "--configure-bucket", "bench"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end, pause = time.monotonic() + 30, threading.Event()
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the S3 server did not start: {process.poll()}")
            pause.wait(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
