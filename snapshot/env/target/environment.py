"""The active environment: its present content, and how its former content is restored."""

import os
import stat as stat_bits
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from omniload.base.errors import ConfigError, StateError
from snapshot.env.format.entries import OWN_FOLDER, Kind, Place, Seen, Target
from snapshot.env.key.interpreter import (
    Base,
    Interpreter,
    base_of,
    find_python,
    installed_in,
    probe,
    shown,
)
from snapshot.env.key.keys import Installation, document_of, key_of
from snapshot.env.node.cache import exclusively
from snapshot.env.node.overlay import mount_source, mounts_at, umount
from snapshot.env.node.tree import TreeHead, boot_id
from snapshot.env.target.records import Record, Records

__all__ = [
    "Environment",
    "Scan",
    "active_environment",
    "scan",
    "targets_of",
]


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, the directories whose changes are captured, and the changes made to them."""

    interpreter: Interpreter
    targets: tuple[Target, ...]
    records: Records

    def locked(self) -> AbstractContextManager[None]:
        """Exclude other restores of this environment."""
        return exclusively(self.records.folder / "lock")

    def heal(self) -> Record | None:
        """Clean up after a killed restore, under the lock; return the record of the environment."""
        journal = self.records.read("journal")
        if journal is not None:
            from snapshot.env.target.moves import carry_out  # noqa: PLC0415 -- rarely needed

            carry_out(self.records, journal)
        record = self.records.read("record")
        # Include the targets of a restore that had more targets than this one.
        paths = {target.path for target in self.targets} | set(record.targets if record else ())
        seen = {path: mounts_at(path) for path in paths}
        mounted = [path for path, mounts in seen.items() if mounts]
        if record is None or record.form != "mount":
            # Leftovers of a restore that was killed between its mounts, before their record.
            for path in mounted:
                umount(path, lazily=True)
            return record
        # Another container may have mounted, and recorded, another snapshot on the same volume.
        ours = all(seen[path][-1].source == mount_source(record.key) for path in mounted)
        # Or our mounts are gone, because the container or the machine has restarted.
        if not ours or sorted(mounted) != sorted(record.targets):
            self._take_off(paths, lazily=True)
            self.records.remove("record")
            return None
        return record

    def clear(self, record: Record | None, *, lazily: bool = False) -> None:
        """Restore the content of the environment before ``record``, under the lock.

        Raises:
            StateError: The snapshot was installed here, not restored, or a mount is in use.
        """
        if record is None:
            return
        if record.form == "command":
            raise StateError(
                f"{self.interpreter.prefix} got snapshot {record.key[:16]} by installing, which "
                "cannot be undone; make the environment anew"
            )
        if record.form == "mount":
            self._take_off(record.targets, lazily=lazily)
            self.records.remove("record")
        else:
            from snapshot.env.target.moves import undo  # noqa: PLC0415 -- rarely needed

            undo(self.records, record)

    def _take_off(self, paths: Iterable[str], *, lazily: bool) -> None:
        for path in paths:
            for _ in mounts_at(path):
                umount(path, lazily=lazily)

    def document(self, installation: Installation, image: str) -> dict[str, Any]:
        """Return the key document of an installation into the environment's former content, under the lock."""
        record = self.heal()
        if record is not None:
            # The base is the content before a restore, or the same request would get another key.
            before = Base(image, record.base["installed"])
            document = document_of(self.interpreter, self.targets, before, installation)
            # An installation cannot be undone, so its result is the base for another request.
            if record.form != "command" or key_of(document) == record.key:
                return document
        now = base_of(image, installed_in(self.targets))
        return document_of(self.interpreter, self.targets, now, installation)

    def note_installed(self, document: dict[str, Any]) -> None:
        """Record that the environment got a snapshot by installing it, under the lock."""
        record = Record(
            action="apply",
            key=key_of(document),
            form="command",
            base=dict(document["base"]),
            targets=tuple(target.path for target in self.targets),
            boot=boot_id(),
        )
        self.records.write("record", record)

    def check_fits(self, head: TreeHead) -> None:
        """Check that a snapshot was made for an environment like this one.

        Raises:
            StateError: Interpreter, prefix or targets differ; its byte code, extension
                modules or scripts would not work here.
        """
        here = {
            **{f"interpreter.{k}": v for k, v in self.interpreter.identity.items()},
            "prefix": shown(os.path.realpath(self.interpreter.prefix)),
            "targets": [shown(target.name) for target in self.targets],
        }
        there = {
            **{f"interpreter.{k}": v for k, v in head.document.get("interpreter", {}).items()},
            "prefix": head.document.get("prefix"),
            "targets": head.targets,
        }
        for name, value in here.items():
            if there.get(name) != value:
                remedy = "give the same --target, or " if name == "targets" else ""
                raise StateError(
                    f"snapshot {head.key[:16]} was made for {name} {there.get(name)!r}, "
                    f"this environment has {value!r}; {remedy}save one here"
                )


