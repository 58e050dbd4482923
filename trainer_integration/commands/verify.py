"""``omniload train verify``: proves that a run, despite interruptions, saw the samples of an unbroken run."""

from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trainer_integration.commands.run_folder import folder_of, report_of, run_argument
from trainer_integration.report.display import print_proof
from trainer_integration.report.proof import Proof, prove

__all__ = ["verify"]


@click.command("verify")
@run_argument
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First step to replay; the run's journal gives the state at that step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def verify(run: Path, from_step: int, as_json: bool) -> None:
    """Prove that RUN, however often it was interrupted, saw the samples of an uninterrupted run.

    RUN is a run's folder or its training file. The mix is replayed on one rank without training. The digest of every
    step must equal the logged one, in each attempt. If a step differs, the exit code is 5.

    \b
    Example:
      omniload train verify demo/run
      omniload train verify examples/train.yaml --from-step 40
    """  # noqa: D301 -- click's own marker
    folder = folder_of(run)
    proof = _proved(folder, from_step)
    if as_json:
        content = proof.model_dump(mode="json") | {"holds": proof.holds}
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    else:
        print_proof(Console(), proof)
        report_of(folder)
    # After the table, so that the difference is shown before the exit code reports it.
    proof.require()


def _proved(folder: Path, from_step: int) -> Proof:
    # On standard error, because the output may be JSON.
    console = Console(stderr=True)
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("replaying", total=None)
        return prove(
            folder,
            from_step=from_step,
            tell=lambda done, total: progress.update(task, completed=done, total=total),
        )
