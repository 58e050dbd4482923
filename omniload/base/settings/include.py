"""Files of settings that include others and name environment variables, read as one tree.

::

    # mix.yaml                          # common/sources.yaml
    version: 2                          sources:
    include: common/sources.yaml          web: {type: jsonl, path: "${DATA:-/data}/web/*.jsonl"}
    seed: ${SEED}
    sources:
      web: {shuffle: {window: 4Ki}}

The including file takes precedence: mappings are merged key by key, and any other value replaces the included one. Of
several included files, the later one takes precedence. ``${NAME}`` is replaced by the variable's value, which is read
as if it stood there, and as a text within quotes. ``${NAME:-word}`` is ``word`` if the variable is not set or empty,
and ``$${`` is ``${``. A value has at most 4,096 characters, and a file with its variables replaced is no larger than
the largest file.

A file of ``version: 1`` is read without includes and variables.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omniload.base.config import read_text
from omniload.base.errors import ConfigError
from omniload.base.secrets import names_secret
from omniload.base.settings.tree import LARGEST_TEXT_BYTES, Node, compose

__all__ = ["SettingsTree", "read_settings"]

_INCLUDE = "include"
_DEEPEST = 8
_MOST_FILES = 64
_LONGEST_VALUE = 4096
"""Largest number of characters of a variable; paths are shorter."""
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTree:
    """A file of settings with all its includes."""

    root: Node | None
    """Root of the merged file; ``None`` if it is empty."""
    text: str
    """Self-contained YAML with the same meaning: the file's own text if it has no includes and names no variable."""


def read_settings(path: Path, environment: Mapping[str, str] | None = None) -> SettingsTree:
    """Read a file of settings with its includes.

    Args:
        path: The file. Names of included files start at the folder of the file that names them.
        environment: Variables; by default, those of this process.

    Raises:
        ConfigError: A file is missing, is not YAML, or includes itself; or a variable is not set, or is a secret.
    """
    text = read_text(path)
    root = compose(text, name=str(path))
    # A file without a version is left to the model, which reports that the version is missing.
    if root is None or not isinstance(root.content, dict) or _version(root) in {None, 1}:
        return SettingsTree(root=root, text=text)
    reading = _Reading(os.environ if environment is None else environment)
    merged = reading.file(path, text, ())
    if len(reading.files) == 1 and not reading.variables:
        return SettingsTree(root=root, text=text)
    files = ", ".join(file.name for file in reading.files)
    variables = f" and {', '.join(sorted(reading.variables))} of the environment" * bool(
        reading.variables
    )
    head = f"# {files}{variables}, as they read at that moment\n"
    return SettingsTree(
        root=merged, text=head + json.dumps(merged.value, ensure_ascii=False, indent=2) + "\n"
    )


def _version(root: Node) -> object:
    found = root.child("version")
    return None if found is None else found[1].content


class _Reading:
    """Reads a file and the files that it includes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.files: list[Path] = []
        self.variables: set[str] = set()
        self._environment = environment
        self._characters = 0
        """Total number of characters of all words with variables, after replacement."""

    def file(self, path: Path, text: str, above: tuple[Path, ...]) -> Node:
        """Return the tree of a file, merged with its includes."""
        self.files.append(path)
        if len(self.files) > _MOST_FILES:
            raise ConfigError(
                f"{above[0]}: includes more than {_MOST_FILES} files; put some of them together"
            )
        root = compose(text, name=str(path), expand=self._expanded)
        if root is None:
            return Node(line=1, content={}, file=str(path))
        if not isinstance(root.content, dict):
            raise ConfigError(
                f"{path}:{root.line}: an included file holds keys and values; found none"
            )
        # Removed, because the merged tree becomes the model, which has no such key.
        entry = root.content.pop(_INCLUDE, None)
        merged = Node(line=root.line, content={}, file=str(path))
        for line, name in () if entry is None else _names(path, entry[1]):
            merged = _over(merged, self._included(path, line, name, (*above, path)))
        return _over(merged, root)

    def _included(self, by: Path, line: int, name: str, above: tuple[Path, ...]) -> Node:
        path = by.parent / name
        at = f"{by}:{line}: {_INCLUDE}: {name!r}"
        # Read first, because a file that cannot be opened, such as a circular link, has no place to compare.
        try:
            text = read_text(path)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error
        if any(_is_same(path, each) for each in above):
            raise ConfigError(
                f"{at} includes itself, by way of {' -> '.join(p.name for p in above)}; remove one of them"
            )
        if len(above) > _DEEPEST:
            raise ConfigError(f"{at} lies deeper than {_DEEPEST} files; include it further up")
        return self.file(path, text, above)

    def _expanded(self, word: str, place: str) -> str:
        """Return a word with its variables replaced; ``place`` is its place for messages."""
        expanded = _VARIABLE.sub(lambda found: self._value(found, place), word)
        self._characters += len(expanded)
        if self._characters > LARGEST_TEXT_BYTES:
            raise ConfigError(
                f"{place} makes it {self._characters:,} characters with the values of variables in place, more than "
                f"the {LARGEST_TEXT_BYTES:,} of a file of settings; name variables less often, or shorten their values"
            )
        return expanded

    def _value(self, found: "re.Match[str]", place: str) -> str:
        if found[0] == "$${":
            return "${"
        name, otherwise = found[1], found[2]
        if name is None:
            raise ConfigError(
                f"{place} holds '${{' that names no variable; write ${{NAME}} or ${{NAME:-word}}, or $${{ for the two "
                "signs"
            )
        # Checked before the lookup, because even whether such a variable is set must not be shown.
        if names_secret(name):
            raise ConfigError(
                f"{place} names ${{{name}}}, a secret by its name, and settings are kept with the run; leave it out: "
                "clients of stores find their credentials in the environment by themselves"
            )
        # Empty counts as not set, like ``:-`` in a shell.
        value = self._environment.get(name, "")
        if not value and otherwise is None:
            raise ConfigError(
                f"{place} names ${{{name}}}, which is not set; set it, or write ${{{name}:-word}}"
            )
        if len(value) > _LONGEST_VALUE:
            raise ConfigError(
                f"{place} names ${{{name}}}, whose value has {len(value):,} characters, more than {_LONGEST_VALUE:,}; "
                "shorten it, or write it into a file that is included"
            )
        self.variables.add(name)
        return value or otherwise


def _names(path: Path, node: Node) -> list[tuple[int, str]]:
    """Return the names of included files, each with its line."""
    nodes = node.content if isinstance(node.content, list) else [node]
    for each in nodes:
        if not isinstance(each.content, str) or not each.content:
            raise ConfigError(
                f"{path}:{each.line}: {_INCLUDE} is {each.value!r:.40}; give the name of a file, or a list of names"
            )
    return [(each.line, str(each.content)) for each in nodes]


def _over(below: Node, above: Node) -> Node:
    """Merge two trees; ``above`` takes precedence."""
    if not isinstance(below.content, dict) or not isinstance(above.content, dict):
        return above
    entries = dict(below.content)
    for key, (line, node) in above.content.items():
        held = entries.get(key)
        entries[key] = line, node if held is None else _over(held[1], node)
    # A fault of the whole mapping is attributed to the file that takes precedence.
    return Node(line=above.line, content=entries, file=above.file)


def _is_same(one: Path, other: Path) -> bool:
    # Compared after resolving links, because a circle may go through a second name of a file.
    return one.resolve() == other.resolve()
