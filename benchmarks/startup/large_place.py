"""What ``benchmarks.startup.large_source`` measures on: files of many documents, and processes on their mix file."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.base.state import Json, JsonObject, sealed, unsealed

__all__ = [
    "GROUP",
    "GROUPS",
    "MIB",
    "MILLION",
    "STEP_DOCUMENTS",
    "TOKENS",
    "Place",
    "Took",
    "state_at",
    "write_documents",
    "write_shards",
]

GROUP, GROUPS, TOKENS = 1_000, 650, 16
"""Documents of a row group, row groups of a shard, tokens of a document."""
_LENGTH, _ROWS, _STEPS = 4_096, 16, 100
"""Tokens of a row, rows of a step, steps that are read after the first."""
STEP_DOCUMENTS = _ROWS * _LENGTH // TOKENS
_NOTES = 9
"""Columns of a shard next to its tokens; FineWeb-Edu has ten columns in all."""
_END, _UINT16 = 1, b"\x08"
"""Token that ends a document of numpy; Megatron's code of the type."""
_BLOCK = 100_000
"""Documents that are written at once."""
MIB, MILLION = 1 << 20, 1_000_000
_LIMIT_S = 300.0
_REPEATED_S = 10.0
"""A process that takes longer than this many processor seconds is measured once."""
_MIX = """\
version: 1
seed: 1
sources: {{web: {{{source}}}}}
mix: {{stages: [{{from_step: 0, weights: {{web: 1}}}}]}}
pack: {{length: {length}}}
batch: {{tokens: {tokens}, micro_tokens: {length}}}
"""
_COUNTED = """\
import sys, time
from pathlib import Path
import orjson
def show(**found):
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    sys.stdout.flush()
    print(orjson.dumps(found | {"peak_bytes": peak << 10}).decode(), flush=True)
"""
_CHECK = (
    _COUNTED
    + """\
from omniload.base.cli import main
sys.argv[1:] = ["mix", "check", sys.argv[1]]
try:
    main()
finally:
    show(cpu_s=time.process_time())
"""
)
_OPEN = (
    _COUNTED
    + """\
import omniload
file, state, steps = sys.argv[1], orjson.loads(sys.argv[2]), int(sys.argv[3])
began = time.process_time()
with omniload.open(file, state=state, arrays="numpy", runtime="local") as loader:
    loader.next_batch()
    first = time.process_time()
    after = loader.state_dict()
    for _ in range(steps):
        loader.next_batch()
    read = time.process_time()
    show(cpu_s=first - began, read_s=read - first, state=after)
"""
)


@dataclass(frozen=True, slots=True)
class Took:
    """What a process took; of several processes, the least of each figure."""

    cpu_s: float
    """Processor seconds: of a whole check; of an opening, after the imports and up to the first batch."""
    peak_bytes: int
    """The most memory that was resident (VmHWM)."""
    read_s: float = 0.0
    """Processor seconds of the steps after the first."""
    state: Mapping[str, Json] | None = None
    """State after the first batch."""

    @property
    def peak_mib(self) -> str:
        """The most memory, as a cell of a table."""
        return f"{self.peak_bytes / MIB:,.0f}"

    @property
    def read_per_million_s(self) -> float:
        """Processor seconds for a million documents after the first batch."""
        return self.read_s / (_STEPS * STEP_DOCUMENTS) * MILLION


