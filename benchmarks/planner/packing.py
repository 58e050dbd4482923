"""Share of padding in the rows, on real documents, by way of packing and by batch size.

python -m benchmarks.planner.packing --help
"""

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.planned_steps import Lengths, steps_of
from benchmarks.report import Table, print_table, write_report
from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable
from omniload.source.record_source import open_source
from omniload.source.sample_data.corpus import SampleCorpus, build_sample_corpus
from omniload.source.spec import SourceSpec

__all__ = ["main"]

_LENGTH = 8_192
BEST_FIT = "omniload best_fit"
SPLIT = "omniload concat_and_split"
FIRST_FIT = "first fit in order"
NEXT_FIT = "next fit in order"
PAD = "a row a document"


@dataclass(frozen=True, slots=True)
class Waste:
    """Result of a way of packing for the pieces that it was given."""

    padding: float
    """Part of the rows without tokens."""
    cut: float
    """Part of the documents that fit a row and were cut nevertheless."""


def first_fit(lengths_P: Sequence[int], num_rows: int, capacity: int) -> list[list[int]]:
    """Fill ``num_rows`` rows at a time, each document into the first row with room; a full batch starts anew."""
    batches: list[list[int]] = []
    rooms: list[int] = []
    for length in lengths_P:
        at = next((row for row, room in enumerate(rooms) if room >= length), None)
        if at is None:
            batches.append([])
            rooms = [capacity] * num_rows
            at = 0
        rooms[at] -= length
        batches[-1].append(length)
    return batches


def next_fit(lengths_P: Sequence[int], num_rows: int, capacity: int) -> list[list[int]]:
    """Fill one row at a time; a document that does not fit begins the next one."""
    del num_rows  # rows are independent
    rows: list[list[int]] = []
    room = 0
    for length in lengths_P:
        if length > room:
            rows.append([])
            room = capacity
        room -= length
        rows[-1].append(length)
    return rows


def one_each(lengths_P: Sequence[int], num_rows: int, capacity: int) -> list[list[int]]:
    """Give every document a row."""
    del num_rows, capacity
    return [[length] for length in lengths_P]


Packer = Callable[[Sequence[int], int, int], list[list[int]]]
BASELINES: Mapping[str, tuple[Packer, bool]] = {
    # The flag is true if a group of documents is a batch, and false if it is a row.
    FIRST_FIT: (first_fit, True),
    NEXT_FIT: (next_fit, False),
    PAD: (one_each, False),
}


def waste_of(name: str, lengths_P: Sequence[int], rows: int, capacity: int) -> Waste:
    """Pack pieces in their order by one of the baselines; the last group may be short and is left out."""
    packer, by_batch = BASELINES[name]
    groups = packer(lengths_P, rows, capacity)[: -1 if by_batch else None]
    size = len(groups) * capacity * (rows if by_batch else 1)
    return Waste(padding=1 - sum(map(sum, groups)) / max(size, 1), cut=0.0)


def mix_of(
    names: Sequence[str], tokens_S: NDArray[np.float64], rows: int, method: str
) -> MixConfig:
    """Return a mix that draws sources by their size."""
    source = {"type": "parquet", "path": "x", "tokens": "x"}
    weights = dict(zip(names, tokens_S.tolist(), strict=True))
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 1,
            "sources": dict.fromkeys(names, source),
            "mix": {"stages": [{"from_step": 0, "weights": weights}]},
            "pack": {"length": _LENGTH, "method": method},
            "batch": {"tokens": rows * _LENGTH, "micro_tokens": _LENGTH},
        }
    )


