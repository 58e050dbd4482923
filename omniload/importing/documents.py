"""Files of other tools, read: YAML without its tags, JSON, or plain text; mappings know their lines."""

import json
import re
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.base.settings.tree import LARGEST_TEXT_BYTES, Node, compose

__all__ = ["Lined", "Place", "interpolated", "parsed"]

_NAMED = re.compile(r"\$\{([^${}:]+)\}")
"""A key of the file in the words of OmegaConf: ``${variables.max_seq_len}``."""
_LONGEST = 4096
"""Letters of a text with what it names."""

Place: TypeAlias = tuple[str, int]
"""A file, as messages call it, and a line of it, from 1."""


class Lined(dict[str, object]):
    """A mapping of a file that knows where it and its keys stand."""

    def __init__(self, content: dict[str, object], place: Place, places: dict[str, Place]) -> None:
        super().__init__(content)
        self.place, self.places = place, places


def parsed(text: str, name: str) -> object:
    """Return what a file holds: a mapping or a list of YAML or JSON, or else its text.

    Mappings are ``Lined``, but for JSON that is larger than any settings, whose lines are not looked for.

    Raises:
        ConfigError: It begins as JSON and is none, or is no YAML.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            # Not as YAML, which forbids tabs, and is held to the size of settings.
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: is no JSON: {error!s:.200}") from error
        return _lined(content, _tree(text, name))
    root = compose(text, name=name)
    return None if root is None else _lined(root.value, root)


def interpolated(document: object) -> object:
    """Return a document with ``${a.b}`` in its texts replaced by the value of the key ``a.b``, as OmegaConf does.

    What names no plain value of the file stays as it is written: ``${oc.env:HOME}``, a mapping, a text that names
    itself.
    """
    return _Named(document).filled(document)


class _Named:
    """The plain values of a document by their keys, each looked for once, however many texts name it."""

    def __init__(self, document: object) -> None:
        self._document = document
        self._known: dict[str, object] = {}

    def filled(self, value: object) -> object:
        """Return a value with what its texts name."""
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
        # A key that names another twice, and so on down, would double at every one.
        return filled if len(filled) <= _LONGEST else text

    def _value_of(self, key: str) -> object:
        """Return the plain value of a key, or the text that names it where it has none."""
        if key not in self._known:
            self._known[key] = f"${{{key}}}"  # what a text that names itself comes upon
            found: object = self._document
            for part in key.split("."):
                found = found.get(part, {}) if isinstance(found, dict) else {}
            if not isinstance(found, dict | list):
                self._known[key] = self.filled(found)
        return self._known[key]


def _tree(text: str, name: str) -> Node | None:
    """Return the tree of JSON, as far as it is YAML."""
    if len(text) > LARGEST_TEXT_BYTES:
        return None
    try:
        return compose(text, name=name)
    except ConfigError:
        return None


def _lined(value: object, node: Node | None) -> object:
    """Return a value whose mappings know their lines, as far as ``node`` holds them."""
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
