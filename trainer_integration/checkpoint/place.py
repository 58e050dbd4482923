"""Where the checkpoints of a run are: a folder, or a folder of a striped namespace. Free of torch."""

import itertools
import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from fusefs.stores.protocol import name_of
from omniload.base.errors import IntegrityError, StateError
from omniload.base.state import JsonObject
from omniload.base.writing import sync_folder
from trainer_integration.checkpoint import folder as checkpoint_folder
from trainer_integration.checkpoint.striped.index import INDEX
from trainer_integration.checkpoint.striped.place import (
    location_of,
    open_striped,
    read_index,
    within,
)

if TYPE_CHECKING:
    from fusefs.tree.namespace import StripedFiles

__all__ = ["CheckpointPlace", "FolderPlace", "StorePlace", "is_store", "place_of"]

_STEP = re.compile(r"step-(\d{8,})")


class CheckpointPlace(Protocol):
    """The committed checkpoints of a run, for the process that starts it."""

    @property
    def location(self) -> str:
        """Path or URL for messages."""
        ...

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the committed checkpoints, rising."""
        ...

    def loader_state_of(self, step: int) -> JsonObject:
        """Return the data plane's state in a committed checkpoint; no tensor is read.

        Raises:
            IntegrityError: The state is not what was saved, or another file is missing or of another size.
            StateError: The checkpoint was written by another release.
        """
        ...

    def set_aside(self, step: int) -> str:
        """Rename a committed checkpoint, so that it no longer counts as one; return its new name."""
        ...


class FolderPlace(CheckpointPlace):
    """Checkpoints in a folder, written by ``Checkpoints``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    @override
    def location(self) -> str:
        return str(self.folder)

    @override
    def steps(self) -> tuple[int, ...]:
        return checkpoint_folder.steps_in(self.folder)

    @override
    def loader_state_of(self, step: int) -> JsonObject:
        return checkpoint_folder.loader_state_of(checkpoint_folder.path_of(self.folder, step))

    @override
    def set_aside(self, step: int) -> str:
        path = checkpoint_folder.path_of(self.folder, step)
        # A step may be set aside more than once, for instance if a run is repeatedly resumed from an earlier step.
        aside = _free_name(path.name, {entry.name for entry in self.folder.iterdir()})
        path.rename(self.folder / aside)
        # Otherwise a power cut could bring the old name back, and the run would resume from it.
        sync_folder(self.folder)
        return aside


class StorePlace(CheckpointPlace):
    """Checkpoints in a folder of a striped namespace, written by ``StripedCheckpoints``.

    A checkpoint is committed by its index: ``step-00000020/index.json``.
    """

    def __init__(self, files: "StripedFiles", folder: str) -> None:
        self.files = files
        self.folder = folder

    @property
    @override
    def location(self) -> str:
        return location_of(self.files, self.folder)

    @override
    def loader_state_of(self, step: int) -> JsonObject:
        path = self.path_of(step)
        index = read_index(self.files, path)
        sizes = {info.name: info.size_bytes for info in self.files.listing(path)}
        for name, file in index.files.items():
            if sizes.get(name) != file.size_bytes:
                found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
                raise IntegrityError(
                    f"{location_of(self.files, path)}: {name} {found}, {file.size_bytes} bytes were "
                    "saved; resume from an earlier checkpoint"
                )
        state = index.about.get("loader")
        if not isinstance(state, dict):
            raise StateError(
                f"{location_of(self.files, path)} holds no state of the data plane: it was not "
                "saved by a training run; give another folder"
            )
        return state

    @override
    def set_aside(self, step: int) -> str:
        path = self.path_of(step)
        taken = {info.name for info in self.files.listing(self.folder)}
        aside = _free_name(name_of(path), taken)
        self.files.names.rename(path, within(self.folder, aside))
        return aside

    def path_of(self, step: int) -> str:
        """Return the folder of the checkpoint of ``step`` within the namespace."""
        return within(self.folder, f"step-{step:08d}")

    @override
    def steps(self) -> tuple[int, ...]:
        return tuple(step for step, whole in self._found() if whole)

    def unfinished(self) -> tuple[int, ...]:
        """Return the steps of folders without an index, which are being written or removed, or were left by a crash."""
        return tuple(step for step, whole in self._found() if not whole)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its index first, so that half of a checkpoint never looks whole."""
        path = self.path_of(step)
        names = [info.name for info in self.files.listing(path)]
        for name in sorted(names, key=lambda name: name != INDEX):
            self.files.names.remove(f"{path}/{name}")
        self.files.names.remove_directory(path)

    def _found(self) -> list[tuple[int, bool]]:
        try:
            infos = self.files.listing(self.folder)
        except FileNotFoundError:
            return []
        # The whole name must match, because a checkpoint that was set aside no longer counts.
        matches = (_STEP.fullmatch(info.name) for info in infos if info.kind == "directory")
        steps = sorted(int(match[1]) for match in matches if match)
        return [(step, self._is_whole(step)) for step in steps]

    def _is_whole(self, step: int) -> bool:
        try:
            # The index alone decides, because it is written last and removed first.
            self.files.stat(f"{self.path_of(step)}/{INDEX}")
        except FileNotFoundError:
            return False
        return True


def _free_name(name: str, taken: Container[str]) -> str:
    return next(aside for n in itertools.count(1) if (aside := f"{name}.aside-{n}") not in taken)


def is_store(location: str) -> bool:
    """Return whether a location of checkpoints is a store's URL; otherwise it is a folder."""
    return "://" in location


def place_of(location: str) -> FolderPlace | StorePlace:
    """Open a location of checkpoints.

    Args:
        location: A folder, or ``omnifs://FOLDER::STORE``, or a store's URL.

    Raises:
        ConfigError: The URL names nothing that can be opened.
        UnavailableError: The store does not answer.
    """
    if is_store(location):
        return StorePlace(*open_striped(location))
    return FolderPlace(Path(location))
