"""``omniload mix``: look at a mix of sources before, during and after a run."""

import click

from omniload.commands.check import check
from omniload.commands.plan import plan

__all__ = ["command"]


@click.group(name="mix")
def command() -> None:
    """Declare, inspect and audit a mix of sources.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload mix check examples/quickstart.yaml
    """  # noqa: D301 -- click's own marker


for _verb in (check, plan):
    command.add_command(_verb)
