"""A server that speaks Google's Cloud Storage (gcp-storage-emulator), and the settings of its client."""

import contextlib
import os
import sys
from pathlib import Path

from tests.support.fusefs.s3 import a_server
from tests.support.ports import free_port

BUCKET = "corpora"


@contextlib.contextmanager
def gcs_server(folder: Path):
    """Run the emulator, with one bucket; yield its URL."""
    # When gcsfs is loaded, it otherwise asks Google's own API for a minute, with TLS, whether a bucket has folders.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    port = free_port()
    command = [
        *(sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1"),
        *(f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}"),
    ]
    with a_server(command, port, folder / "said", both=True):
        yield f"http://127.0.0.1:{port}"
