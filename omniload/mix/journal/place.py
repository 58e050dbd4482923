"""The place of a run's journal: the file in its folder, or a folder of a store that the mix names."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError
from omniload.mix.journal.lines import not_stored
from omniload.mix.journal.room import GIVE_UP_S, WAITS_S
from omniload.mix.journal.storage import JournalStorage, asking
from omniload.mix.run_record import read_run_record

if TYPE_CHECKING:
    from fusefs.stores.local.store import LocalStore

__all__ = ["JOURNAL_NAME", "journal_at", "journal_of", "require_store"]

JOURNAL_NAME = "journal.jsonl"
"""Name of the journal's file in the run's folder."""
_PLAIN = re.compile(r"[\w.=+-]{1,200}")
_BUCKETS = frozenset({"s3", "gs", "gcs"})
_LOOK_S = 10.0
"""Longest time that a check waits for a store."""


def journal_at(run_dir: Path, url: str) -> Path | JournalStorage:
    """Return the place of a run's journal: in its folder, or on a store in ``URL/NAME OF THE FOLDER``.

    Args:
        run_dir: Folder of the run.
        url: ``runtime.journal`` of its mix; may be empty.

    Raises:
        ConfigError: The store cannot be opened, or the name of the folder is not valid on a store.
        UnavailableError: The store does not answer.
    """
    if not url:
        return run_dir / JOURNAL_NAME
    name = run_dir.resolve().name
    if not _PLAIN.fullmatch(name) or not name.strip("."):
        raise ConfigError(
            f"run_dir {str(run_dir)!r} has the name {name!r:.80}, which no store takes for a journal; "
            "rename the folder: letters, digits, '-', '_', '.', '+' and '=' alone"
        )
    # Imported here, because a run whose journal is a file needs no client of a store.
    from fusefs.stores.local.store import LocalStore  # noqa: PLC0415
    from fusefs.stores.retry import RetryingStore  # noqa: PLC0415
    from fusefs.stores.url import (  # noqa: PLC0415
        check_root,
        local_path,
        open_store,
        parts_of,
    )
    from omniload.mix.journal.object_storage import ObjectStorage  # noqa: PLC0415

    parts, above = parts_of(url), local_path(url)
    if above is not None:
        Path(above, name).mkdir(parents=True, exist_ok=True)
        place = Path(above, name).absolute().as_uri()
    else:
        # Runs of one mix file each have a folder on the store: the name of the run keeps their claims apart.
        place = parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()
    store = open_store(place, give_up_after_s=GIVE_UP_S)
    if isinstance(store, LocalStore) and above is not None:
        _require_folder_itself(store, Path(above), name)
    storage = ObjectStorage(
        RetryingStore(store, waits_s=WAITS_S, give_up_after_s=GIVE_UP_S),
        None if above is None else Path(above, name),
    )
    if parts.scheme in _BUCKETS:
        with asking(storage, storage.folder, "opened"):
            check_root(store, begin=True)
    return storage


def require_store(url: str) -> None:
    """Refuse a ``runtime.journal`` that cannot be opened; nothing is written.

    Raises:
        ConfigError: There is no such store or bucket.
        UnavailableError: The store does not answer within some seconds.
    """
    from fusefs.stores.url import (  # noqa: PLC0415 -- as above
        check_root,
        local_path,
        open_store,
        parts_of,
    )

    parts, above = parts_of(url), local_path(url)
    if above is not None:
        _require_folder(Path(above))
        return
    in_bucket = parts.scheme in _BUCKETS
    # Folders in a bucket are created when a run begins, but the bucket is not.
    store = open_store(
        parts._replace(path="").geturl() if in_bucket else url, give_up_after_s=_LOOK_S
    )
    try:
        if in_bucket:
            check_root(store)
    finally:
        store.close()


def _require_folder(folder: Path) -> None:
    """Refuse a folder that can neither be written nor be created."""
    # ``lexists``, because no folder can be created in the place of a dangling link.
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{there} is {'a folder that cannot be written' if there.is_dir() else 'no folder'}; name another place, "
            "or get the rights to it"
        )


def _require_folder_itself(store: "LocalStore", above: Path, name: str) -> None:
    """Refuse a run's folder that is a link: only the URL comes from the user, and anyone may write below it."""
    if store.location != (above.resolve() / name).as_uri():
        store.close()
        raise ConfigError(
            f"{above / name} leads to {store.location}: a link below runtime.journal is not followed; remove it, or "
            "name the folder that it leads to"
        )


def journal_of(run_dir: Path) -> Path | JournalStorage:
    """Return the place of a run's journal, as given to its last start; no folder is created.

    Raises:
        StateError: The folder is not that of a run, its record is damaged, or a journal on a local store is gone.
        ConfigError: As for ``journal_at``, or this release can no longer read the mix.
        UnavailableError: As for ``journal_at``.
    """
    from fusefs.stores.url import local_path  # noqa: PLC0415 -- as above

    url = read_run_record(run_dir).last.mix().runtime.journal
    above = local_path(url) if url else None
    # Creating the folder would hide that a mount is missing there.
    if above is not None and not (place := Path(above, run_dir.resolve().name)).is_dir():
        raise not_stored(place)
    return journal_at(run_dir, url)
