"""CPU seconds from opening a source of one large compressed shard to records in its middle and near its end.

python -m benchmarks.data.entering --help
"""

import gzip
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import orjson
import zstandard

from benchmarks.report import Table, print_table, write_report
from omniload.mix.schema.records import ShuffleConfig
from omniload.mix.sources import JsonlSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.tokenize import ByteTokenizer

__all__ = ["main"]

_WORDS, _WORDS_A_LINE = 50_000, 160
_FRAME_BYTES = 8 << 20
"""Uncompressed bytes of a frame of pzstd."""
_MEMBER_BYTES = 65_280
"""Uncompressed bytes of a member of bgzip."""
_READ = 64
"""Records of the first read."""
_PLACES = {"the middle": 0.5, "near the end": 0.99}
READING = (
    "One process opens the source, whose index is kept, and reads 64 records in stored order, "
    "alternately. Figures are medians of processor seconds, with files in the page cache, on a "
    "machine with other work on it. *From its first byte* is how every place was reached before "
    "shards were entered in their middle; it still applies if no entry points are kept. Both ways "
    "gave the same records. *Finding* is the first opening, which cuts the shard into units and finds "
    "its entry points; gzip is decompressed twice for that. *Kept* is the size of the entry points on "
    "disk."
)

Pack = Callable[[bytes], bytes]
WAYS: dict[str, tuple[str, int, Pack]] = {
    "zstd, one frame": ("one.jsonl.zst", 0, zstandard.ZstdCompressor().compress),
    "zstd, frames of 8 MiB": ("many.jsonl.zst", _FRAME_BYTES, zstandard.ZstdCompressor().compress),
    "gzip, one member": ("one.jsonl.gz", 0, lambda part: gzip.compress(part, 1)),
    "gzip, members of 64 KiB": (
        "many.jsonl.gz",
        _MEMBER_BYTES,
        lambda part: gzip.compress(part, 1),
    ),
}


def _lines(size_bytes: int) -> Iterator[bytes]:
    """Yield lines of about ``size_bytes`` bytes in all, with a realistic frequency of words."""
    random = np.random.default_rng(17)
    lengths = random.integers(2, 11, _WORDS)
    words = np.array(
        ["".join(map(chr, random.integers(97, 123, length))) for length in lengths], object
    )
    chance = 1 / np.arange(1, _WORDS + 1)
    written = number = 0
    while written < size_bytes:
        drawn = random.choice(words, (1_000, _WORDS_A_LINE), p=chance / chance.sum())
        for row in drawn:
            line = orjson.dumps({"id": number, "text": " ".join(row)}) + b"\n"
            yield line
            written, number = written + len(line), number + 1


def _write(path: Path, plain: Path, part_bytes: int, pack: Pack) -> None:
    data = memoryview(plain.read_bytes())
    step = part_bytes or len(data)
    with path.open("wb") as file:
        for at in range(0, len(data), step):
            file.write(pack(bytes(data[at : at + step])))


def _read(folder: Path, name: str, index: Path, place: float) -> tuple[float, list[bytes]]:
    """Return the processor seconds from opening to the records at a place, and these records."""
    began_s = time.process_time()
    config = JsonlSource(type="jsonl", path=name, shuffle=ShuffleConfig(method="none"))
    spec = SourceSpec(
        "web",
        config,
        seed=1,
        tokenizer=ByteTokenizer(type="bytes"),
        base_dir=folder,
        cache_dir=index,
    )
    source = open_source(spec)
    start = int(source.positions_per_epoch * place)
    tokens = source.read(start, start + _READ).tokens
    spent_s = time.process_time() - began_s
    return spent_s, [tokens[i].tobytes() for i in range(len(tokens))]


@click.command
@click.option("--mib", type=click.IntRange(16, 1 << 14), default=500, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option("--report", is_flag=True, help="Write a report.")
def main(mib: int, rounds: int, report: bool) -> None:
    """Measure the time to reach a place in a shard of ``mib`` MiB of lines, decompressed."""
    rows = []
    sizes = []
    with tempfile.TemporaryDirectory(dir=".") as held:
        folder = Path(held)
        with (folder / "plain").open("wb") as file:
            file.writelines(_lines(mib << 20))
        for way, (name, part_bytes, pack) in WAYS.items():
            _write(folder / name, folder / "plain", part_bytes, pack)
            sizes.append((folder / name).stat().st_size)
            index, without = folder / f"{name}.index", folder / f"{name}.before"
            finding_s, _ = _read(folder, name, index, 0)
            kept = sum(path.stat().st_size for path in index.glob("*.access/*"))
            shutil.copytree(index, without, ignore=shutil.ignore_patterns("*.access"))
            cells = []
            for place in _PLACES.values():
                spent: dict[Path, list[float]] = {without: [], index: []}
                for _ in range(rounds):
                    found = []
                    for where, times in spent.items():
                        spent_s, records = _read(folder, name, where, place)
                        times.append(spent_s)
                        found.append(records)
                    if found[0] != found[1]:
                        raise AssertionError(f"{name}: other records at {place}")
                cells += [f"{statistics.median(times):.3f}" for times in spent.values()]
            rows.append((way, *cells, f"{finding_s:.1f}", f"{kept / 1e6:.3f}"))
            (folder / name).unlink()
    ways = ("from its first byte", "entered")
    table = Table(
        caption=f"One shard of {mib} MiB of lines, {min(sizes) / 1e6:.0f} to {max(sizes) / 1e6:.0f} MB compressed; "
        "CPU seconds from opening the source to its first 64 records",
        columns=(
            "shard",
            *(f"{place}, {way}" for place in _PLACES for way in ways),
            "finding, CPU s",
            "kept, MB",
        ),
        rows=tuple(rows),
    )
    print_table(table)
    if report:
        command = f"python -m benchmarks.data.entering --mib {mib} --rounds {rounds}"
        path = write_report(
            __file__, "entering", "Places in compressed shards", command, [table], READING
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
