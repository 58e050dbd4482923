"""Files of other tools, read: YAML without its tags, JSON, or plain text; mappings know their lines."""

import json
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.base.settings.tree import LARGEST_TEXT_BYTES, Node, compose

__all__ = ["Lined", "Place", "parsed"]

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
