"""What an environment holds before a command: the part of a key that is about what was there."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapshot.env.format.entries import Target

__all__ = ["Base", "base_of", "canonical_name", "installed_in", "shown"]

_DISTRIBUTION = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(?:-.*)?\.(?:dist|egg)-info$")


class Base(NamedTuple):
    """What an environment holds before the command."""

    image: str
    """Digest of the image it lies in; empty where nobody said."""
    installed: str
    """Digest of the names and versions of what is installed."""


def installed_in(targets: Sequence[Target]) -> tuple[str, ...]:
    """Return ``name==version`` of the distributions in the targets, sorted."""
    found = set()
    for target in targets:
        try:
            names = os.listdir(target.path)  # noqa: PTH208 -- names, and fast
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            if match := _DISTRIBUTION.match(name):
                found.add(shown(f"{canonical_name(match['name'])}=={match['version']}"))
    return tuple(sorted(found))


def base_of(image: str, installed: Iterable[str]) -> Base:
    """Return the base made of an image's digest and what is installed."""
    total = hashlib.sha256("\n".join(sorted(installed)).encode("utf-8", "surrogateescape"))
    return Base(image, total.hexdigest())


def canonical_name(name: str) -> str:
    """Return the one spelling of a distribution's name: ``Foo.Bar__baz`` is ``foo-bar-baz``.

    Source:
        PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def shown(text: str) -> str:
    """Return a path as JSON can hold it: bytes that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
