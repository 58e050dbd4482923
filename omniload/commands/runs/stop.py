"""``omniload mix stop``: ends the data plane of a run that outlives its job."""

from pathlib import Path

import click

from omniload.base.errors import StateError
from omniload.base.extras import missing_extra
from omniload.commands.display import output, say
from omniload.commands.options import run_argument
from omniload.mix.run_record import read_run_record

__all__ = ["stop"]


@click.command
@run_argument
def stop(run: Path) -> None:
    """End the detached data plane of RUN, which outlives its job (runtime.lifetime).

    The command looks for the plane in the Ray that runtime.address of the run's mix names; if that is auto, run it on a
    machine of that Ray. Connected ranks are notified that the plane has ended. A later start of the job opens a new
    plane, with the same samples.

    \b
    Example:
      omniload mix stop demo/run
    """  # noqa: D301 -- click's own marker
    runtime = read_run_record(run).last.mix().runtime
    if runtime.lifetime != "detached":
        raise StateError(
            f"the run of {run} has runtime.lifetime {runtime.lifetime!r}: its data plane ends with the process that "
            "opened it; end that process"
        )
    try:
        from omniload.actors.ray.given.detached import stop_detached  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise missing_extra("a detached data plane", error) from error
    found = stop_detached(run, runtime.address)
    say(output(), f"the detached data plane of {run} has ended; {found}")
