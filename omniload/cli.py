"""``omniload mix``: look at a mix of sources before, during and after a run, and change it meanwhile."""

import click

from omniload.base.cli import Verbs

__all__ = ["command"]

_PLACES = {
    "add": "omniload.commands.edits.verbs:add",
    "audit": "omniload.commands.runs.audit:audit",
    "bench": "omniload.commands.bench:bench",
    "check": "omniload.commands.check:check",
    "diff": "omniload.commands.runs.diff:diff",
    "doctor": "omniload.commands.runs.doctor:doctor",
    "import": "omniload.commands.import_:import_mix",
    "plan": "omniload.commands.plan:plan",
    "preview": "omniload.commands.preview:preview",
    "retire": "omniload.commands.edits.verbs:retire",
    "sample": "omniload.commands.sample:sample",
    "schema": "omniload.commands.schema:schema",
    "set": "omniload.commands.edits.verbs:set_weights",
    "show": "omniload.commands.runs.show:show",
    "simulate": "omniload.commands.simulate:simulate",
    "skip": "omniload.commands.edits.verbs:skip",
    "stats": "omniload.commands.stats:stats",
    "steer": "omniload.commands.edits.steer:steer",
    "top": "omniload.commands.runs.top:top",
    "undo": "omniload.commands.edits.verbs:undo",
    "watch": "omniload.commands.edits.watch:watch",
}
"""Where each verb lies: a command that reads a file does not load what opens a data plane."""


@click.group(name="mix", cls=Verbs, places=_PLACES)
def command() -> None:
    """Declare, inspect and audit a mix of sources.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload mix check examples/quickstart.yaml
    """  # noqa: D301 -- click's own marker
