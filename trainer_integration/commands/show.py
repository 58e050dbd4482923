"""``omniload train show``: the results of a run."""

from dataclasses import asdict
from pathlib import Path

import click
import orjson
from rich.console import Console

from trainer_integration.commands.run_folder import folder_of, run_argument
from trainer_integration.report.display import print_proof, print_summary
from trainer_integration.report.report import read_finished, write_report

__all__ = ["show"]


@click.command("show")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--html", is_flag=True, help="Also write the report again.")
@click.option(
    "--beside",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Another run to show in the report.",
)
def show(run: Path, as_json: bool, html: bool, beside: Path | None) -> None:
    """Show the results of RUN, a run's folder or its training file.

    \b
    Example:
      omniload train show demo/run
      omniload train show examples/train.yaml --json
      omniload train show demo/run --html --beside demo/run-before
    """  # noqa: D301 -- click's own marker
    folder = folder_of(run)
    finished = read_finished(folder)
    # Another run is shown only in the report.
    if html or beside is not None:
        write_report(folder, beside=None if beside is None else folder_of(beside))
    if as_json:
        proved = None if finished.proof is None else finished.proof.holds
        content = asdict(finished.summary) | {"proved": proved}
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console()
    print_summary(console, finished.summary)
    if finished.proof is not None:
        print_proof(console, finished.proof)
