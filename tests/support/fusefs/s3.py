"""A server that speaks S3 (moto), and a record of its requests."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from pyarrow import fs as pafs

from tests.support.ports import free_port

STARTED_S = 120
"""Limit for the start of a server on a busy machine."""
_REQUEST = re.compile(r"(HEAD|GET|PUT|POST|DELETE) (/\S*) HTTP/")
_KEY = re.compile(r"^/[^/?]+/?")


class S3Server:
    def __init__(self, port: int, log: Path) -> None:
        self._log = log
        self._seen = 0
        self.address = f"127.0.0.1:{port}"
        self.client = pafs.S3FileSystem(
            access_key="k",
            secret_key="s",
            endpoint_override=f"http://{self.address}",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def asked(self) -> list[str]:
        """Requests since the last call, as ``HEAD key`` or ``LIST prefix``; objects as ``GET object``."""
        text = self._log.read_text()
        lines, self._seen = text[self._seen :], len(text)
        return [_told(method, target) for method, target in _REQUEST.findall(lines)]


def _told(method: str, target: str) -> str:
    if "list-type=2" in target:
        prefix = re.search(r"prefix=([^&]*)", target)
        return f"LIST {prefix[1] if prefix else ''}".replace("%2F", "/").strip()
    key = _KEY.sub("", target.partition("?")[0])
    return f"{method} {'object' if key.startswith('.omnifs/objects/') else key}".strip()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def a_server(command: list[str], port: int, log: Path, *, both: bool = False):
    """Run a server from the moment when it listens at a port of loopback until the block ends.

    Args:
        command: The command that starts it.
        port: The port on which it will listen.
        log: The file that keeps the server's standard error.
        both: Whether the file also keeps the standard output.
    """
    with log.open("wb") as said:
        server = subprocess.Popen(
            command,
            stdout=said if both else subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
    try:
        end, pause = time.monotonic() + STARTED_S, threading.Event()
        while not _listens(port):
            assert server.poll() is None, f"the server ended: {log.read_text()[-1000:]}"
            assert time.monotonic() < end, f"no server within {STARTED_S} s"
            pause.wait(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def s3_server(folder: Path):
    port = free_port()
    log = folder / "requests"
    command = [sys.executable, "-c", f"from moto.server import main; main(['-p', '{port}'])"]
    with a_server(command, port, log):
        yield S3Server(port, log)
