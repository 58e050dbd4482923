"""``omniload train``: run the included trainer, prove a run, show what it came to."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_PLACES = {
    "crossover": "trainer_integration.commands.crossover:crossover",
    "export": "trainer_integration.commands.export:export",
    "run": "trainer_integration.commands.run:run_job",
    "sample": "trainer_integration.commands.sample:sample",
    "schema": "trainer_integration.commands.schema:schema",
    "show": "trainer_integration.commands.show:show",
    "verify": "trainer_integration.commands.verify:verify",
    "watch": "trainer_integration.commands.watch:watch",
}
"""Where each verb lies: one that looks at a run loads neither launcher nor data plane."""


@click.group("train", cls=Verbs, places=_PLACES)
def command() -> None:
    """Train the included MoE model through the data plane."""
