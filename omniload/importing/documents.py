"""Files of other tools, read: YAML without its tags, JSON, or plain text."""

import json

from omniload.base.errors import ConfigError
from omniload.base.settings.tree import compose

__all__ = ["parsed"]


def parsed(text: str, name: str) -> object:
    """Return what a file holds: a mapping or a list of YAML or JSON, or else its text.

    Raises:
        ConfigError: It begins as JSON and is none, or is no YAML.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: is no JSON: {error!s:.200}") from error
    root = compose(text, name=name)
    return None if root is None else root.value