def active_environment(python: str | None = None, more: Sequence[str] = ()) -> Environment:
    """Return the active environment, or that of the given interpreter or root.

    Directories of ``more`` are captured in addition to site-packages and the scripts.

    Raises:
        ConfigError: There is no such interpreter.
    """
    interpreter = probe(find_python(python))
    targets = targets_of(interpreter.prefix, [*interpreter.targets, *more])
    return Environment(interpreter, targets, Records(interpreter.prefix))


class Scan(dict[Place, Seen]):
    """The entries seen, by target and path; ``special`` names entries that a snapshot cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.special: list[str] = []
        """Paths of devices, sockets and pipes."""


def targets_of(prefix: str, paths: Sequence[str]) -> tuple[Target, ...]:
    """Name the directories whose changes are captured, in order of their names.

    A directory inside another one is part of it.

    Raises:
        ConfigError: A directory contains the whole prefix, which holds the record of a restore.
    """
    real = sorted({os.path.realpath(path) for path in paths})
    home = os.path.realpath(prefix)
    outer: list[str] = []
    for path in real:
        if home == path or home.startswith(path.rstrip("/") + "/"):
            raise ConfigError(
                f"target {path!r} holds the whole prefix {home!r}; name the folders in it instead"
            )
        if not any(path.startswith(above.rstrip("/") + "/") for above in outer):
            outer.append(path)
    named = (Target(_name_of(home, path), path) for path in outer)
    return tuple(sorted(named))


def scan(targets: Sequence[Target]) -> Scan:
    """Look at every path of the targets; links are not followed.

    Returns:
        The entries seen. A target that does not exist has none.
    """
    found = Scan()
    for number, target in enumerate(targets):
        try:
            found[number, ""] = _seen(Kind.DIRECTORY, os.lstat(target.path))
        except FileNotFoundError:
            continue
        _scan_folder(found, number, target.path, "")
    return found


def _scan_folder(found: Scan, number: int, folder: str, path: str) -> None:
    """Look into one directory, recursively; the limit of paths bounds the depth to 2048."""
    with os.scandir(folder) as items:
        for item in items:
            if item.name == OWN_FOLDER:
                continue
            below = f"{path}/{item.name}" if path else item.name
            try:
                details = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
            kind = _kind_of(details.st_mode)
            if kind is None:
                found.special.append(item.path)
                continue
            found[number, below] = _seen(kind, details)
            if kind is Kind.DIRECTORY:
                _scan_folder(found, number, item.path, below)


def _kind_of(mode: int) -> Kind | None:
    if stat_bits.S_ISREG(mode):
        return Kind.FILE
    if stat_bits.S_ISDIR(mode):
        return Kind.DIRECTORY
    return Kind.LINK if stat_bits.S_ISLNK(mode) else None


def _seen(kind: Kind, details: os.stat_result) -> Seen:
    size = details.st_size if kind is Kind.FILE else 0
    mode = stat_bits.S_IMODE(details.st_mode)
    return Seen(kind, mode, size, details.st_mtime_ns, details.st_ino, details.st_ctime_ns)


def _name_of(home: str, path: str) -> str:
    return os.path.relpath(path, home) if path.startswith(home.rstrip("/") + "/") else path
