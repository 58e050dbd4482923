"""Shards of any kind in a store: a folder, its copy under a prefix, and readers that open it there."""

import uuid
from contextlib import contextmanager

import fsspec
from fsspec.core import url_to_fs

from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

__all__ = ["StoredShards", "clients_told", "config_in_units", "shards_in"]


@contextmanager
def clients_told(protocol, **settings):
    """Make every client of a protocol use some settings of fsspec."""
    before, fsspec.config.conf[protocol] = fsspec.config.conf.get(protocol), settings
    fsspec.get_filesystem_class(protocol).clear_instance_cache()
    try:
        yield
    finally:
        del fsspec.config.conf[protocol]
        if before is not None:
            fsspec.config.conf[protocol] = before


class StoredShards:
    """A folder, and its copy under a prefix of its own."""

    def __init__(self, folder, root):
        self.folder, self.url = folder, f"{root}/{uuid.uuid4().hex}"
        # This client is another one than that of a run, because clients cache their listings.
        self.store, self.path = url_to_fs(self.url, skip_instance_cache=True)
        self.put()

    def put(self):
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                self.put_one(file)

    def at(self, file):
        """Return the place of a file of the folder in the store."""
        return f"{self.path}/{file.relative_to(self.folder)}"

    def put_one(self, file):
        if self.url.startswith("hdfs:"):  # HDFS has folders
            self.store.makedirs(self.at(file).rpartition("/")[0], exist_ok=True)
        self.store.put_file(str(file), self.at(file))

    def opened(self, config, tokenizer, cache_dir=None, **changes):
        """Open it as another process would, without anything that clients have cached."""
        type(self.store).clear_instance_cache()
        path = f"{self.url}/{config.path}" if config.path != "." else self.url
        return open_source(
            SourceSpec(
                "web",
                config.model_copy(update={"path": path, **changes}),
                seed=11,
                tokenizer=tokenizer,
                base_dir=self.folder,
                cache_dir=cache_dir,
            )
        )


def config_in_units(kind, folder):
    """Return the mix file's entry, with units of which a shard has two, so that each is requested from the store."""
    config = kind.config(folder)
    return config.model_copy(update={"unit": 4_000}) if hasattr(config, "unit") else config


def shards_in(folder, kind):
    """Return a file of each shard."""
    return getattr(kind, "shards", lambda each: sorted(each.glob(f"part-*{kind.suffix}")))(folder)
