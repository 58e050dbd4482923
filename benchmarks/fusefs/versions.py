"""Files that two mounts replace while processes on both read them: does every open show one whole version?

    python -m benchmarks.fusefs.versions --help

Readers on two mounts open, read and ``fstat`` a few files. Writers on both mounts rename new versions over the files,
and a writer on a third mount writes into them. Every eight bytes of a version contain its number, and each version
has a length of its own. So an open showed one whole version, or ESTALE, or it was wrong. The same race in short is a
test (``tests/integration/fusefs/vfs/test_versions.py``); this one is long.
"""

import shutil
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import click

from benchmarks.report import Table, print_table, write_report
from fusefs.mounts.lifecycle import mount
from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.versions import NAMES, race_over_mounts, wrong_in

__all__ = ["main"]

_BRIDGES = ("device", "pyfuse3")
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "striped": {"files": {"striping": {"unit": "8KiB", "count": 2}, "plain_limit": "4KiB"}},
}
_ABOUT = """\
An open shows one whole version, or reports ESTALE: at the open, if the file was replaced twice while it was opened,
or at a read, if the objects of its version are gone. Anything else would count as *wrong*: bytes of two versions,
zeros at the end, a size of another version. Each run has {readers} readers on each of two mounts of one local store
in memory, a writer on each that renames versions over {names} files, and one on a third mount that writes into one
of them; a writer rests {rest_ms} ms after each round."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--reads", default=200_000, show_default=True, help="Reads of each binding.")
@click.option("--readers", default=3, show_default=True, help="Readers on each of two mounts.")
@click.option("--bridge", "bridges", multiple=True, type=click.Choice(_BRIDGES), default=_BRIDGES)
@click.option(
    "--rest-ms", default=2.0, show_default=True, help="Rest of a writer after each round."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(reads: int, readers: int, bridges: tuple[str, ...], rest_ms: float, report: bool) -> None:
    """Race readers with writers over two mounts; exit with 1 if an open was wrong.

    \b
    Example:
      python -m benchmarks.fusefs.versions --reads 10000 --no-report
    """  # noqa: D301 -- click's own marker
    runs = [(bridge, kind) for bridge in bridges for kind in _KINDS]
    rows, num_wrong = [], 0
    for bridge, kind in runs:
        found, took_s = _raced(bridge, kind, reads * len(bridges) // len(runs), readers, rest_ms)
        wrong = wrong_in(found)
        num_wrong += sum(wrong.values())
        rows.append(
            (
                bridge,
                kind,
                f"{found['versions']:,}",
                f"{found['whole']:,}",
                f"{found['stale open']:,}",
                f"{found['stale read']:,}",
                ", ".join(f"{count:,} {what}" for what, count in wrong.items()) or "0",
                f"{took_s:.0f} s",
            )
        )
        click.echo(" ".join(rows[-1]))
    table = Table(
        columns=(
            "bridge",
            "files",
            "versions",
            "whole",
            "ESTALE at open",
            "at a read",
            "wrong",
            "in",
        ),
        rows=tuple(rows),
        caption=f"{reads:,} racing reads through each bridge",
    )
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "-".join(("fusefs_versions", *bridges)),
            "Racing reads of files that two mounts replace",
            " ".join(
                (
                    f"python -m benchmarks.fusefs.versions --reads {reads} --readers {readers}",
                    f"--rest-ms {rest_ms:g}",
                    *(f"--bridge {bridge}" for bridge in bridges),
                )
            ),
            [table],
            _ABOUT.format(readers=readers, names=len(NAMES), rest_ms=f"{rest_ms:g}"),
        )
        click.echo(f"wrote {path.name}")
    if num_wrong:
        raise SystemExit(1)


def _raced(
    bridge: str, kind: str, reads: int, readers: int, rest_ms: float
) -> tuple[Counter[str], float]:
    base = fast_directory("fusefs-versions-")
    try:
        with ExitStack() as mounted:
            (base / "store").mkdir()
            roots = []
            for name in ("first", "second", "third"):
                (base / name).mkdir()
                settings = {"bridge": bridge, **_KINDS[kind]}
                shown = mount(str(base / "store"), base / name, settings)
                roots.append(mounted.enter_context(shown))
            began_s = time.monotonic()
            found = race_over_mounts(roots, reads=reads, readers=readers, rest_s=rest_ms / 1000)
            return found, time.monotonic() - began_s
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
