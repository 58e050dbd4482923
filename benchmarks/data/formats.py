"""Speed of a source that reads the same documents from each format, compared with parquet.

python -m benchmarks.data.formats --help
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from pydantic import TypeAdapter

from benchmarks.data.format_shards import TEXT_FORMATS, TOKEN_FORMATS, StoredFormat, documents_of
from benchmarks.report import Table, print_table, write_report
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import SourceConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

__all__ = ["Measured", "main", "measured", "table_of"]

_AT_ONCE = 256
_SHARDS = 4
_SOURCE: TypeAdapter[SourceConfig] = TypeAdapter(SourceConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One opening of a source and one epoch of it, on one thread."""

    open_cpu_s: float
    tokens: int
    wall_s: float
    cpu_s: float


def write_shards(folder: Path, form: StoredFormat, documents: int) -> int:
    """Write the shards of a format; return their size in bytes."""
    folder.mkdir()
    for shard in range(_SHARDS):
        form.write(folder / f"part-{shard}", documents_of(shard, documents))
    return sum(path.stat().st_size for path in folder.iterdir())


def measured(folder: Path, form: StoredFormat) -> Measured:
    """Open a source without an index, and read one epoch of it."""
    config = _SOURCE.validate_python({**form.source, "path": str(folder)})
    began = time.process_time()
    source = open_source(
        SourceSpec("s", config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=folder)
    )
    opened = time.process_time()
    tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
    for start in range(0, source.positions_per_epoch, _AT_ONCE):
        block = source.read(start, min(start + _AT_ONCE, source.positions_per_epoch))
        tokens += len(block.tokens.values_V)
    return Measured(
        open_cpu_s=opened - began,
        tokens=tokens,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
    )


def table_of(caption: str, found: Mapping[str, tuple[int, list[Measured]]]) -> Table:
    """Return medians, and the tokens that each format gives in one CPU second of parquet's."""
    rates = {
        name: median(each.tokens / each.cpu_s for each in runs) for name, (_, runs) in found.items()
    }
    first = next(iter(rates.values()))
    rows = tuple(
        (
            name,
            f"{size / (1 << 20):.0f}",
            f"{1_000 * median(each.open_cpu_s for each in runs) / _SHARDS:.1f}",
            f"{median(each.tokens / each.wall_s for each in runs) / 1e6:.0f}",
            f"{rates[name] / 1e6:.0f}",
            f"{rates[name] / first:.2f}",
        )
        for name, (size, runs) in found.items()
    )
    columns = (
        *("format", "MiB", "opening, CPU ms a shard"),
        *("million tokens/s", "million tokens a CPU second", "beside parquet"),
    )
    return Table(columns=columns, rows=rows, caption=caption)


READING = """\
Each format has the same {documents:,} documents in {shards} shards (log-normal, mean about 650 tokens or letters;
batches and row groups of 512 rows, other units of 4 MiB). A run opens the source without a kept index and reads one
epoch, shuffled within blocks, on one thread. Figures are medians of {repeats} runs, alternately, with files in the
page cache. Opening finds units and computes a digest of a shard: of all its bytes if records have to be searched for
(csv, jsonl, numpy with an end of document), of all headers and samples of the rest for webdataset, and of samples
elsewhere. With a kept index, opening has none of these costs. Text goes through the tokenizer of bytes, one token per
letter. Ids of 16 bits are widened to 32. WebDataset pays for a header of 512 bytes for every member, read by Python:
the longer its members, the smaller this cost. Other work ran on the machine, so the figures per CPU second are the
ones to compare."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repeats", default=7, show_default=True, type=click.IntRange(1), help="Runs of each format."
)
@click.option(
    "--documents", default=5_000, show_default=True, help="Documents in each of 4 shards."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, documents: int, report: bool) -> None:
    """Compare the formats of sources.

    \b
    Example:
      python -m benchmarks.data.formats --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    tables = []
    groups = (("Token ids", TOKEN_FORMATS), ("Text", TEXT_FORMATS))
    with tempfile.TemporaryDirectory() as made:
        for caption, forms in groups:
            folders = {name: Path(made) / f"{caption}-{i}" for i, name in enumerate(forms)}
            sizes = {n: write_shards(folders[n], form, documents) for n, form in forms.items()}
            found: dict[str, tuple[int, list[Measured]]] = {n: (sizes[n], []) for n in forms}
            for _ in range(repeats):
                for name, form in forms.items():
                    found[name][1].append(measured(folders[name], form))
            tables.append(table_of(caption, found))
            print_table(tables[-1])
    if report:
        reading = READING.format(documents=_SHARDS * documents, shards=_SHARDS, repeats=repeats)
        path = write_report(
            __file__,
            "formats",
            "Formats of sources beside parquet",
            f"python -m benchmarks.data.formats --repeats {repeats} --documents {documents}",
            tables,
            reading,
        )
        click.echo(str(path))


if __name__ == "__main__":
    main()
