"""``omniload mix schema``: every key of a mix file, for editors and readers."""

import click

from omniload.commands.display import emit_json
from omniload.mix.schema.json_schema import mix_schema

__all__ = ["schema"]


@click.command
def schema() -> None:
    """Print the JSON schema of a mix file: every key, its meaning, range and default.

    An editor checks a file whose first line names the schema: # yaml-language-server: $schema=mix.schema.json

    \b
    Example:
      omniload mix schema > mix.schema.json
    """  # noqa: D301 -- click's own marker
    emit_json(mix_schema())
