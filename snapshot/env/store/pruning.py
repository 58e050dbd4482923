"""Remove from a store what no snapshot names, though others save and restore meanwhile.

A store has no locks, and a saver names a pack only when all of its snapshot is written. So a
pack goes in two steps with a grace between them::

    omniload-env/1/condemned/<pack>    empty; written once nothing has named the pack for a grace

A saver does not rely on a condemned pack, and looks once more before it publishes. When the
mark has stood for a grace and still no manifest names the pack, the pack is removed, then
the mark. A run that is killed between any two of these steps is finished by the next one.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from fusefs.stores.protocol import Entry
from omniload.base.errors import IntegrityError, StateError
from snapshot.env.store.repository import CONDEMNED, MANIFESTS, PACKS, Repository

__all__ = ["Pruned", "Verdict", "judged", "prune_store"]


class Verdict(NamedTuple):
    """What is to be done with the packs of a store; each sorted."""

    removed: tuple[str, ...]
    """Condemned a grace ago and named by nothing since."""
    condemned: tuple[str, ...]
    """Named by nothing, and not written just now."""
    pardoned: tuple[str, ...]
    """Marks of packs that are named, or are gone."""


class Pruned(NamedTuple):
    """What a run did, or would do."""

    snapshots: tuple[str, ...]
    verdict: Verdict
    freed_bytes: int


def judged(
    packs: Mapping[str, int],
    marks: Mapping[str, int],
    named: AbstractSet[str],
    *,
    now_ns: int,
    grace_ns: int,
) -> Verdict:
    """Decide about every pack.

    Args:
        packs: When each was written, nanoseconds since 1970.
        marks: When each condemned one was condemned.
        named: Packs that a manifest names.
        now_ns: The time.
        grace_ns: How long a pack or a mark must have stood.

    Returns:
        The verdict. No pack that is named is removed or condemned, and none is removed that
        was not condemned a grace before.
    """
    latest = now_ns - grace_ns
    orphans = packs.keys() - named
    return Verdict(
        tuple(sorted(p for p in orphans & marks.keys() if marks[p] <= latest)),
        tuple(sorted(p for p in orphans - marks.keys() if packs[p] <= latest)),
        tuple(sorted(p for p in marks if p in named or p not in packs)),
    )


def prune_store(
    repository: Repository,
    keys: Iterable[str] = (),
    *,
    grace_s: float,
    now_ns: int,
    act: bool = True,
) -> Pruned:
    """Remove snapshots, condemn packs that nothing names, remove those condemned a grace ago.

    Args:
        repository: The snapshots of a store.
        keys: Snapshots that shall go, whole keys.
        grace_s: Longer than any save takes to publish, and than clocks differ.
        now_ns: The time.
        act: Whether anything is done; else it is only listed.

    Raises:
        StateError: A manifest cannot be read: what it names is not known, so no pack goes.
    """
    store, gone = repository.store, tuple(sorted(keys))
    if act:
        for key in gone:
            _remove(store.remove, f"{MANIFESTS}/{key}")
    packs, marks = _listed(repository, PACKS), _listed(repository, CONDEMNED)
    written = {name: entry.mtime_ns for name, entry in packs.items()}
    named: set[str] = set()
    seen: set[str] = set() if act else set(gone)
    # Twice: what was published while the first look was taken is named as well.
    for _ in range(2):
        fresh = set(repository.all_keys()) - seen
        seen |= fresh
        named |= _named_by(repository, fresh)
    verdict = judged(
        written,
        {name: entry.mtime_ns for name, entry in marks.items()},
        named,
        now_ns=now_ns,
        grace_ns=int(grace_s * 1e9),
    )
    if act:
        for pack in verdict.removed:
            _remove(store.remove, f"{PACKS}/{pack}")
        for pack in (*verdict.removed, *verdict.pardoned):
            _remove(store.remove, f"{CONDEMNED}/{pack}")
        for pack in verdict.condemned:
            store.publish(f"{CONDEMNED}/{pack}", b"")
    return Pruned(gone, verdict, sum(packs[pack].size_bytes for pack in verdict.removed))


def _listed(repository: Repository, folder: str) -> dict[str, Entry]:
    try:
        entries = repository.store.listing(folder)
    except FileNotFoundError:
        return {}
    return {entry.name: entry for entry in entries if not entry.is_directory}


def _named_by(repository: Repository, keys: Iterable[str], threads: int = 8) -> set[str]:
    def packs_of(key: str) -> tuple[str, ...]:
        try:
            manifest = repository.manifest(key)
        except (IntegrityError, StateError) as error:
            raise StateError(
                f"snapshot {key} cannot be read, so nobody knows which packs it names and none is "
                f"removed: {error}; save it again, or remove it: omniload env prune {key}"
            ) from error
        return manifest.head.packs if manifest else ()  # gone since it was listed

    with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
        return {pack for packs in pool.map(packs_of, keys) for pack in packs}


def _remove(remove: Callable[[str], None], path: str) -> None:
    with suppress(FileNotFoundError):  # another run was faster
        remove(path)
