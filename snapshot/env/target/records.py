"""Changes made to an environment: the journal of a restore under way, the record of a completed one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from snapshot.env.format.entries import OWN_FOLDER

__all__ = ["VERSION", "Form", "Move", "Record", "Records"]

VERSION = 1
# A journal names every path that a restore moves; a million paths fit.
_MOST_BYTES = 256 << 20
Form = Literal["mount", "link", "copy", "command"]
"""Way in which an environment got a snapshot; ``command``: it was installed here."""


class Move(NamedTuple):
    """One path that a restore puts in place or removes."""

    target: int
    path: str
    stages: bool
    """Whether a staged entry replaces the path; otherwise the path is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The changes made to an environment; JSON in ``<prefix>/.omniload-env``."""

    version: int = VERSION
    action: Literal["apply", "undo"]
    key: str
    form: Form
    base: dict[str, str]
    """Content of the environment before the restore: part of the key."""
    targets: tuple[str, ...]
    """Paths of the targets."""
    moves: tuple[Move, ...] = ()
    boot: str = ""
    """Boot of the kernel under which the record was written."""


class Records:
    """The journal and the record of one environment."""

    def __init__(self, prefix: str) -> None:
        self.folder = Path(prefix) / OWN_FOLDER

    def read(self, name: Literal["journal", "record"]) -> Record | None:
        """Return the journal or the record; ``None`` if there is none.

        Raises:
            StateError: Another version wrote it, or it is damaged.
        """
        path = self.folder / f"{name}.json"
        try:
            text = read_kept_file(path, most_bytes=_MOST_BYTES, what=f"a {name}")
            fields: dict[str, Any] = json.loads(text)
        except FileNotFoundError:
            return None
        except IntegrityError as error:
            raise StateError(f"{error}, and make the environment anew") from error
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}; make the environment anew") from error
        if not isinstance(fields, dict):
            raise StateError(f"{path} is damaged: it holds no record; make the environment anew")
        if fields.get("version") != VERSION:
            raise StateError(
                f"{path} has version {fields.get('version')!r}, this code reads {VERSION}; "
                "undo it with the release that wrote it"
            )
        try:
            fields["moves"] = tuple(Move(*move) for move in fields["moves"])
            fields["targets"] = tuple(fields["targets"])
            return Record(**fields)
        except (KeyError, TypeError) as error:
            raise StateError(f"{path} is damaged: {error!r}; make the environment anew") from error

    def write(self, name: Literal["journal", "record"], record: Record) -> None:
        """Write the journal or the record, durably and in one rename."""
        # Do not make parents: a removed environment must not come back as a folder of records.
        self.folder.mkdir(exist_ok=True)
        data = json.dumps(asdict(record)).encode()
        # Durable, because paths may have moved when the machine fails, and nothing else says where they came from.
        write_whole(self.folder / f"{name}.json", data, durable=True)

    def remove(self, name: Literal["journal", "record"]) -> None:
        """Remove the journal or the record."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)
