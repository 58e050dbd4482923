"""Files and mix files that are damaged at random, by format: the outcome for each, and other losses.

python -m benchmarks.data.bad_inputs --help
"""

import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from benchmarks.report import Table, print_table, write_report
from tests.support.fusefs.gcs import BUCKET, gcs_server
from tests.support.fusefs.s3 import s3_server
from tests.support.plane.sources.bad_inputs import SPOILT, Outcomes, spoilt_mixes, spoilt_shards
from tests.support.plane.sources.in_stores import clients_told

__all__ = ["main", "table_of"]


def table_of(what: str, found: Mapping[str, Outcomes]) -> Table:
    """Return the outcomes of the inputs of each kind."""
    rows = [
        (
            name,
            each.cases,
            each.how["refused"],
            each.how["skipped"],
            each.how["read"],
            len(each.nameless),
            len(each.lost),
            f"{each.longest_s:.2f}",
        )
        for name, each in found.items()
    ]
    every = ("all", *(sum(row[i] for row in rows) for i in range(1, 7)))
    longest = max(each.longest_s for each in found.values())
    return Table(
        columns=(
            *("kind", what, "refused", "records skipped and counted", "valid as it is"),
            *("errors without a place", "other records lost", "longest, s"),
        ),
        rows=(*rows, (*every, f"{longest:.2f}")),
        caption=f"{what}: no hang, no traceback",
    )


def _stored(cases: int) -> dict[str, Outcomes]:
    """Damage shards in a bucket of S3, moto's server, and in one of an emulator of Cloud Storage."""
    found = {}
    with tempfile.TemporaryDirectory() as made, ExitStack() as servers:
        folder = Path(made)
        for each in ("s3", "gcs"):
            (folder / each).mkdir()
        s3 = servers.enter_context(s3_server(folder / "s3"))
        s3.client.create_dir("bad")
        told = {"key": "k", "secret": "s", "endpoint_url": f"http://{s3.address}"}
        servers.enter_context(clients_told("s3", **told))
        gcs = servers.enter_context(gcs_server(folder / "gcs"))
        servers.enter_context(clients_told("gs", token="anon", endpoint_url=gcs))
        for number, (store, root) in enumerate({"S3": "s3://bad", "GCS": f"gs://{BUCKET}"}.items()):
            for name in IN_STORES:
                kept = folder / f"{store}-{name}"
                kept.mkdir()
                rng = np.random.default_rng((number, 1))
                found[f"{name}, {store}"] = spoilt_shards(SPOILT[name](), kept, rng, cases, root)
    return found


IN_STORES = ("parquet-columns", "jsonl-gz-entered", "mds-columns", "csv", "webdataset")
"""Kinds that are damaged in stores too: one for each way to request ranges."""
READING = """\
One of two shards is damaged: a number in it is replaced, bytes are flipped, removed or doubled, or the rest is cut
off. The source leaves out and counts the records that it cannot read (`on_error: skip`), and the other shard must
come whole. In a mix file with a source of the kind, one to three keys or values are damaged, and in half of the cases
its text is cut off or gets a random character. Shards of Lance are left out, because its library may end the process
at altered bytes. The measurement ends if a read raises an error that is not ours, or takes more than 30 s."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cases", default=200, show_default=True, type=click.IntRange(1), help="Inputs of each kind."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(cases: int, report: bool) -> None:
    """Damage inputs of every format.

    \b
    Example:
      python -m benchmarks.data.bad_inputs --cases 20 --no-report
    """  # noqa: D301 -- click's own marker
    logging.disable()
    shards: dict[str, Outcomes] = {}
    mixes: dict[str, Outcomes] = {}
    for number, (name, kind) in enumerate(SPOILT.items()):
        rng = np.random.default_rng(number)
        if getattr(kind, "takes_damage", True):
            with tempfile.TemporaryDirectory() as made:
                shards[name] = spoilt_shards(kind(), Path(made), rng, cases)
        with tempfile.TemporaryDirectory() as made:
            mixes[name] = spoilt_mixes(kind(), Path(made), rng, cases)
    tables = [
        table_of("spoilt shards", shards),
        table_of("spoilt shards in a store", _stored(cases)),
        table_of("spoilt mix files", mixes),
    ]
    for table in tables:
        print_table(table)
    if report:
        path = write_report(
            __file__,
            "bad_inputs",
            "Spoilt files and mix files of every format",
            f"python -m benchmarks.data.bad_inputs --cases {cases}",
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
