"""One source of up to 1.3 billion documents: what a check, the first batch and the first index take.

python -m benchmarks.startup.large_source --help
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup.large_place import (
    GROUP,
    GROUPS,
    MIB,
    MILLION,
    STEP_DOCUMENTS,
    TOKENS,
    Place,
    state_at,
    write_documents,
    write_shards,
)

__all__ = ["Found", "main", "measured", "per_unit", "tables_of"]

_SHUFFLES = ("{method: block}", "{method: block, block_units: 64}", "{method: units}")
_FLAT_TOKENS, _DEDUPE_GROUPS = 8, 2_000
"""Tokens of a document in one file; row groups of the source whose documents are compared."""


def per_unit(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Return by how much a figure grows with each unit, from two pairs of a size and a figure."""
    return (large[1] - small[1]) / (large[0] - small[0])


@dataclass(slots=True)
class Found:
    """What was measured: rows of the tables, and by how much figures grow."""

    checks: list[tuple[str, ...]] = field(default_factory=list)
    openings: list[tuple[str, ...]] = field(default_factory=list)
    shuffles: list[tuple[str, ...]] = field(default_factory=list)
    flat: list[tuple[str, ...]] = field(default_factory=list)
    grows: list[tuple[str, ...]] = field(default_factory=list)


def measured(folder: Path, shards: Sequence[int], millions: Sequence[int], repeats: int) -> Found:
    """Measure sources of each number of shards, and of each number of millions of documents in one file."""
    found = Found()
    _measure_parquet(found, folder, shards, repeats)
    for kind in ("megatron", "numpy"):
        _measure_flat(found, folder, kind, millions, repeats)
    _measure_dedupe(found, folder, repeats)
    return found


def _measure_parquet(found: Found, folder: Path, sizes: Sequence[int], repeats: int) -> None:
    ends: list[dict[str, tuple[float, float]]] = []
    for shards in sizes:
        documents, units = shards * GROUPS * GROUP, shards * GROUPS
        source = write_shards(folder / f"shards{shards}", shards)
        place = Place.of(folder / f"parquet{shards}", source)
        first, kept = place.check(repeats, first=True), place.kept_bytes
        second = place.check(repeats)
        found.checks.append(
            (
                f"{documents:,}",
                f"{shards:,}",
                f"{units:,}",
                f"{first.cpu_s:.2f}",
                first.peak_mib,
                f"{second.cpu_s:.2f}",
                f"{kept / MILLION:.2f}",
            )
        )
        start = place.opening(repeats)
        assert start.state is not None, "an opening shows the state after its first batch"
        for position, step in _positions(documents, all_of_them=shards == sizes[-1]):
            took = place.opening(repeats, state_at(start.state, step)) if step else start
            # A run that came to this step one by one has the same state, so it was opened where a run would be.
            if took.state != state_at(start.state, step + 1):
                raise click.ClickException(f"step {step} was not followed by step {step + 1}")
            found.openings.append(
                (
                    f"{documents:,}",
                    position,
                    f"{took.cpu_s:.2f}",
                    f"{took.read_per_million_s:.2f}",
                    took.peak_mib,
                )
            )
        ends.append(
            {
                "first check, 1,000 shards of 650 row groups: CPU s": (shards / 1e3, first.cpu_s),
                "second check, 1,000 shards: CPU s": (shards / 1e3, second.cpu_s),
                "kept index, million units: MB": (units / 1e6, kept / MILLION),
                "memory of a loader, million units: MiB": (units / 1e6, start.peak_bytes / MIB),
            }
        )
    found.grows += _grown(ends[0], ends[-1])
    for how in _SHUFFLES:
        folder_of_mix = folder / f"shuffled{len(found.shuffles)}"
        # Indexes are kept in the same folder, so that this mix file takes over the one that is there.
        place = replace(Place.of(folder_of_mix, f"{source}, shuffle: {how}"), cache=place.cache)
        took = place.opening(repeats)
        found.shuffles.append(
            (f"`{how}`", f"{took.cpu_s:.2f}", f"{took.read_per_million_s:.2f}", took.peak_mib)
        )


def _positions(documents: int, *, all_of_them: bool) -> Iterator[tuple[str, int]]:
    """Yield positions of a source, and the steps that begin there: the last one passes the end of the epoch."""
    yield "the first", 0
    if not all_of_them:
        return
    yield "at 70 %", documents * 7 // 10 // STEP_DOCUMENTS
    yield "at the end of the epoch", documents // STEP_DOCUMENTS


