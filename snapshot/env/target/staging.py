"""Build what a restore puts into an environment, beside it, where nobody looks yet.

A tree of the node cache is linked or copied folder by folder: the kernel walks to either
folder once and gets names from then on. One thread does it. Links wait for the kernel's
journal, not for each other, and more threads cost more processor time and no less of the clock.
"""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snapshot.env.format.entries import Target
from snapshot.env.format.listing import Folder, Listing
from snapshot.env.node.cache import Tree
from snapshot.env.target.records import Move
from snapshot.env.target.scan import OWN_FOLDER

__all__ = ["Staged", "stage", "staged"]

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Staged(NamedTuple):
    """One folder of a tree, and where its files are staged."""

    folder: Folder
    into: str
    """Folder of the stage."""
    names: Sequence[str] | None
    """Name of each file there; ``None``: its own, in a folder that is made for it."""


def staged(listing: Listing, moves: Sequence[Move], targets: Sequence[Target]) -> Iterator[Staged]:
    """Yield where each folder is staged: as a whole, or its files alone under the numbers of their moves."""
    number_of = {(move.target, move.path): number for number, move in enumerate(moves)}
    at: dict[tuple[int, str], str] = {}
    for folder in listing.folders:
        place = (folder.target, folder.path)
        above, _, name = folder.path.rpartition("/")
        stage_at = f"{targets[folder.target].path}/{OWN_FOLDER}/stage"
        if folder.path and place in number_of:
            at[place] = f"{stage_at}/{number_of[place]}"
        elif folder.path and (folder.target, above) in at:
            at[place] = f"{at[folder.target, above]}/{name}"
        elif folder.names:
            below = f"{folder.path}/" if folder.path else ""
            numbers = [str(number_of[folder.target, f"{below}{name}"]) for name in folder.names]
            yield Staged(folder, stage_at, numbers)
            continue
        else:
            continue
        yield Staged(folder, at[place], None)


def stage(tree: Tree, parts: Sequence[Staged], targets: Sequence[Target], *, linked: bool) -> None:
    """Make the folders of a stage and link or copy the files into them."""
    for target in targets:
        for name in ("stage", "backup"):
            os.makedirs(f"{target.path}/{OWN_FOLDER}/{name}", exist_ok=True)  # noqa: PTH103
    plain = [stat.S_IMODE(os.stat(f"{t.path}/{OWN_FOLDER}/stage").st_mode) for t in targets]  # noqa: PTH116
    layers = [str(tree.layer(number)) for number in range(len(targets))]
    place = _link if linked else _copy
    for part in parts:
        if part.names is None:
            os.mkdir(part.into)  # noqa: PTH102 -- thousands of paths
        if part.folder.names:
            source = f"{layers[part.folder.target]}/{part.folder.path}"
            place(source, part.into, part.folder.names, part.names or part.folder.names)
    for part in reversed(parts):
        if part.names is not None:
            continue
        if part.folder.mode != plain[part.folder.target]:
            os.chmod(part.into, part.folder.mode)  # noqa: PTH101
        os.utime(part.into, ns=(part.folder.mtime_ns, part.folder.mtime_ns))


def _link(source: str, into: str, names: Sequence[str], staged_names: Sequence[str]) -> None:
    """Link files of one folder into another; the kernel walks to either only once."""
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
        shutil.copy2(f"{source}/{name}", f"{into}/{staged_name}", follow_symlinks=False)