def packed(
    lengths: Mapping[str, Lengths], rows: int, method: str, num_rows: int
) -> tuple[Waste, list[PieceTable]]:
    """Pack ``num_rows`` rows step by step as the planner does; return also the pieces of each step."""
    tokens_S = np.array([float(column.lengths_N.sum()) for column in lengths.values()])
    mix = mix_of(list(lengths), tokens_S, rows, method)
    steps = itertools.islice(steps_of(mix, list(lengths.values())), -(-num_rows // rows))
    pieces = [membership.pieces for _, membership in steps]
    used = sum(int(table.lengths_P.sum()) for table in pieces)
    return Waste(padding=1 - used / (len(pieces) * rows * _LENGTH), cut=cut_part(pieces)), pieces


def cut_part(pieces: Sequence[PieceTable]) -> float:
    """Return the share of cut documents among those no longer than a row."""
    table = PieceTable.concatenated(list(pieces))
    short = table.sizes_P <= _LENGTH
    keys = np.column_stack((table.sources_P, table.positions_P, table.subs_P))[short]
    whole = (table.lengths_P == table.sizes_P)[short]
    documents = np.unique(keys, axis=0)
    return len(np.unique(keys[~whole], axis=0)) / max(len(documents), 1)


def lengths_of(corpus: SampleCorpus) -> dict[str, Lengths]:
    """Return the token counts of all documents of the corpus, in the order in which they are drawn."""
    config: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "sources": {source.name: source.config for source in corpus.sources},
        "mix": {"stages": [{"from_step": 0, "weights": {s.name: 1 for s in corpus.sources}}]},
        "pack": {"length": _LENGTH},
        "batch": {"tokens": _LENGTH, "micro_tokens": _LENGTH},
        "tokenizer": corpus.tokenizer.model_dump(),
    }
    mix = MixConfig.model_validate(config)
    found = {}
    for name in mix.names:
        source = open_source(
            SourceSpec(
                name, mix.sources[name], seed=1, tokenizer=mix.tokenizer, base_dir=corpus.folder
            )
        )
        found[name] = Lengths(source.read(0, source.positions_per_epoch).table.lengths_N)
    return found


def measured(lengths: Mapping[str, Lengths], rows: int, num_rows: int) -> dict[str, Waste]:
    """Return the waste of every way of packing; the baselines get the pieces of best fit, step by step, shuffled."""
    best, steps = packed(lengths, rows, "best_fit", num_rows)
    split, _ = packed(lengths, rows, "concat_and_split", num_rows)
    rng = np.random.default_rng(0)
    in_order = np.concatenate([rng.permutation(table.lengths_P) for table in steps]).tolist()
    others = {name: waste_of(name, in_order, rows, _LENGTH) for name in BASELINES}
    return {BEST_FIT: best, SPLIT: split, **others}


READING = """\
best_fit, the default, wastes {least:.2f} to {most:.2f} % of rows of {length:,} tokens and cuts no document that fits
a row (batches of {small} to {large} rows). It chooses among documents for one row more than it fills and carries the
rest over, oldest first. Filling the rows of a batch with documents in their order, each into the first row with room,
wastes {first:.1f} to {first_most:.1f} %. Filling one row after the other wastes {next:.1f} to {next_most:.1f} %. A
row for every document wastes {pad:.0f} %. concat_and_split wastes nothing and cuts {cut:.0f} % of the documents that
would fit a row. The corpus is made from the Python installation: {documents:,} documents, {tokens:.1f} million
tokens, the longest of {longest:,}; sources are drawn by their size. In all methods, longer documents are first cut
into rows. First fit is measured over whole batches."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--num-rows", default=4_096, show_default=True, type=click.IntRange(1), help="Rows to pack."
)
@click.option("--size", default=12 << 20, show_default=True, help="Bytes of text in the corpus.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps the corpus.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(num_rows: int, size: int, folder: Path | None, report: bool) -> None:
    """Compare ways of packing on the sample corpus.

    \b
    Example:
      python -m benchmarks.planner.packing --folder demo/corpus --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        corpus = build_sample_corpus(folder or Path(made) / "corpus", size=size)
        lengths = lengths_of(corpus)
    sizes = [rows for rows in (4, 8, 16, 32, 64, 256) if rows <= num_rows]
    found = {rows: measured(lengths, rows, num_rows) for rows in sizes}
    table = Table(
        columns=("rows a step", *next(iter(found.values())), "documents cut by concat_and_split"),
        rows=tuple(
            (
                str(rows),
                *(f"{waste.padding * 100:.2f} %" for waste in by_name.values()),
                f"{by_name[SPLIT].cut * 100:.1f} %",
            )
            for rows, by_name in found.items()
        ),
        caption=f"Padding in rows of {_LENGTH:,} tokens, {num_rows:,} rows",
    )
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "packing",
            "Waste of packing real documents",
            f"python -m benchmarks.planner.packing --num-rows {num_rows} --size {size}",
            [table],
            reading_of(found, lengths),
        )
        click.echo(f"wrote {path.name}")


def reading_of(found: Mapping[int, Mapping[str, Waste]], lengths: Mapping[str, Lengths]) -> str:
    """Return the reading of the figures."""

    def part(name: str) -> list[float]:
        return [by_name[name].padding * 100 for by_name in found.values()]

    all_lengths = np.concatenate([column.lengths_N for column in lengths.values()])
    return READING.format(
        least=min(part(BEST_FIT)),
        most=max(part(BEST_FIT)),
        length=_LENGTH,
        small=min(found),
        large=max(found),
        first=min(part(FIRST_FIT)),
        first_most=max(part(FIRST_FIT)),
        next=min(part(NEXT_FIT)),
        next_most=max(part(NEXT_FIT)),
        pad=max(part(PAD)),
        cut=max(by_name[SPLIT].cut for by_name in found.values()) * 100,
        documents=len(all_lengths),
        tokens=all_lengths.sum() / 1e6,
        longest=int(all_lengths.max()),
    ).replace("\n", " ")


if __name__ == "__main__":
    main()
