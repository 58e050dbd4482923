"""Placing an extracted snapshot into an environment by renames, so that a kill leaves no half of it.

Everything is staged in ``<target>/.omniload-env`` first, on the same file system:
new directories as whole trees, single files for directories that
already exist. None of it is visible. Then a journal is written, and its moves are
carried out: each path is one rename, and the former entry goes to a backup. A kill before
the journal leaves a stage, which the next restore removes. A kill after it leaves a journal,
which the next restore completes. The record that replaces the journal
lets ``undo`` restore the former entries.
"""

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.entries import OWN_FOLDER, Kind, Place, Target, parents_of
from snapshot.env.node.tree import Folder, Listing, Tree, discard
from snapshot.env.target.records import Move, Record, Records

__all__ = ["Staged", "apply", "carry_out", "plan_moves", "staged", "undo"]

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def plan_moves(listing: Listing, exists: Callable[[int, str], Kind | None]) -> tuple[Move, ...]:
    """Return the renames, none below another, that turn the environment described by ``exists`` into the snapshot.

    Returns:
        One move for each path that is new or replaced, with whole directories if nothing is
        there yet, and one for each deletion of an existing entry.
    """
    moves, whole = list[Move](), set[Place]()
    for folder in listing.folders:
        place = number, path = folder.place
        if path and (number, path.rpartition("/")[0]) in whole:
            whole.add(place)  # its content moves with it as well
        elif path and exists(*place) is not Kind.DIRECTORY:
            moves.append(Move(*place, stages=True))
            whole.add(place)
        else:
            moves += [Move(number, folder.path_of(name), stages=True) for name in folder.names]
    for number, path in listing.deleted:
        above = path.rpartition("/")[0]
        if (number, above) not in whole and exists(number, path) is not None:
            moves.append(Move(number, path, stages=False))
    return tuple(moves)


def apply(records: Records, tree: Tree, targets: Sequence[Target], record: Record) -> None:
    """Stage a tree and carry out its moves; the caller holds the environment's lock.

    ``record`` is complete except for the moves; its form says whether files are linked or copied.

    Raises:
        IntegrityError: The snapshot has a directory where a link is, which might lead out.
        StateError: A target holds files that another environment restored.
    """
    listing = tree.listing
    for target in targets:
        Path(target.path).mkdir(parents=True, exist_ok=True)
        _check_owner(records, target)
        # The stage of a restore that was killed before its journal; none of it is in place.
        discard(Path(target.path) / OWN_FOLDER)
    moves = plan_moves(listing, lambda number, path: _kind_at(targets[number], path))
    parts = list(staged(listing, moves, targets))
    whole = replace(record, moves=moves)
    try:
        _stage(tree, parts, targets, linked=record.form == "link")
        for target in targets:
            owner = Path(target.path) / OWN_FOLDER / "owner"
            owner.write_bytes(os.fsencode(records.folder))
        records.write("journal", whole)
    except OSError:
        # For example, the disk is full. Nothing is in place yet, and nobody else would remove the stage.
        for target in targets:
            discard(Path(target.path) / OWN_FOLDER)
        raise
    carry_out(records, whole)
    # Moves into an existing folder changed its time, so the times are set when everything is in place.
    new = {part.folder.place for part in parts if part.names is None}
    for folder in listing.folders:
        if folder.place not in new:
            own = folder.own
            path = Path(targets[own.target].path) / own.path
            path.chmod(own.mode)
            os.utime(path, ns=(own.mtime_ns, own.mtime_ns))


def _check_owner(records: Records, target: Target) -> None:
    """Check that no other environment keeps entries here that it will put back some day."""
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
    """Carry out the moves of a journal that are not done yet; then turn it into the record, or remove both."""
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
    # Remove the journal first, because without the trash nothing says which moves were put back.
    records.remove("journal")
    for target in journal.targets:
        discard(Path(target) / OWN_FOLDER)


def undo(records: Records, record: Record) -> None:
    """Restore the former content of an environment after a restore by links or copies."""
    journal = replace(record, action="undo")
    records.write("journal", journal)
    carry_out(records, journal)


def _kind_at(target: Target, path: str) -> Kind | None:
    """Return the kind of the entry at a path; a link on the way is refused, because it might lead out."""
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
    """Carry out one move; a repeated call does nothing."""
    own = target / OWN_FOLDER
    staged, backup, path = (
        own / "stage" / str(number),
        own / "backup" / str(number),
        target / move.path,
    )
    # The move was done before a kill, and the staged entry is in place.
    if move.stages and not os.path.lexists(staged):
        return
    if os.path.lexists(path):
        if os.path.lexists(backup):
            discard(path)  # the entry came back since the kill
        else:
            _move(path, backup)
    if move.stages:
        _move(staged, path)


