"""Put an extracted snapshot into an environment by renames, so that a kill leaves no half of it.

Everything is staged in ``<target>/.omniload-env`` first, on the same file system:
directories that are new as whole trees, single files where a directory is there
already. Nothing of it is visible. Then a journal is written, and what it lists is
carried out: each path is one rename, what was there goes to a backup. A kill before
the journal leaves a stage that the next restore removes; a kill after it leaves a journal
that the next restore carries out to its end. The record that replaces the journal
lets ``undo`` bring back what was there before.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.entries import Entry, Kind, Target, parents_of
from snapshot.env.node_cache import Tree, discard
from snapshot.env.scanning import OWN_FOLDER

__all__ = ["Form", "Move", "Record", "Records", "apply", "carry_out", "plan_moves", "undo"]

VERSION = 1
_SHARE = 512
"""Files that a thread places at a time."""
_Between = tuple[str, str]
"""Directories from and to which files are placed."""
_Names = Sequence[tuple[str, str]]
"""Name of each file in either."""
Form = Literal["mount", "link", "copy", "command"]
"""How an environment came to hold a snapshot; ``command``: it was installed here."""


class Move(NamedTuple):
    """One path that a restore puts in place or takes away."""

    target: int
    path: str
    stages: bool
    """Whether something takes its place; else it is a deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was done to an environment; JSON in ``<prefix>/.omniload-env``."""

    version: int = VERSION
    action: Literal["apply", "undo"]
    key: str
    form: Form
    base: dict[str, str]
    """What the environment held before: part of the key."""
    targets: tuple[str, ...]
    """Paths of the targets."""
    moves: tuple[Move, ...] = ()
    boot: str = ""
    """Start of the kernel under which it was written."""


class Records:
    """The journal and the record of one environment."""

    def __init__(self, prefix: str) -> None:
        self.folder = Path(prefix) / OWN_FOLDER

    @property
    def lock(self) -> Path:
        """The lock file of the environment."""
        return self.folder / "lock"

    def read(self, name: Literal["journal", "record"]) -> Record | None:
        """Return the journal or the record; ``None`` where there is none.

        Raises:
            StateError: Another version wrote it, or it is damaged.
        """
        path = self.folder / f"{name}.json"
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}; make the environment anew") from error
        if fields.get("version") != VERSION:
            raise StateError(
                f"{path} has version {fields.get('version')!r}, this code reads {VERSION}; "
                "undo it with the release that wrote it"
            )
        fields["moves"] = tuple(Move(*move) for move in fields["moves"])
        fields["targets"] = tuple(fields["targets"])
        return Record(**fields)

    def write(self, name: Literal["journal", "record"], record: Record) -> None:
        """Write the journal or the record, durably and in one rename."""
        self.folder.mkdir(exist_ok=True)
        temporary = self.folder / f"{name}.new"
        with temporary.open("wb") as file:
            file.write(json.dumps(asdict(record)).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / f"{name}.json")

    def remove(self, name: Literal["journal", "record"]) -> None:
        """Remove the journal or the record."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)


def plan_moves(
    entries: Sequence[Entry], exists: Callable[[int, str], Kind | None]
) -> tuple[Move, ...]:
    """Return the renames that turn an environment into the snapshot, in order.

    Args:
        entries: Of the snapshot, checked and in order.
        exists: What stands at a place of the environment now.

    Returns:
        One move for each path that is new or replaced, whole directories where nothing is
        there yet, and one for each deletion of something that is there.
    """
    moves, whole = list[Move](), set[tuple[int, str]]()
    for entry in entries:
        place = (entry.target, entry.path)
        if not entry.path:
            continue
        if (entry.target, entry.path.rpartition("/")[0]) in whole:
            if entry.kind is Kind.DIRECTORY:
                whole.add(place)  # what lies in it comes after it, and moves with it as well
            continue
        there = exists(*place)
        if entry.kind is Kind.DELETED:
            if there is not None:
                moves.append(Move(*place, stages=False))
        elif entry.kind is Kind.DIRECTORY:
            if there is not Kind.DIRECTORY:
                moves.append(Move(*place, stages=True))
                whole.add(place)
        else:
            moves.append(Move(*place, stages=True))
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
    entries = tree.manifest.entries
    for target in targets:
        Path(target.path).mkdir(parents=True, exist_ok=True)
        _check_owner(records, target)
        discard(Path(target.path) / OWN_FOLDER)
    moves = plan_moves(entries, lambda number, path: _kind_at(targets[number], path))
    staged = list(_staged(entries, moves, targets))
    whole = replace(record, moves=moves)
    try:
        _stage(tree, staged, targets, linked=record.form == "link")
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
    new = {(entry.target, entry.path) for entry, _ in staged}
    for entry in entries:
        if entry.kind is Kind.DIRECTORY and (entry.target, entry.path) not in new:
            path = Path(targets[entry.target].path) / entry.path
            path.chmod(entry.mode)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
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
    # The journal goes first: without its trash it could not tell again what is put back.
    records.remove("journal")
    for target in journal.targets:
        discard(Path(target) / OWN_FOLDER)


