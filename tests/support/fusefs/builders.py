"""Small file systems for tests: tiny units, so that few bytes make many objects."""

import contextlib
from dataclasses import replace

from fusefs.config import FilesConfig, Striping
from fusefs.format.layout import StripeLayout
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles

MiB = 1 << 20


class TinyFiles(StripedFiles):
    """Striped files whose unit is far below the smallest one that a user may set."""

    def __init__(self, store, config, layout):
        super().__init__(store, config)
        self.writers = replace(
            self.writers, layout_of=lambda _: layout, plain_limit=layout.unit_bytes
        )


@contextlib.contextmanager
def tiny_files(store=None, *, unit=8, count=3, **changes):
    settings = {"read_streams": 3, "write_streams": 3, "read_ahead": 64, "longest_read": 4096}
    files = TinyFiles(
        store if store is not None else MemoryStore(),
        FilesConfig(**settings | changes),
        StripeLayout(unit, count),
    )
    try:
        yield files
    finally:
        files.close()


@contextlib.contextmanager
def some_files(store=None, **changes):
    settings = {"striping": Striping(unit=4096, count=3), "plain_limit": 4096}
    files = StripedFiles(
        store if store is not None else MemoryStore(), FilesConfig(**settings | changes)
    )
    try:
        yield files
    finally:
        files.close()


def contents(files, path):
    with files.open(path) as file:
        return bytes(file.reader.read(0, file.reader.size_bytes))


def object_paths(store):
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in store.listing(".omnifs/objects"):
            below = f".omnifs/objects/{folder.name}"
            found += [f"{below}/{entry.name}" for entry in store.listing(below)]
    return sorted(found)
