"""``omniload fs verify``: check that every object that a manifest names exists and is complete."""

import click

from fusefs.commands.store_options import opened
from fusefs.stores.url import check_root
from fusefs.tools.display import show_report
from fusefs.tools.export import require_no_mount
from fusefs.tools.fsck import verify
from omniload.base.cli import FiniteRange
from omniload.base.errors import IntegrityError
from omniload.base.units import counted

__all__ = ["verify_command"]


@click.command("verify")
@click.argument("store")
@click.option("--repair", is_flag=True, help="Finish interrupted replacements, and remove orphans.")
@click.option("--read-data", is_flag=True, help="Read every unit and compare its checksum.")
@click.option(
    "--grace",
    type=FiniteRange(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds that a write may take.",
)
@click.option("--json", "as_json", is_flag=True)
def verify_command(store: str, repair: bool, read_data: bool, grace: float, as_json: bool) -> None:
    """Check that every object that a manifest of STORE names is present and complete.

    \b
    Example:
      omniload fs verify hdfs://namenode:9000/jobs --read-data
    """  # noqa: D301 -- click's own marker
    require_no_mount(store)
    files = opened(store)
    try:
        check_root(files.store)
        report = verify(files, read_data=read_data, repair=repair, grace_s=grace)
    finally:
        files.close()
    show_report(report, as_json=as_json)
    if report.harmful:
        raise IntegrityError(
            f"{counted(len(report.harmful), 'fault')} cost data; restore those files"
        )
