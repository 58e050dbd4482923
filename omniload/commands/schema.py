"""``omniload mix schema``: every key of a mix file, for editors and readers."""

from typing import Any

import click

from omniload.base.settings.json_schema import json_schema_of
from omniload.commands.display import emit_json
from omniload.mix.config import MixConfig

__all__ = ["mix_schema", "schema"]


def mix_schema() -> dict[str, Any]:
    """Return the JSON schema of a mix file. Its ``$id`` changes with the version of the format."""
    schema = json_schema_of(MixConfig)
    file = {"type": "string", "minLength": 1}
    include = {
        "anyOf": [file, {"type": "array", "items": file, "minItems": 1}],
        "description": "Version 2: files whose keys are below those of this one; their names start at its folder.",
    }
    # What a file does not say, one that it includes may.
    whole = {
        "if": {"required": ["include"]},
        "then": {"required": ["version"]},
        "else": {"required": schema.pop("required")},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:omniload:mix:2",
        **schema,
        **whole,
        "properties": {"include": include, **schema["properties"]},
    }


@click.command
def schema() -> None:
    """Print the JSON schema of a mix file: every key, its meaning, range and default.

    An editor checks a file whose first line names it: # yaml-language-server: $schema=mix.schema.json

    \b
    Example:
      omniload mix schema > mix.schema.json
    """  # noqa: D301 -- click's own marker
    emit_json(mix_schema())
