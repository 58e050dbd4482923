"""Put an extracted snapshot into an environment by renames, so that a kill leaves no half of it.

Everything is staged in ``<target>/.omniload-env`` first, on the same file system:
directories that are new as whole trees, single files where a directory is there
already. Nothing of it is visible. Then a journal is written, and what it lists is
carried out: each path is one rename, what was there goes to a backup. A kill before
the journal leaves a stage that the next restore removes; a kill after it leaves a journal
that the next restore carries out to its end. The record that replaces the journal
lets ``undo`` bring back what was there before.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.entries import Kind, Place, Target, parents_of
from snapshot.env.format.listing import Listing
from snapshot.env.node.cache import Tree, discard
from snapshot.env.target.records import Move, Record, Records
from snapshot.env.target.scan import OWN_FOLDER
from snapshot.env.target.staging import stage, staged

__all__ = ["apply", "carry_out", "plan_moves", "undo"]


def plan_moves(listing: Listing, exists: Callable[[int, str], Kind | None]) -> tuple[Move, ...]:
    """Return the renames that turn an environment into the snapshot; none lies below another.

    Args:
        listing: Of the snapshot.
        exists: What stands at a place of the environment now.

    Returns:
        One move for each path that is new or replaced, whole directories where nothing is
        there yet, and one for each deletion of something that is there.
    """
    moves, whole = list[Move](), set[Place]()
    for folder in listing.folders:
        place, above = (folder.target, folder.path), folder.path.rpartition("/")[0]
        if folder.path and (folder.target, above) in whole:
            whole.add(place)  # what lies in it moves with it as well
        elif folder.path and exists(*place) is not Kind.DIRECTORY:
            moves.append(Move(*place, stages=True))
            whole.add(place)
        else:
            below = f"{folder.path}/" if folder.path else ""
            moves += [Move(folder.target, f"{below}{name}", stages=True) for name in folder.names]
    for number, path in listing.deleted:
        above = path.rpartition("/")[0]
        if (number, above) not in whole and exists(number, path) is not None:
            moves.append(Move(number, path, stages=False))
    return tuple(moves)


def apply(records: Records, tree: Tree, targets: Sequence[Target], record: Record) -> Record:
    """Stage a tree and carry it out.

    Args:
        records: Of the environment, whose lock the caller holds.
        tree: What to put there.
        targets: Where.
        record: All but the moves; its form says whether files are linked or copied.

    Returns:
        The record, as written.

    Raises:
        IntegrityError: A link stands where the snapshot has a directory: it might lead out.
        StateError: A target holds what another environment restored.
    """
    listing = tree.listing
    for target in targets:
        Path(target.path).mkdir(parents=True, exist_ok=True)
        _check_owner(records, target)
        discard(Path(target.path) / OWN_FOLDER)
    moves = plan_moves(listing, lambda number, path: _kind_at(targets[number], path))
    parts = list(staged(listing, moves, targets))
    whole = replace(record, moves=moves)
    try:
        stage(tree, parts, targets, linked=record.form == "link")
        for target in targets:
            owner = Path(target.path) / OWN_FOLDER / "owner"
            owner.write_bytes(os.fsencode(records.folder))
        records.write("journal", whole)
    except OSError:
        # Such as a full disk. Nothing of it is in place, and nobody else would remove it.
        for target in targets:
            discard(Path(target.path) / OWN_FOLDER)
        raise
    carry_out(records, whole)
    new = {(part.folder.target, part.folder.path) for part in parts if part.names is None}
    for folder in listing.folders:
        if (folder.target, folder.path) not in new:
            path = Path(targets[folder.target].path) / folder.path
            path.chmod(folder.mode)
            os.utime(path, ns=(folder.mtime_ns, folder.mtime_ns))
    return whole


def _check_owner(records: Records, target: Target) -> None:
    """Check that no other environment keeps here what it will put back some day."""
    owner = Path(target.path) / OWN_FOLDER / "owner"
    if not owner.exists():
        return
    folder = Path(os.fsdecode(owner.read_bytes()))
    if folder != records.folder and (folder / "record.json").exists():
        raise StateError(
            f"target {target.path!r} holds a snapshot that was restored for {folder.parent}; "
            f"take it off with umount --python {folder.parent}, or leave the target out"
        )


def carry_out(records: Records, journal: Record) -> None:
    """Do what a journal lists, as far as it is not done; then turn it into the record, or remove both."""
    if journal.action == "apply":
        for number, move in enumerate(journal.moves):
            _put(Path(journal.targets[move.target]), number, move)
        for target in journal.targets:
            discard(Path(target) / OWN_FOLDER / "stage")
        records.write("record", journal)
        records.remove("journal")
        return
    for number, move in reversed(list(enumerate(journal.moves))):
        _put_back(Path(journal.targets[move.target]), number, move)
    records.remove("record")
    # The journal goes first: without its trash nothing would say what is put back.
    records.remove("journal")
    for target in journal.targets:
        discard(Path(target) / OWN_FOLDER)


def undo(records: Records, record: Record) -> None:
    """Bring back what an environment held before a restore by links or copies."""
    journal = replace(record, action="undo")
    records.write("journal", journal)
    carry_out(records, journal)


def _kind_at(target: Target, path: str) -> Kind | None:
    """Return what stands at a path; a link on the way is refused, it might lead out."""
    whole = Path(target.path) / path
    if not os.path.lexists(whole):
        return None
    if whole.is_symlink():
        return Kind.LINK
    above = [Path(target.path) / folder for folder in parents_of(path)[:-1]]
    if any(folder.is_symlink() for folder in above):
        raise IntegrityError(f"{whole} lies behind a link in this environment; refused")
    return Kind.DIRECTORY if whole.is_dir() else Kind.FILE


def _put(target: Path, number: int, move: Move) -> None:
    """Carry out one move; again after it is done, it does nothing."""
    own = target / OWN_FOLDER
    staged, backup, path = (
        own / "stage" / str(number),
        own / "backup" / str(number),
        target / move.path,
    )
    if move.stages and not os.path.lexists(staged):
        return
    if os.path.lexists(path):
        if os.path.lexists(backup):
            discard(path)  # came back since the kill
        else:
            _move(path, backup)
    if move.stages:
        _move(staged, path)


def _put_back(target: Path, number: int, move: Move) -> None:
    """Undo one move; again after it is done, it does nothing."""
    own, path = target / OWN_FOLDER, target / move.path
    trash, backup = own / "trash" / str(number), own / "backup" / str(number)
    if not os.path.lexists(trash):
        trash.parent.mkdir(parents=True, exist_ok=True)
        if move.stages and os.path.lexists(path):
            _move(path, trash)
        else:
            trash.touch()  # begun: what stands there from now on is the backup
    if os.path.lexists(backup):
        path.parent.mkdir(parents=True, exist_ok=True)
        _move(backup, path)


def _move(path: Path, target: Path) -> None:
    """Rename; a directory that its owner may not write has to be opened for it (root has not)."""
    try:
        path.rename(target)
    except PermissionError:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink() or not path.is_dir() or mode & stat.S_IWUSR:
            raise
        path.chmod(mode | stat.S_IWUSR)
        path.rename(target)
        target.chmod(mode)
