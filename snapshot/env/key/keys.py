"""The key of a snapshot: everything that decides what an installation puts where.

A key is the SHA-256 of a document in canonical JSON. The document is kept in the
manifest, so two keys can be compared by what they are made of.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omniload.base.errors import ConfigError, StateError
from snapshot.env.format.digests import digest_of
from snapshot.env.format.entries import Target
from snapshot.env.key.interpreter import Interpreter
from snapshot.env.key.requirements import canonical_name, requests_of, without_credentials

__all__ = [
    "VERSION",
    "Base",
    "Difference",
    "Installation",
    "base_of",
    "differences",
    "document_of",
    "installed_in",
    "key_of",
    "shown",
]

VERSION = 1
_DISTRIBUTION = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(?:-.*)?\.(?:dist|egg)-info$")


class Base(NamedTuple):
    """What an environment holds before the command."""

    image: str
    """Digest of the image it lies in; empty where nobody said."""
    installed: str
    """Digest of the names and versions of what is installed."""


class Installation(NamedTuple):
    """A command that installs, and what decides its outcome beside the environment."""

    command: tuple[str, ...]
    """Program and arguments."""
    folder: str
    """Where it runs."""
    environment: Mapping[str, str]
    """Variables it sees."""
    files: tuple[str, ...] = ()
    """Files and folders that it reads, by content, beside those in its arguments."""
    variables: tuple[str, ...] = ()
    """Names of the variables that it reads."""


class Difference(NamedTuple):
    """One place at which two documents differ."""

    place: str
    """Dotted path in the document."""
    left: str | None
    """``None``: only the other has it."""
    right: str | None


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


def document_of(
    interpreter: Interpreter,
    targets: Sequence[Target],
    base: Base,
    installation: Installation,
) -> dict[str, Any]:
    """Return what the key of an installation is made of.

    Values of declared variables appear as digests only: a manifest is read by many.

    Args:
        interpreter: Of the environment.
        targets: What is captured.
        base: What is there before the command.
        installation: The command and its inputs.

    Raises:
        ConfigError: No command is given, or an input cannot be read.
    """
    command, folder, environment, files, variables = installation
    if not command:
        raise ConfigError("no command given; write it after --, such as -- pip install numpy")
    return {
        "version": VERSION,
        "interpreter": interpreter.identity(),
        "prefix": shown(os.path.realpath(interpreter.prefix)),
        "targets": [shown(target.name) for target in targets],
        "base": base._asdict(),
        "requests": _all_shown(requests_of(command, folder, environment).document()),
        "command": [shown(without_credentials(word)) for word in command],
        "files": {shown(name): digest_of(Path(folder) / name) for name in sorted(set(files))},
        "variables": {name: _secret(environment.get(name)) for name in sorted(set(variables))},
    }


def shown(text: str) -> str:
    """Return a path as JSON can hold it: bytes that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def key_of(document: Mapping[str, Any]) -> str:
    """Return the key of a document: 64 hexadecimal digits.

    Raises:
        StateError: The document is of another version.
    """
    if document.get("version") != VERSION:
        raise StateError(
            f"key document has version {document.get('version')!r}, this code reads {VERSION}"
        )
    return hashlib.sha256(_json(document)).hexdigest()


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """Return every place at which two documents differ; empty if and only if their keys are equal."""
    one, other = dict(_flat("", left)), dict(_flat("", right))
    return [
        Difference(place, one.get(place), other.get(place))
        for place in sorted(one.keys() | other.keys())
        if one.get(place) != other.get(place)
    ]


def _flat(place: str, value: Any) -> list[tuple[str, str]]:  # noqa: ANN401 -- JSON
    """Flatten a document; members of lists of requests go by themselves, so that order is no difference."""
    if isinstance(value, Mapping):
        found = [
            pair
            for name, below in value.items()
            for pair in _flat(f"{place}.{name}" if place else str(name), below)
        ]
        return found or [(place, "{}")]
    if isinstance(value, list) and place.startswith("requests."):
        return [(f"{place}[{item}]", str(item)) for item in value] or [(place, "[]")]
    return [(place, _json(value).decode())]


def _json(value: Any) -> bytes:  # noqa: ANN401 -- JSON
    """Return canonical JSON: members sorted, no blanks, UTF-8."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _secret(value: str | None) -> str:
    if value is None:
        return "unset"
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _all_shown(value: Any) -> Any:  # noqa: ANN401 -- JSON
    if isinstance(value, Mapping):
        return {shown(name): _all_shown(below) for name, below in value.items()}
    return [_all_shown(item) for item in value] if isinstance(value, list) else shown(value)
