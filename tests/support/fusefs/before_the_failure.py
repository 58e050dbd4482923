"""Work on a local store before its power fails. Run with ``python -m``, the store and the work.

The process ends at once when the work is done: nothing is closed, and nothing becomes durable later.
"""

import os
import sys

from fusefs.stores.local import durability
from fusefs.stores.local.store import LocalStore
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from tests.support.fusefs.builders import tiny_files

BIG = bytes(range(256)) * 64


def fsync(files):
    files.names.make_directory("a")
    files.names.make_directory("a/b")
    body = OpenFile(files, SpoolPlace(), "a/b/f", None)
    body.write(0, b"small")
    body.flush(last=False)
    files.store.sync("a/b/f")
    files.write_file("a/b/big", BIG)


def replace(files):
    for name in ("closed", "renamed", "striped"):
        files.write_file(name, BIG if name == "striped" else b"old")
    files.store.sync()
    files.write_file("closed", b"new")
    files.write_file("beside", b"new")
    files.names.rename("beside", "renamed")
    files.write_file("striped", b"new")


def close(files):
    files.write_file("f", b"small")


WORKS = {"fsync": fsync, "replace": replace, "close": close}


def main(root, work):
    durability.SETTLES_WITHIN_S = 3600.0
    store = LocalStore(root)
    store.delay_syncs()
    with tiny_files(store) as files:
        files.write_file("warm", b"")
        store.sync()
        WORKS[work](files)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
