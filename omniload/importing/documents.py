"""Reading files of other tools: YAML without tags, JSON, or plain text; mappings know their lines."""

import json
import re
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.base.settings.tree import LARGEST_TEXT_BYTES, Node, compose

__all__ = ["Lined", "Place", "interpolated", "parsed"]

_NAMED = re.compile(r"\$\{([^${}:]+)\}")
"""A reference to a key of the file in the syntax of OmegaConf: ``${variables.max_seq_len}``."""
_LONGEST = 4096
"""Largest number of characters of a text with its references filled in."""

Place: TypeAlias = tuple[str, int]
"""A file by its name in messages, and a line in it, from 1."""


class Lined(dict[str, object]):
    """A mapping of a file that knows its place and those of its keys."""

    def __init__(self, content: dict[str, object], place: Place, places: dict[str, Place]) -> None:
        super().__init__(content)
        self.place, self.places = place, places


def parsed(text: str, name: str) -> object:
    """Return the content of a file: a mapping or a list from YAML or JSON, or otherwise its text.

    Mappings are ``Lined``, except in JSON files that exceed the size of settings, for which lines are not determined.

    Raises:
        ConfigError: The file begins like JSON but is not valid JSON, or it is not valid YAML.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            # Not parsed as YAML, which forbids tabs and is limited to the size of settings.
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: is no JSON: {error!s:.200}") from error
        return _lined(content, _tree(text, name))
    root = compose(text, name=name)
    return None if root is None else _lined(root.value, root)


def interpolated(document: object) -> object:
    """Return a document with each ``${a.b}`` in its texts replaced by the value of the key ``a.b``, as in OmegaConf.

    A reference to anything but a plain value of the file stays as it is written: ``${oc.env:HOME}``, a mapping, or a
    text that refers to itself.
    """
    return _Named(document).filled(document)


class _Named:
    """The plain values of a document by key; each is resolved once, however many texts refer to it."""

    def __init__(self, document: object) -> None:
        self._document = document
        self._known: dict[str, object] = {}

    def filled(self, value: object) -> object:
        """Return a value with the references in its texts filled in."""
        match value:
            case Lined():
                filled = {key: self.filled(inner) for key, inner in value.items()}
                return Lined(filled, value.place, value.places)
            case dict():
                return {key: self.filled(inner) for key, inner in value.items()}
            case list():
                return [self.filled(inner) for inner in value]
            case str():
                return self._text(value)
            case _:
                return value

    def _text(self, text: str) -> object:
        if whole := _NAMED.fullmatch(text):
            return self._value_of(whole[1])
        filled = _NAMED.sub(lambda named: str(self._value_of(named[1])), text)
        # Limited, because texts that each refer twice to the next would double in length at every level.
        return filled if len(filled) <= _LONGEST else text

    def _value_of(self, key: str) -> object:
        """Return the plain value of a key, or the reference itself if the key has no plain value."""
        if key not in self._known:
            self._known[key] = f"${{{key}}}"  # the result for a text that refers to itself
            found: object = self._document
            for part in key.split("."):
                found = found.get(part, {}) if isinstance(found, dict) else {}
            if not isinstance(found, dict | list):
                self._known[key] = self.filled(found)
        return self._known[key]


def _tree(text: str, name: str) -> Node | None:
    """Return the tree of JSON, as far as it is valid YAML."""
    if len(text) > LARGEST_TEXT_BYTES:
        return None
    try:
        return compose(text, name=name)
    except ConfigError:
        return None


def _lined(value: object, node: Node | None) -> object:
    """Return a value whose mappings know their lines, as far as ``node`` contains them."""
    if node is None:
        return value
    match value, node.content:
        case dict(), dict() as entries:
            below = {key: entry[1] for key, entry in entries.items()}
            return Lined(
                {key: _lined(inner, below.get(key)) for key, inner in value.items()},
                (node.file, node.line),
                {key: (node.file, line) for key, (line, _) in entries.items()},
            )
        case list(), list() as items:
            return [_lined(inner, item) for inner, item in zip(value, items, strict=True)]
        case _:
            return value
