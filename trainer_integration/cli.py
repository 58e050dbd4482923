"""``omniload train``: run the included trainer, prove a run, show its results."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_VERBS = {
    "crossover": (
        "trainer_integration.commands.crossover:crossover",
        "Measure on this host whether a2a or ag_rs is faster for the layers of CONFIG; write OUTPUT.",
    ),
    "export": (
        "trainer_integration.commands.export:export",
        "Write the model of RUN to FOLDER as a Hugging Face Mixtral, with the tokenizer of its mix.",
    ),
    "run": (
        "trainer_integration.commands.run:run_job",
        "Train as described in CONFIG: data plane, ranks, restarts, report.",
    ),
    "sample": (
        "trainer_integration.commands.sample:sample",
        "Print the text with which the model of RUN continues a prompt.",
    ),
    "schema": (
        "trainer_integration.commands.schema:schema",
        "Print the JSON schema of a training file: every key, its meaning, range and default.",
    ),
    "show": (
        "trainer_integration.commands.show:show",
        "Show the results of RUN, a run's folder or its training file.",
    ),
    "verify": (
        "trainer_integration.commands.verify:verify",
        "Prove that RUN, however often it was interrupted, saw the samples of an uninterrupted run.",
    ),
    "watch": (
        "trainer_integration.commands.watch:watch",
        "Watch the progress of RUN, a run's folder or its training file.",
    ),
}
"""Module of each verb, and its line in ``--help``.

A verb that only looks at a run loads neither launcher nor data plane.
"""


@click.group("train", cls=Verbs, verbs=_VERBS)
def command() -> None:
    """Train the included MoE model through the data plane.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload train run examples/train.yaml
      omniload train verify demo/run
    """  # noqa: D301 -- click's own marker
