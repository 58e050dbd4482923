"""The snapshotter's disk: the state that must survive any crash, in one SQLite file, and folders.

::

    ROOT/state.sqlite      user_version 1
      snapshots            one row each; labels are JSON
      images               manifest and configuration of every image with a lazy layer, as they came,
                           so that neither registry nor credentials are needed to mount it again

The folders of snapshots are next to it.
"""

import errno
import json
import os
import shutil
import sqlite3
import stat as stat_bits
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple
from pathlib import Path

from omniload.base.errors import StateError
from omniload.base.log import get_logger
from snapshot.engines.containerd.records import Snapshot
from snapshot.oci.image import KeptImage

__all__ = ["VERSION", "SnapshotStore", "take_away", "usage_of"]

VERSION = 1
_SCHEMA = """
CREATE TABLE snapshots (
  number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, parent TEXT NOT NULL, kind TEXT NOT NULL,
  labels TEXT NOT NULL, created_ns INTEGER NOT NULL, updated_ns INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL, inodes INTEGER NOT NULL, image TEXT NOT NULL, layers INTEGER NOT NULL
);
CREATE TABLE images (
  digest TEXT PRIMARY KEY, reference TEXT NOT NULL, media_type TEXT NOT NULL,
  manifest BLOB NOT NULL, config BLOB NOT NULL
);
"""


class SnapshotStore:
    """The file. Not safe in threads: one lock is held around the machine and this."""

    def __init__(
        self, path: Path, connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    ) -> None:
        # With None: otherwise Python begins no transaction for statements that make tables, and ends ours at will.
        self._base = connect(path, isolation_level=None, check_same_thread=False)
        self._base.row_factory = sqlite3.Row
        try:
            self._base.execute("PRAGMA journal_mode=WAL")
            # containerd writes its own names durably, so ours must be as durable.
            self._base.execute("PRAGMA synchronous=FULL")
            self._set_up(path)
        except sqlite3.DatabaseError as error:
            self._base.close()
            raise StateError(
                f"{path} cannot be read: {error}; expected the records of `omniload image serve`: give "
                "its own folder, or a new one and have containerd forget the images of this one"
            ) from error
        except BaseException:
            self._base.close()
            raise

    def _set_up(self, path: Path) -> None:
        version = self._base.execute("PRAGMA user_version").fetchone()[0]
        if version not in {0, VERSION}:
            raise StateError(
                f"{path} has version {version}, this code reads {VERSION}; use the release that "
                "wrote it, or another folder"
            )
        if version == 0:
            with self._transaction():
                for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                    self._base.execute(statement)
                self._base.execute(f"PRAGMA user_version={VERSION}")

    def snapshots(self) -> list[Snapshot]:
        """Return all kept snapshots."""
        rows = self._base.execute("SELECT * FROM snapshots ORDER BY number")
        # Columns have the names of our fields.
        return [Snapshot(**{**row, "labels": json.loads(row["labels"])}) for row in rows]

    def image(self, digest: str) -> KeptImage:
        """Return an image that a lazy layer names.

        Raises:
            StateError: It is not kept.
        """
        found = self._base.execute("SELECT * FROM images WHERE digest = ?", (digest,)).fetchone()
        if found is not None:
            return KeptImage(**found)
        raise StateError(f"image {digest} is not kept; pull it again")

    def keep(self, snapshot: Snapshot, image: KeptImage | None = None) -> None:
        """Write a snapshot, replacing the row with its number, together with the image that a new layer names.

        Raises:
            OSError: The disk is full; nothing was changed.
        """
        row = {**asdict(snapshot), "labels": json.dumps(dict(snapshot.labels), sort_keys=True)}
        names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
        with self._transaction():
            self._base.execute(f"INSERT OR REPLACE INTO snapshots ({names}) VALUES ({marks})", row)  # noqa: S608 -- ours
            if image is not None:
                # Replace it, because the latest caller knows where the image can be read now.
                statement = "INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?)"
                self._base.execute(statement, astuple(image))

    def forget(self, snapshot: Snapshot) -> None:
        """Delete a snapshot, and its image if no other layer names it; raises the errors of ``keep``."""
        with self._transaction():
            self._base.execute("DELETE FROM snapshots WHERE number = ?", (snapshot.number,))
            # Delete in the same transaction as the last reference: a crash in between would leave the image for good.
            unnamed = "DELETE FROM images WHERE digest NOT IN (SELECT image FROM snapshots)"
            self._base.execute(unnamed)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # A change is atomic. Lock at its begin, because a transaction that reads first may be refused later.
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException as error:
            if self._base.in_transaction:  # SQLite itself rolls back after some errors
                self._base.execute("ROLLBACK")
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
            if code & 0xFF == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, "no room on the disk for state.sqlite") from error
            raise


_log = get_logger(__name__)


def usage_of(folder: Path) -> tuple[int, int]:
    """Return the bytes that a folder takes on its disk, and its inodes, each counted once."""
    # Containers write there, so files may be extremely deep, odd or short-lived: files that disappear during the
    # count, or that are deeper than a path can say, are left out.
    seen: dict[tuple[int, int], int] = {}
    with suppress(OSError):
        found = folder.lstat()
        # st_blocks is in units of 512 bytes, whatever the blocks of the file system are.
        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    waiting = [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    seen[found.st_dev, found.st_ino] = found.st_blocks * 512
                    if stat_bits.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
    return sum(seen.values()), len(seen)


def take_away(folder: Path) -> None:
    """Remove a folder with everything in it; remaining files are logged, without an error."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        # rmtree calls itself for each folder in a folder, and a container may have nested thousands.
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], check=False)  # noqa: S603, S607
    if os.path.lexists(folder):
        _log.warning("%s cannot be removed whole; it is tried again at the next cleanup", folder)