def undo(records: Records, record: Record) -> None:
    """Bring back what an environment held before a restore by links or copies."""
    journal = replace(record, action="undo")
    records.write("journal", journal)
    carry_out(records, journal)


def _stage(
    tree: Tree,
    staged: Sequence[tuple[Entry, str]],
    targets: Sequence[Target],
    *,
    linked: bool,
) -> None:
    """Build what moves into place, under the number of its move."""
    for target in targets:
        for name in ("stage", "backup"):
            (Path(target.path) / OWN_FOLDER / name).mkdir(parents=True, exist_ok=True)
    plain = [stat.S_IMODE(os.stat(f"{t.path}/{OWN_FOLDER}/stage").st_mode) for t in targets]  # noqa: PTH116
    folders = list[tuple[str, Entry]]()
    files: dict[_Between, list[tuple[str, str]]] = {}
    layers = [str(tree.layer(number)) for number in range(len(targets))]
    for entry, path in staged:
        if entry.kind is Kind.DIRECTORY:
            os.mkdir(path)  # noqa: PTH102 -- tens of thousands of paths
            folders.append((path, entry))
            continue
        above, _, name = entry.path.rpartition("/")
        into, _, number = path.rpartition("/")
        files.setdefault((f"{layers[entry.target]}/{above}", into), []).append((name, number))
    threads = min(8, os.cpu_count() or 1)
    place = _link if linked else _copy
    with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
        for _ in pool.map(lambda share: [place(*each) for each in share], _shares(files)):
            pass
    for path, entry in reversed(folders):
        if entry.mode != plain[entry.target]:
            os.chmod(path, entry.mode)  # noqa: PTH101
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def _shares(files: Mapping[_Between, _Names]) -> list[list[tuple[str, str, _Names]]]:
    """Divide files among threads, some directories or a part of a large one at a time."""
    shares: list[list[tuple[str, str, _Names]]] = []
    held = _SHARE
    for between, names in files.items():
        for at in range(0, len(names), _SHARE):
            part = names[at : at + _SHARE]
            if held + len(part) > _SHARE:
                shares.append([])
                held = 0
            shares[-1].append((*between, part))
            held += len(part)
    return shares


def _link(source: str, into: str, names: _Names) -> None:
    """Link files of one directory into another; the kernel walks to either only once."""
    with ExitStack() as stack:
        folders = []
        for path in (source, into):
            folders.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            stack.callback(os.close, folders[-1])
        for name, staged in names:
            os.link(
                name, staged, src_dir_fd=folders[0], dst_dir_fd=folders[1], follow_symlinks=False
            )


def _copy(source: str, into: str, names: _Names) -> None:
    for name, staged in names:
        shutil.copy2(f"{source}/{name}", f"{into}/{staged}", follow_symlinks=False)


def _staged(
    entries: Sequence[Entry], moves: Sequence[Move], targets: Sequence[Target]
) -> Iterator[tuple[Entry, str]]:
    """Yield each entry that is staged, and where: at its move, or below the move of a folder."""
    at = {
        (move.target, move.path): f"{targets[move.target].path}/{OWN_FOLDER}/stage/{number}"
        for number, move in enumerate(moves)
    }
    for entry in entries:
        if entry.kind is Kind.DELETED or not entry.path:
            continue
        place = (entry.target, entry.path)
        if place not in at:
            above, _, name = entry.path.rpartition("/")
            if (entry.target, above) not in at:
                continue  # a directory that is there already
            at[place] = f"{at[entry.target, above]}/{name}"
        yield entry, at[place]


def _kind_at(target: Target, path: str) -> Kind | None:
    """Tell what stands at a path; a link on the way is refused, it might lead out."""
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