def _measure_flat(
    found: Found, folder: Path, kind: str, millions: Sequence[int], repeats: int
) -> None:
    ends: list[dict[str, tuple[float, float]]] = []
    sizes = [(million, _FLAT_TOKENS) for million in millions]
    if kind == "numpy":  # ends of documents are found among the tokens
        sizes.append((millions[0], _FLAT_TOKENS * millions[-1] // millions[0]))
    for million, tokens in sizes:
        name = f"{kind}{million}x{tokens}"
        source = write_documents(folder / f"{name}-files", kind, million * MILLION, tokens)
        place = Place.of(folder / name, source)
        first, kept = place.check(repeats, first=True), place.kept_bytes
        found.flat.append(
            (
                kind,
                f"{million * MILLION:,}",
                f"{tokens}",
                f"{first.cpu_s:.2f}",
                first.peak_mib,
                f"{kept / 1e3:.1f}",
            )
        )
        said = f"first check, {kind}, million documents of {_FLAT_TOKENS} tokens: CPU s"
        ends.append({said: (million, first.cpu_s)})
        shutil.rmtree(folder / f"{name}-files")
    found.grows += _grown(ends[0], ends[len(millions) - 1])


def _measure_dedupe(found: Found, folder: Path, repeats: int) -> None:
    millions = _DEDUPE_GROUPS * GROUP / MILLION
    source = write_shards(folder / "each-once", 1, _DEDUPE_GROUPS)
    taken = {}
    for name, more in (("with", ", dedupe: content"), ("without", "")):
        place = Place.of(folder / f"dedupe-{name}", source + more)
        taken[name] = (place.opening(repeats, first=True), place.kept_bytes)
    (found_s, found_bytes), (plain, plain_bytes) = taken["with"], taken["without"]
    found.grows += [
        (
            f"first opening with `dedupe: content`, million documents of {TOKENS} tokens: CPU s",
            f"{(found_s.cpu_s - plain.cpu_s) / millions:.2f}",
        ),
        (
            "kept of `dedupe`, million documents: KB",
            f"{(found_bytes - plain_bytes) / 1e3 / millions:.0f}",
        ),
    ]


def _grown(
    small: Mapping[str, tuple[float, float]], large: Mapping[str, tuple[float, float]]
) -> list[tuple[str, ...]]:
    return [(name, f"{per_unit(small[name], large[name]):.3f}") for name in small]


def tables_of(found: Found) -> list[Table]:
    """Return the tables of a report."""
    check = ("first check, CPU s", "MiB")
    return [
        Table(
            columns=(
                "documents",
                "shards",
                "row groups",
                *check,
                "second check, CPU s",
                "kept index, MB",
            ),
            rows=tuple(found.checks),
            caption="`omniload mix check` of one source of Parquet",
        ),
        Table(
            columns=(
                "documents",
                "position",
                "to the first batch, CPU s",
                "a million documents after it, CPU s",
                "MiB",
            ),
            rows=tuple(found.openings),
            caption="One process that opens the source, at several positions",
        ),
        Table(
            columns=(
                "shuffle",
                "to the first batch, CPU s",
                "a million documents after it, CPU s",
                "MiB",
            ),
            rows=tuple(found.shuffles),
            caption="The largest source, by its shuffle",
        ),
        Table(
            columns=("type", "documents", "tokens of each", *check, "kept index, KB"),
            rows=tuple(found.flat),
            caption="One file of documents of equal length",
        ),
        Table(
            columns=("what grows, and with what", "by"),
            rows=tuple(found.grows),
            caption="Growth, from the smallest to the largest size",
        ),
    ]


READING = """\
Every figure is the least of {repeats} processes; a process of more than 10 CPU seconds ran once. A shard of Parquet has
650 row groups of 1,000 documents of {tokens} tokens and ten columns. All shards are hard links to one file, in the page
cache, so neither a disk nor a network is measured; the length of documents changes the cost of reading them, but not
the cost of the index. Checks are whole processes, including imports. Openings are counted after the imports,
in the local runtime, with steps of {step:,} documents; memory is the peak of the whole process, including the steps
after the first batch. A source loader reads ahead, so the first batch contains some of the cost of later steps. States
of later positions are computed from the state after the first step, and each was checked against the state that the
step after it left. The indexes of Megatron and numpy are found from the `.idx`, or from the tokens of the file."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shards", default=[2, 200, 2_000], show_default=True, multiple=True, type=int)
@click.option("--millions", default=[10, 100], show_default=True, multiple=True, type=int)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(shards: Sequence[int], millions: Sequence[int], repeats: int, report: bool) -> None:
    """Measure one large source: its checks, openings at several positions, and first indexes.

    \b
    Example:
      python -m benchmarks.startup.large_source --shards 2 --shards 20 --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        tables = tables_of(measured(Path(made), shards, millions, repeats))
    for table in tables:
        print_table(table)
    if report:
        reading = READING.format(repeats=repeats, tokens=TOKENS, step=STEP_DOCUMENTS)
        sizes = [f"--shards {n}" for n in shards] + [f"--millions {n}" for n in millions]
        command = f"python -m benchmarks.startup.large_source {' '.join(sizes)} --repeats {repeats}"
        path = write_report(
            __file__,
            "large_source",
            "One source of up to 1.3 billion documents",
            command,
            tables,
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