@dataclass(frozen=True, slots=True)
class Place:
    """A source with its mix file, and the folder that keeps its index."""

    file: Path
    cache: Path

    @classmethod
    def of(cls, folder: Path, source: str) -> Self:
        """Write the mix file of a source."""
        folder.mkdir()
        text = _MIX.format(source=source, length=_LENGTH, tokens=_ROWS * _LENGTH)
        (folder / "mix.yaml").write_text(text, encoding="utf-8")
        return cls(folder / "mix.yaml", folder / "cache")

    @property
    def kept_bytes(self) -> int:
        """Size of all that is kept of the source."""
        return sum(path.stat().st_size for path in self.cache.rglob("*") if path.is_file())

    def check(self, repeats: int, *, first: bool = False) -> Took:
        """Measure ``omniload mix check``; ``first`` if nothing is kept before it."""
        return self._least(repeats, first, _CHECK, self.file)

    def opening(
        self, repeats: int, state: Mapping[str, Json] | None = None, *, first: bool = False
    ) -> Took:
        """Measure an opening up to the first batch, and the steps after it."""
        given = orjson.dumps(state).decode()
        return self._least(repeats, first, _OPEN, self.file, given, str(_STEPS))

    def _least(self, repeats: int, first: bool, program: str, *arguments: str | Path) -> Took:
        several: list[Took] = []
        while len(several) < repeats and (not several or several[0].cpu_s < _REPEATED_S):
            if first:
                shutil.rmtree(self.cache, ignore_errors=True)
            several.append(self._run(program, *arguments))
        return Took(
            cpu_s=min(each.cpu_s for each in several),
            peak_bytes=min(each.peak_bytes for each in several),
            read_s=min(each.read_s for each in several),
            state=several[0].state,
        )

    def _run(self, program: str, *arguments: str | Path) -> Took:
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=os.environ | {"XDG_CACHE_HOME": str(self.cache)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        if done.returncode:
            raise click.ClickException(
                f"{arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return Took(**orjson.loads(done.stdout.splitlines()[-1]))


def state_at(first: Mapping[str, Json], step: int) -> JsonObject:
    """Return the state of a later step, from that after the first.

    All documents have the same length, so every step draws the same number of them: positions move on evenly.
    """
    content: dict[str, Any] = dict(unsealed(first, of="the state after the first step"))
    entry = content["sources"]["web"]
    position, sub, token = entry["cursor"]
    moved = STEP_DOCUMENTS * (step - 1)
    web = entry | {
        "cursor": [position + moved, sub, token],
        "drawn": entry["drawn"] + moved * TOKENS,
    }
    carried = [[name, at + moved, *piece] for name, at, *piece in content["carried"]]
    return sealed(content | {"step": step, "sources": {"web": web}, "carried": carried})


def write_shards(folder: Path, shards: int, groups: int = GROUPS) -> str:
    """Write one Parquet file, and hard links to it as the other shards; return the source's line of the mix file.

    The file has short documents of token ids and nine further columns of one value each, because the size of a footer
    grows with the number of columns.
    """
    folder.mkdir()
    rows = groups * GROUP
    ids = np.random.default_rng(0).integers(2, 32_000, rows * TOKENS, np.int32)
    offsets = np.arange(0, ids.size + 1, TOKENS, dtype=np.int32)
    columns = {"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))}
    columns |= {f"note{i}": pa.repeat(f"value {i}", rows) for i in range(_NOTES)}
    pq.write_table(pa.table(columns), folder / "00000.parquet", row_group_size=GROUP)
    for i in range(1, shards):
        (folder / f"{i:05}.parquet").hardlink_to(folder / "00000.parquet")
    return f'type: parquet, path: "{folder}/*.parquet", tokens: tokens'


def write_documents(folder: Path, kind: str, documents: int, tokens: int) -> str:
    """Write documents of ``tokens`` uint16 ids, as Megatron or numpy; return the source's line of the mix file."""
    folder.mkdir()
    one = np.full(tokens, _END + 1, "<u2")
    one[-1] = _END
    block = np.tile(one, _BLOCK)
    with (folder / "all.bin").open("wb") as file:
        for at in range(0, documents, _BLOCK):
            file.write(block[: min(_BLOCK, documents - at) * tokens].tobytes())
    if kind == "numpy":
        return f'type: numpy, path: "{folder}/all.bin", dtype: uint16, end_of_document: {_END}'
    with (folder / "all.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.asarray([1], "<u8").tobytes() + _UINT16)
        file.write(np.asarray([documents, documents + 1], "<u8").tobytes())
        np.full(documents, tokens, "<i4").tofile(file)
        (np.arange(documents, dtype="<i8") * (tokens * one.itemsize)).tofile(file)
        np.arange(documents + 1, dtype="<i8").tofile(file)
    return f"type: megatron, path: {folder}/all"
