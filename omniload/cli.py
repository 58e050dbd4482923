"""``omniload mix``: look at a mix of sources before, during and after a run, and change it meanwhile."""

import click

from omniload.commands.bench import bench
from omniload.commands.check import check
from omniload.commands.edits.verbs import add, retire, set_weights, skip, undo
from omniload.commands.import_ import import_mix
from omniload.commands.plan import plan
from omniload.commands.preview import preview
from omniload.commands.runs.audit import audit
from omniload.commands.runs.diff import diff
from omniload.commands.runs.show import show
from omniload.commands.runs.top import top
from omniload.commands.sample import sample
from omniload.commands.schema import schema
from omniload.commands.stats import stats

__all__ = ["command"]


@click.group(name="mix")
def command() -> None:
    """Declare, inspect and audit a mix of sources.

    \b
    Example:
      omniload mix sample demo/corpus
      omniload mix check examples/quickstart.yaml
    """  # noqa: D301 -- click's own marker


for _verb in (
    add,
    audit,
    bench,
    check,
    diff,
    import_mix,
    plan,
    preview,
    retire,
    sample,
    schema,
    set_weights,
    show,
    skip,
    stats,
    top,
    undo,
):
    command.add_command(_verb)
