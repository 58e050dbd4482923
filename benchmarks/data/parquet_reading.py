"""Text of Parquet and of compressed JSON lines, read per core: omniload compared with pyarrow's own readers.

python -m benchmarks.data.parquet_reading --help
"""

# First, because it sets how Arrow keeps freed memory, as in a loader; Arrow reads this setting once, when it is
# loaded.
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.linux.huge_pages import spare_host

# isort: split
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.data.libraries import documents_of, even_texts, rates_of
from benchmarks.data.library_ways import batch_ways, lines_ways
from benchmarks.data.reading_parts import PARTS, SAME, parts_of
from benchmarks.report import Table, print_table, write_report

__all__ = [
    "Case",
    "cases_of",
    "main",
    "ratios_of",
    "table_of_parts",
    "table_of_ratios",
    "write_case",
]

_LETTERS = (50, 2_000, 50_000)
_CODECS = ("none", "snappy", "zstd")
_SOURCE_MIB = 24
_DISTINCT = 16
"""Documents of a file that is written as a dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of file."""

    letters: int
    """Letters of a document, most of them of one byte."""
    codec: str
    """Compression of pages; lines are compressed with zstd."""
    group_mib: int
    """Size of a row group, as text; 0 for lines."""
    mib: int
    """Size of the file, as text."""
    dictionary: bool = False
    """Whether there are few distinct texts, written as a dictionary."""

    @property
    def records(self) -> int:
        """Documents of the file."""
        return max(1, (self.mib << 20) // self.letters)

    def __str__(self) -> str:
        if not self.group_mib:
            return f"{self.letters:,} letters, jsonl.zst"
        written = ", dictionary" if self.dictionary else ""
        return f"{self.letters:,} letters, {self.codec}{written}, groups of {self.group_mib} MiB"


def cases_of(mib: int, *, large: bool) -> Iterator[Case]:
    """Return the kinds of files of ``mib`` MiB, and with ``large`` those of 256 MiB with row groups of 128."""
    for letters in _LETTERS:
        for codec in _CODECS:
            yield Case(letters=letters, codec=codec, group_mib=8, mib=mib)
        yield Case(letters=letters, codec="snappy", group_mib=8, mib=mib, dictionary=True)
        if large:
            yield Case(letters=letters, codec="zstd", group_mib=128, mib=256)
        yield Case(letters=letters, codec="zstd", group_mib=0, mib=mib)


def write_case(folder: Path, case: Case, texts: Sequence[str]) -> None:
    """Write one file of a kind by repeating ``texts`` until the file has its size."""
    documents = even_texts(texts, case.letters)
    if case.dictionary:
        documents = documents[:_DISTINCT]
    count = case.records
    column = list(itertools.islice(itertools.cycle(documents), count))
    if not case.group_mib:
        lines = (orjson.dumps({"id": i, "text": text}) + b"\n" for i, text in enumerate(column))
        (folder / "0.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines)))
        return
    pq.write_table(
        pa.table({"id": range(count), "text": column}),
        folder / "0.parquet",
        row_group_size=max(1, (case.group_mib << 20) // case.letters),
        compression=case.codec,
        use_dictionary=case.dictionary,
        dictionary_pagesize_limit=64 << 20,
    )


def ratios_of(rates: Mapping[str, Sequence[float]], ours: str, theirs: str) -> list[float]:
    """Return the ratio of ours to theirs for each turn: other work of the machine slows both of a turn alike."""
    return [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]


def table_of_ratios(caption: str, found: Mapping[Case, Mapping[str, Sequence[float]]]) -> Table:
    """Return, for each kind of file, the medians of ratios with their least and most, and pyarrow's rate."""
    _, *theirs = (name for name in next(iter(found.values())) if not name.startswith("shuffled"))
    ours = ("in order", "shuffled")
    return Table(
        columns=(
            "documents and file",
            *(f"{way}, over {name}" for name in theirs for way in ours),
            f"MB a CPU second, {theirs[0]}",
        ),
        rows=tuple(
            (
                str(case),
                *(_shown(ratios_of(rates, way, name)) for name in theirs for way in ours),
                f"{median(rates[theirs[0]]) / 1e6:.0f}",
            )
            for case, rates in found.items()
        ),
        caption=caption,
    )


def table_of_parts(found: Mapping[Case, Mapping[str, Mapping[str, float]]]) -> Table:
    """Return the time of each part of a read for a record, in both orders, by kind of file."""
    return Table(
        columns=("documents and file", "order", *PARTS, "together", SAME),
        rows=tuple(
            (str(case), order, *_each_record(case, parts))
            for case, orders in found.items()
            for order, parts in orders.items()
        ),
        caption="Microseconds a record, part by part",
    )


def _each_record(case: Case, parts: Mapping[str, float]) -> Iterator[str]:
    ours = [parts[part] for part in PARTS]
    for spent_s in (*ours, sum(ours), parts.get(SAME)):
        yield "" if spent_s is None else f"{spent_s * 1e6 / case.records:.3g}"


def _shown(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


NOTES = """\
Files are in the page cache, on one core. All ways run in {repeats} turns after a first one, and each way runs once
unmeasured right before it is measured. A ratio is one of processor times of one process within a turn, as the median
with the least and the most; above 1 omniload reads more. In the process Arrow keeps freed memory for a second, the C
library keeps up to 32 MiB of it, and there are no huge pages on a machine that returns memory to its host, as in
source loaders. Ours gives documents of about a megabyte at a time (65,536 of them at most), as the planner asks for
tokens, with their positions and with checked UTF-8, in the order of the file or shuffled within blocks of four row
groups; the time of the tokenizer is subtracted. Shuffled documents are views, so the cost of fetching each from its
place belongs to the tokenizer. pyarrow's iter_batches gives 65,536 rows at a time by default, also mapped with
memory_map=True, or 1,024; nothing is checked or shuffled. The time of a part is that of its functions within a read,
minus that of the functions they call. Decoding is Arrow's, or for lines that of zstd and the parser; texts of Parquet
are checked while they are laid end to end. The same duties by pyarrow alone are a row group decoded as a whole,
validated, copied without the spare memory that its decoder leaves, and shown in parts. Shuffled, they are four row
groups as one array, taken in an order of numpy; that copies, because pyarrow takes no views. Load of the machine by
other work at the start: {load}."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--mib", default=64, show_default=True, type=click.IntRange(1, 1024))
@click.option(
    "--large/--no-large",
    default=True,
    show_default=True,
    help="Also measure row groups of 128 MiB.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, mib: int, large: bool, report: bool) -> None:
    """Compare a core's reading of text with pyarrow's own, by size of documents, codec and row groups.

    \b
    Example:
      python -m benchmarks.data.parquet_reading --repeats 3 --no-large --no-report
    """  # noqa: D301 -- click's own marker
    spare_host()
    keep_freed()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    texts = documents_of(_SOURCE_MIB << 20)
    found: dict[bool, dict[Case, dict[str, list[float]]]] = {False: {}, True: {}}
    parts = {}
    for case in cases_of(mib, large=large):
        with tempfile.TemporaryDirectory() as made:
            write_case(Path(made), case, texts)
            ways = (batch_ways if case.group_mib else lines_ways)(Path(made))
            found[not case.group_mib][case] = rates_of(ways, repeats, unmeasured=1)
            parts[case] = parts_of(Path(made), repeats)
        # Results are printed one by one, because all of them take some time.
        click.echo(
            " | ".join(table_of_ratios("", {case: found[not case.group_mib][case]}).rows[0]),
            err=True,
        )
    tables = [
        table_of_ratios("Parquet, one column of text", found[False]),
        table_of_ratios("JSON lines", found[True]),
        table_of_parts(parts),
    ]
    for table in tables:
        print_table(table)
    if report:
        path = write_report(
            __file__,
            "parquet_reading",
            "Reading text of Parquet and JSON lines, per core, beside pyarrow",
            f"python -m benchmarks.data.parquet_reading --repeats {repeats} --mib {mib}"
            f"{'' if large else ' --no-large'}",
            tables,
            NOTES.format(repeats=repeats, load=load).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