def _put_back(target: Path, number: int, move: Move) -> None:
    """Undo one move; a repeated call does nothing."""
    own, path = target / OWN_FOLDER, target / move.path
    trash, backup = own / "trash" / str(number), own / "backup" / str(number)
    if not os.path.lexists(trash):
        trash.parent.mkdir(parents=True, exist_ok=True)
        if move.stages and os.path.lexists(path):
            _move(path, trash)
        else:
            trash.touch()  # the undo has begun: from now on, the entry at the path is the backup
    if os.path.lexists(backup):
        path.parent.mkdir(parents=True, exist_ok=True)
        _move(backup, path)


def _move(path: Path, target: Path) -> None:
    """Rename; a directory without write permission for its owner is made writable for it (not needed by root)."""
    try:
        path.rename(target)
    except PermissionError:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink() or not path.is_dir() or mode & stat.S_IWUSR:
            raise
        path.chmod(mode | stat.S_IWUSR)
        path.rename(target)
        target.chmod(mode)


class Staged(NamedTuple):
    """One folder of a tree, and the place where its files are staged."""

    folder: Folder
    into: str
    """Folder in the stage."""
    names: Sequence[str] | None
    """Name of each file there; ``None``: its own name, in a folder that is made for it."""


def staged(listing: Listing, moves: Sequence[Move], targets: Sequence[Target]) -> Iterator[Staged]:
    """Yield the place in the stage of each folder: the whole folder, or its files under the numbers of their moves."""
    number_of = {(move.target, move.path): number for number, move in enumerate(moves)}
    at: dict[tuple[int, str], str] = {}
    for folder in listing.folders:
        place = target, path = folder.place
        above, _, name = path.rpartition("/")
        stage_at = f"{targets[target].path}/{OWN_FOLDER}/stage"
        if path and place in number_of:
            at[place] = f"{stage_at}/{number_of[place]}"
        elif path and (target, above) in at:
            at[place] = f"{at[target, above]}/{name}"
        elif folder.names:
            numbers = [str(number_of[target, folder.path_of(name)]) for name in folder.names]
            yield Staged(folder, stage_at, numbers)
            continue
        else:
            continue
        yield Staged(folder, at[place], None)


def _stage(tree: Tree, parts: Sequence[Staged], targets: Sequence[Target], *, linked: bool) -> None:
    """Make the folders of a stage and link or copy the files into them."""
    for target in targets:
        for name in ("stage", "backup"):
            os.makedirs(f"{target.path}/{OWN_FOLDER}/{name}", exist_ok=True)  # noqa: PTH103
    plain = [stat.S_IMODE(os.stat(f"{t.path}/{OWN_FOLDER}/stage").st_mode) for t in targets]  # noqa: PTH116
    layers = [str(tree.layer(number)) for number in range(len(targets))]
    place = _link if linked else _copy
    # In one thread, because links wait for the kernel's journal, not for each other.
    for part in parts:
        if part.names is None:
            os.mkdir(part.into)  # noqa: PTH102 -- thousands of paths
        if part.folder.names:
            source = f"{layers[part.folder.own.target]}/{part.folder.own.path}"
            place(source, part.into, part.folder.names, part.names or part.folder.names)
    # The deepest first, after all writes, which modes might forbid and which would change times.
    for part in reversed(parts):
        if part.names is not None:
            continue
        own = part.folder.own
        if own.mode != plain[own.target]:
            os.chmod(part.into, own.mode)  # noqa: PTH101
        os.utime(part.into, ns=(own.mtime_ns, own.mtime_ns))


def _link(source: str, into: str, names: Sequence[str], staged_names: Sequence[str]) -> None:
    """Link files of one folder into another; the kernel resolves either path only once."""
    here = os.open(source, _FOLDER)
    try:
        there = os.open(into, _FOLDER)
        try:
            for name, staged_name in zip(names, staged_names, strict=True):
                os.link(name, staged_name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        finally:
            os.close(there)
    finally:
        os.close(here)


def _copy(source: str, into: str, names: Sequence[str], staged_names: Sequence[str]) -> None:
    for name, staged_name in zip(names, staged_names, strict=True):
        # Copy time and mode, too, by which a later look detects changes.
        shutil.copy2(f"{source}/{name}", f"{into}/{staged_name}", follow_symlinks=False)
