"""Memory of a process whose loader has a limit by ``loader.memory``: does the process keep to the limit?

python -m benchmarks.faults.memory_cap --help
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import omniload
from benchmarks.report import Table, print_table, write_report
from omniload.actors.roles import sources as sources_module
from omniload.source.block_memory import BlockMemory

__all__ = ["main"]

_SOURCES, _UNITS, _UNIT_TOKENS, _RECORD = 8, 4, 3 << 19, 2_048
"""Sources, row groups of each, tokens of a row group (6 MiB), and tokens of a record."""
_MIB = 1 << 20


def write_corpus(folder: Path, unit_tokens: int) -> None:
    """Write sources of token ids, for a shuffle that draws from all row groups at once."""
    rng = np.random.default_rng(0)
    for number in range(_SOURCES):
        records = rng.integers(1, 1 << 30, (_UNITS * unit_tokens // _RECORD, _RECORD), np.int32)
        table = pa.table({"tokens": pa.array(list(records))})
        pq.write_table(table, folder / f"s{number}.parquet", row_group_size=unit_tokens // _RECORD)


def child(folder: Path, memory: int, steps: int) -> None:
    """Take steps in this process; print the most that its loader counted, and the most that the process used."""
    most = 0

    class Counted(BlockMemory):
        def set_others(self, size_bytes: int) -> None:
            nonlocal most
            super().set_others(size_bytes)
            most = max(most, self.used_bytes)

    sources_module.BlockMemory = Counted  # type: ignore[misc]
    names = [f"s{number}" for number in range(_SOURCES)]
    mix = {
        "version": 1,
        "seed": 1,
        "sources": {
            n: {"type": "parquet", "path": str(folder / f"{n}.parquet"), "tokens": "tokens"}
            for n in names
        },
        "mix": {"stages": [{"from_step": 0, "weights": dict.fromkeys(names, 1)}]},
        "pack": {"length": _RECORD},
        "batch": {"tokens": 64 * _RECORD, "micro_tokens": 64 * _RECORD},
        "loader": {"memory": memory, "spill": str(folder), "readers": dict.fromkeys(names, 1)},
        "runtime": {"kind": "local", "prefetch_steps": 4},
    }
    with omniload.open(mix, steps=steps, arrays="numpy") as loader:
        taken = sum(int(batch.tokens[0, 0] >= 0) for batch in loader)
    assert taken == steps, f"{taken} of {steps} steps"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
    )
    print(orjson.dumps([most, peak_kib << 10]).decode())


def taken_by(folder: Path, memory: int, steps: int) -> tuple[int, int]:
    """Return the most memory that the loader of a process counted, and the most that the process used."""
    words = ["-m", "benchmarks.faults.memory_cap", "--child", str(folder), str(memory), str(steps)]
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True)
    counted, peak = orjson.loads(done.stdout.splitlines()[-1])
    return int(counted), int(peak)


READING = """\
For each row a process of its own takes {steps} steps of 64 rows of {record:,} tokens, of {sources} sources through
threads (`runtime.kind: local`), and releases each batch. Each source has four row groups of 6 MiB, and its shuffle
draws from all of them: {need} MiB of decoded blocks in all. "counted" is the most memory of the loader for blocks,
decoding and samples read ahead, by its own count. "process" is the most that the kernel saw resident (VmHWM). "over
the base" is that minus the memory of the same process for sources whose blocks are 32 times smaller."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--child", "as_child", nargs=3, hidden=True, type=str)
@click.option(
    "--steps", default=160, show_default=True, type=click.IntRange(1), help="Steps of each process."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(as_child: tuple[str, str, str] | None, steps: int, report: bool) -> None:
    """Measure the memory of processes under several values of loader.memory."""
    if as_child is not None:
        child(Path(as_child[0]), int(as_child[1]), int(as_child[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        for place, unit in ((large, _UNIT_TOKENS), (small, _UNIT_TOKENS // 32)):
            place.mkdir()
            write_corpus(place, unit)
        _, base = taken_by(small, 256 * _MIB, steps)
        found = []
        for memory in (32, 64, 128, 256, 512):
            counted, peak = taken_by(large, memory * _MIB, steps)
            figures = (counted, peak, peak - base)
            found.append((f"{memory}", *(f"{size / _MIB:.0f}" for size in figures)))
    table = Table(
        columns=("loader.memory, MiB", "counted, MiB", "process, MiB", "over the base, MiB"),
        rows=tuple(found),
        caption=f"Base: {base / _MIB:.0f} MiB",
    )
    print_table(table)
    if report:
        need = _SOURCES * _UNITS * _UNIT_TOKENS * 4 // _MIB
        reading = READING.format(steps=steps, record=_RECORD, sources=_SOURCES, need=need)
        command = f"python -m benchmarks.faults.memory_cap --steps {steps}"
        path = write_report(
            __file__,
            "memory_cap",
            "What loader.memory holds to",
            command,
            [table],
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
