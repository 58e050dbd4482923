"""The release that a process runs: its code decides which samples a step has, so all roles of a plane need one code."""

import hashlib
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from typing_extensions import override

import omniload
from omniload.base.errors import ConfigError

__all__ = ["Release", "code_in", "other_release", "require_own_release"]


@dataclass(frozen=True, slots=True)
class Release:
    """The version and the code of omniload in a process."""

    version: str
    code: str
    """Digest of all modules, because many commits have the same version."""
    place: str
    """Folder and host of the code, for messages."""

    @classmethod
    @cache
    def own(cls) -> Self:
        """Return the release of this process; the modules are read once, which takes 20 ms."""
        folder = Path(omniload.__file__).parent
        place = f"{folder} on {socket.gethostname()}"
        return cls(omniload.__version__, code_in(folder), place)

    @override
    def __str__(self) -> str:
        return f"{self.version} with code {self.code}"


def code_in(folder: Path) -> str:
    """Return a digest of the modules in a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for at, below, names in os.walk(folder):
        # Editors and file systems put other things beside modules, such as Emacs the link ``.#loader.py`` to nothing.
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("."):
                module = Path(at, name)
                content = module.read_bytes()
                digest.update(f"{module.relative_to(folder)} {len(content)} ".encode())
                digest.update(content)
    return digest.hexdigest()


def other_release(found: Release | None, role: str) -> str:
    """Return how a role's release differs from that of this process; empty if it is the same, or is not known."""
    own = Release.own()
    if found is None or (found.version, found.code) == (own.version, own.code):
        return ""
    said = f"{role} runs omniload {found} ({found.place}), this process {own} ({own.place})"
    return f"{said}, so their samples may differ"


def require_own_release(found: Release | None, role: str) -> None:
    """Refuse a role whose process runs another release than this one.

    Raises:
        ConfigError: Its version or its code differs.
    """
    if differs := other_release(found, role):
        raise ConfigError(
            f"{differs}: install one release on all hosts, or have the runtime_env of the job bring it"
        )
