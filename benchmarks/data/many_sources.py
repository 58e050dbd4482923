"""A mix of a thousand sources: the time of a check, and of the first batch, with indexes that are kept.

python -m benchmarks.data.many_sources --help
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.report import Table, print_table, write_report

__all__ = ["main", "measured", "table_of", "write_mixes"]

_DOCUMENTS, _GROUP_ROWS, _MEAN, _LINES = 256, 64, 400, 64
_LENGTH, _ROWS = 4_096, 16
_LIMIT_S = 300.0
_CHECK = ("-c", "from omniload.base.cli import main; main()", "mix", "check")
_FIRST_BATCH = """
import sys
import time
from pathlib import Path
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.access.index_folders import index_folder
kind, file = sys.argv[1], Path(sys.argv[2])
if kind == "ray":
    import omniload.actors.ray.plane
else:
    import omniload.actors.local.plane
began_s = time.perf_counter()
mix, base_dir = load_mix(file)
mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"kind": kind})})
tree = ClientPlaceTree.of(dp=1)
spec = PlaneSpec(mix=mix, base_dir=base_dir, tree=tree, cache_dir=index_folder(file))
with open_plane(spec) as plane, Client(plane.handle(0)) as client:
    assert client.next_batch() is not None
    print("there", time.perf_counter() - began_s, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Took:
    """Figures of one process."""

    wall_s: float
    """Wall time to its end; and to its first batch, counted from the end of its imports."""
    cpu_s: float
    """Processor time of the process until it ended."""
    faults: int
    """Faults that were reported with the file and the line."""


def write_mixes(folder: Path, sources: int) -> dict[str, Path]:
    """Write the sources and four mix files: a sound one, one with unknown keys, one with missing columns, texts.

    Texts are JSON lines, a small file for each source, tokenised by bytes.
    """
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(_MEAN), 1, _DOCUMENTS), 1, _LENGTH).astype(np.int32)
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    ids = rng.integers(0, 32_000, int(offsets[-1])).astype(np.int32)
    first = folder / "first.parquet"
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    pq.write_table(pa.table({"tokens": column}), first, row_group_size=_GROUP_ROWS)
    names = [f"s{i:04}" for i in range(sources)]
    for name in names:
        (folder / name).mkdir()
        (folder / name / "0.parquet").hardlink_to(first)
    words = ("word " * 80)[: _MEAN - 1]
    lines = "".join(json.dumps({"text": f"{i} {words}"}) + "\n" for i in range(_LINES))
    for name in names:
        (folder / name / "0.jsonl").write_text(lines, encoding="utf-8")
    tree = {
        "version": 1,
        "seed": 1,
        "sources": {
            name: {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
            for name in names
        },
        "mix": {"stages": [{"from_step": 0, "weights": dict.fromkeys(names, 1)}]},
        "pack": {"length": _LENGTH},
        "batch": {"tokens": _ROWS * _LENGTH, "micro_tokens": _LENGTH},
    }
    sound = yaml.safe_dump(tree, sort_keys=False)
    texts = {
        "sound": sound,
        "unknown keys": sound.replace("tokens: tokens", "tokns: tokens"),
        "no such column": sound.replace("tokens: tokens", "tokens: ids"),
    }
    lined = {name: {"type": "jsonl", "path": f"{name}/*.jsonl"} for name in names}
    of_texts = tree | {"sources": lined, "tokenizer": {"type": "bytes"}}
    texts["texts"] = yaml.safe_dump(of_texts, sort_keys=False)
    files = {name: folder / f"{name.replace(' ', '-')}.yaml" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text, encoding="utf-8")
    return files


def measured(arguments: Sequence[str], file: Path, cache: Path) -> Took:
    """Run Python on a mix file with kept indexes in ``cache``."""
    # Modules are compiled as in an installed distribution, whatever the caller's environment has set.
    env = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPYCACHEPREFIX": str(cache / "compiled"),
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    began_s, before = time.perf_counter(), os.times()
    # Faults go to a file, because the process would block on a full pipe.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments, str(file)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None, "it is a pipe"
        first = process.stdout.readline().split()
        process.communicate(timeout=_LIMIT_S)
        errors.seek(0)
        said = errors.read()
    wall_s, after = time.perf_counter() - began_s, os.times()
    if process.returncode not in {0, 2}:
        raise click.ClickException(f"{arguments[-1]} ended with {process.returncode}: {said}")
    return Took(
        wall_s=float(first[1]) if first[:1] == ["there"] else wall_s,
        cpu_s=after.children_user
        + after.children_system
        - before.children_user
        - before.children_system,
        faults=sum(f"{file}:" in line for line in said.splitlines()),
    )


def table_of(found: Mapping[str, Sequence[Took]], sources: int) -> Table:
    """Return medians of wall and processor seconds."""
    return Table(
        columns=("what", "s", "least", "most", "CPU s", "faults told with their line"),
        rows=tuple(
            (
                name,
                f"{median(each.wall_s for each in runs):.2f}",
                f"{min(each.wall_s for each in runs):.2f}",
                f"{max(each.wall_s for each in runs):.2f}",
                f"{median(each.cpu_s for each in runs):.2f}",
                runs[0].faults,
            )
            for name, runs in found.items()
        ),
        caption=f"{sources:,} sources, medians of {len(next(iter(found.values())))} processes of each, in turns",
    )


READING = """\
Each source is a file of {documents} documents of token ids in four row groups. A check is timed as a whole process,
including its start and imports. The first batch is timed from the reading of the mix file on, in the local runtime,
with {rows} rows of {length:,} tokens; at least one record of every source is read for it. Through Ray the time also
includes the start of Ray and its roles. Texts are JSON lines, {lines} documents of about 400 bytes for each source,
tokenised by bytes. Findings and indexes of an earlier check are kept, modules are compiled, and files are in the page
cache. Other work on the machine affects the wall time, and the processor seconds less. Processor seconds of roles
through Ray are counted if the roles end before the process does. A check reports the first fifty faults that the
schema finds, and the number of further ones."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sources", default=1_000, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sources: int, repeats: int, report: bool) -> None:
    """Measure a check and a first batch of many sources.

    \b
    Example:
      python -m benchmarks.data.many_sources --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        files, cache = write_mixes(Path(made), sources), Path(made) / "cache"
        work = {
            "check": (_CHECK, files["sound"]),
            "check, an unknown key in every source": (_CHECK, files["unknown keys"]),
            "check, a wrong column in every source": (_CHECK, files["no such column"]),
            "first batch": (("-c", _FIRST_BATCH, "local"), files["sound"]),
            "first batch through Ray": (("-c", _FIRST_BATCH, "ray"), files["sound"]),
            "first batch of texts": (("-c", _FIRST_BATCH, "local"), files["texts"]),
            "first batch of texts through Ray": (("-c", _FIRST_BATCH, "ray"), files["texts"]),
        }
        found: dict[str, list[Took]] = {name: [] for name in work}
        for name in ("check", "first batch", "first batch of texts"):
            measured(*work[name], cache)
        for _ in range(repeats):
            for name, (arguments, file) in work.items():
                found[name].append(measured(arguments, file, cache))
    table = table_of(found, sources)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "many_sources",
            "A thousand sources: a check, and the first batch",
            f"python -m benchmarks.data.many_sources --sources {sources} --repeats {repeats}",
            [table],
            READING.format(documents=_DOCUMENTS, rows=_ROWS, length=_LENGTH, lines=_LINES).replace(
                "\n", " "
            ),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
