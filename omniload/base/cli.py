"""The ``omniload`` command: nouns come from entry points, so the floor imports nothing above it.

Exit codes: 0 done, 2 configuration, 3 unavailable, 4 state, 5 integrity; 130 interrupted.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NoReturn

import click
from typing_extensions import override

from omniload import __version__
from omniload.base.errors import OmniloadError
from omniload.base.log import set_up_logging

__all__ = ["main"]

_GROUP = "omniload.commands"


class Nouns(click.Group):
    """A group whose commands are the installed entry points, loaded when named."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(point.name for point in entry_points(group=_GROUP))

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for point in entry_points(group=_GROUP, name=cmd_name):
            command = point.load()
            assert isinstance(command, click.Command), (
                f"entry point {point.value} is not a click command"
            )
            return command
        return None


@click.group(cls=Nouns, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="omniload")
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]),
)
def omniload(log_level: str) -> None:
    """The data plane of large-model training.

    \b
    Example:
      omniload mix check examples/quickstart.yaml
    """  # noqa: D301 -- click's own marker
    set_up_logging(log_level)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code its errors carry."""
    try:
        code = omniload.main(
            args=None if arguments is None else list(arguments), standalone_mode=False
        )
    except OmniloadError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        click.echo(f"error: {error}{notes}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
