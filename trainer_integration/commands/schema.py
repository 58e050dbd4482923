"""``omniload train schema``: every key of a training file, for editors and readers."""

import click

from omniload.commands.display import emit_json
from omniload.mix.schema.json_schema import file_schema
from trainer_integration.config import TrainConfig

__all__ = ["schema"]


@click.command
def schema() -> None:
    """Print the JSON schema of a training file: every key, its meaning, range and default.

    An editor checks a file whose first line names the schema: # yaml-language-server: $schema=train.schema.json

    \b
    Example:
      omniload train schema > train.schema.json
    """  # noqa: D301 -- click's own marker
    emit_json(file_schema(TrainConfig, kind="train", version=1))
