"""The measurement of ``benchmarks.startup.environment`` with one slow link to the index and to the store.

An object store has the wheels, with a page that lists them, and the snapshots. All bytes of either contender pass one
relay, which limits their total rate and counts them, like a service that a thousand nodes use at once.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

from benchmarks.startup.place import Relay
from benchmarks.startup.whole_place import object_store, s3_url

__all__ = ["Far", "download", "far_away"]

BUCKET = "far"
DELAY_S = 0.002


@dataclass(frozen=True, slots=True)
class Far:
    """Places at the far end of the link, and the bytes that came through it."""

    relay: Relay
    near_port: int
    far_port: int

    @property
    def page(self) -> str:
        """URL of the page that lists the wheels."""
        return f"http://127.0.0.1:{self.far_port}/{BUCKET}/wheels.html"

    def store(self, *, near: bool = False) -> str:
        """Return the URL of the snapshots; with ``near`` not through the link, for saving."""
        return s3_url(self.near_port if near else self.far_port, BUCKET)


@contextmanager
def far_away(wheels: Path, bytes_per_s: float) -> Iterator[Far]:
    """Put wheels behind a link of a limited rate; everything is in memory and gone afterwards."""
    with object_store() as port:
        client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1"
        )
        client.create_bucket(Bucket=BUCKET)
        lines = []
        for wheel in sorted(wheels.glob("*.whl")):
            client.put_object(
                Bucket=BUCKET, Key=wheel.name, Body=wheel.read_bytes(), ACL="public-read"
            )
            lines.append(f'<a href="{wheel.name}">{wheel.name}</a><br>')
        client.put_object(
            Bucket=BUCKET,
            Key="wheels.html",
            Body="<!DOCTYPE html><html><body>" + "\n".join(lines) + "</body></html>",
            ContentType="text/html",
            ACL="public-read",
        )
        relay = Relay(port, bytes_per_s, DELAY_S)
        with relay.running() as far_port:
            yield Far(relay, port, far_port)


def download(wheels: Path, requirements: Path) -> None:
    """Fetch the wheels that an installation would use."""
    wheels.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    words += ["--only-binary", ":all:", "-d", str(wheels), "-r", str(requirements)]
    subprocess.run(words, check=True, env=dict(os.environ))
