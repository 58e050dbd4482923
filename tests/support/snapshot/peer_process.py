"""A node as a process: reads all files of an image through its peers, in one order, and reports its traffic.

``python peer_process.py IMAGE CACHE PEERS ADDRESS TOKEN_FILE`` prints ``ready``, and starts at a line on standard
input. It prints one line of JSON when it has all files, and serves until standard input ends. With PATIENT in its
environment it waits for its peers as long as a busy machine takes.
"""

import hashlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from snapshot.image.block.fetcher import FetchSettings
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import block_refs
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.peer import peer_tier
from snapshot.image.peer.node import PeerNode, PeerSettings
from snapshot.oci.image import open_store, resolve

__all__ = ["patient"]

patient = partial(peer_tier.PeerPatience, connect_s=60.0, silent_s=60.0, total_s=240.0)
"""Waits for peers as long as a busy machine takes."""


def main():
    reference, cache, peers, address, token = sys.argv[1:]
    if "PATIENT" in os.environ:
        peer_tier.PeerPatience = patient
    store, name = open_store(reference)
    indexes = index_image(store, resolve(store, name), IndexCache(Path(cache, "indexes")))
    disk = BlockStore(Path(cache, "blocks"), 1 << 30)
    members = tuple(filter(None, peers.split(",")))
    serve = address or None
    settings = PeerSettings(peers=members, serve=serve, peer_token_file=token or None)
    node = PeerNode(settings, RegistryTier(store), disk, indexes)
    loader = BlockLoader(node.tiers, disk, FetchSettings(tiers=tuple(node.tiers)))
    print("ready", flush=True)  # noqa: T201 -- to the test
    sys.stdin.readline()
    began, cpu = time.monotonic(), time.process_time()
    hasher = hashlib.sha256()
    for index in indexes:
        numbers = range(len(index.blocks_B))
        loader.prefetch(index, list(block_refs(index, numbers)))
        for number in numbers:
            hasher.update(loader.block(index, number))
    told = {
        "sha256": hasher.hexdigest(),
        "seconds": time.monotonic() - began,
        "cpu_s": time.process_time() - cpu,
        "bytes": loader.bytes_of,
    }
    print(json.dumps(told), flush=True)  # noqa: T201 -- to the test
    sys.stdin.read()
    print(json.dumps(node.numbers()), flush=True)  # noqa: T201 -- to the test
    node.close()
    loader.close()
    store.close()


if __name__ == "__main__":
    main()
