"""Wait of a rank for its first batch of captions with photographs, and the images decoded and kept ahead of it.

python -m benchmarks.data.images_ahead --help
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.data.since import tree_of
from benchmarks.report import Table, print_table, write_report

__all__ = ["Figures", "figures_of", "main", "table_of", "write_captions"]

BEFORE = "5071dea3"
"""The last commit in which records were requested by their tokens alone."""
_ROOT = Path(__file__).resolve().parents[2]
_SIDE, _DRAWN = 512, 20
_CASES = ((16, 4_096), (1_024, 4_096), (1_024, 65_536))
"""Largest number of patches of an image, and tokens of a step."""
_LIMIT_S = 300.0
_MIX = """
version: 1
seed: 1
tokenizer: {{type: bytes}}
sources:
  captions:
    type: parquet
    path: captions.parquet
    text: text
    images: images
    transforms: [{{type: images, patch: 14, merge: 2, max_patches: {patches}, placeholder: 7}}]
mix: {{stages: [{{from_step: 0, weights: {{captions: 1}}}}]}}
pack: {{length: 512}}
batch: {{tokens: {tokens}, micro_tokens: {tokens}}}
"""
_RUN = """
import json, resource, sys, time, zlib
import omniload
from omniload.source.transforms import image_decoding
decoded, done = image_decoding.decoded, []
def counted(data, config):
    found = decoded(data, config)
    done.append(1)
    return found
image_decoding.decoded = counted
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, began_s, digest = resident(), time.perf_counter(), 0
with omniload.open(sys.argv[1], arrays="numpy") as loader:
    for step, batch in zip(range(8), loader):
        if step == 0:
            first_s, first = time.perf_counter() - began_s, len(done)
        for held in (batch.tokens, batch.images.patches):
            digest = zlib.crc32(held.tobytes(), digest)
    # The rank takes no more: until what is read ahead of it is read.
    until_s, count = time.monotonic() + 20, -1
    while time.monotonic() < until_s and count != len(done):
        count = len(done)
        time.sleep(1)
    print(json.dumps([first_s, first, len(done), (resident() - before) >> 20, digest]))
"""
Figures = tuple[float, int, int, int, int]
"""Seconds to the first batch; images decoded before it, and over eight steps and the prefetch; MiB; digest."""


def write_captions(folder: Path, count: int = 1_000) -> None:
    """Write captions of a few letters, with a JPEG of 512 x 512 pixels each."""
    draw = np.random.default_rng(0)
    images = []
    for _ in range(_DRAWN):
        # A few colours that blend into each other, with the bytes of a photograph.
        colours = Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8))
        held = io.BytesIO()
        colours.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).save(held, "JPEG", quality=90)
        images.append(held.getvalue())
    rows = [{"text": f"c{i:03}", "images": [images[i % _DRAWN]]} for i in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "captions.parquet", row_group_size=100)


def figures_of(tree: Path, folder: Path, patches: int, tokens: int) -> Figures:
    """Measure a tree in a process of its own."""
    mix = folder / "mix.yaml"
    mix.write_text(_MIX.format(patches=patches, tokens=tokens))
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, str(mix)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
    )
    first_s, first, decoded, held_mib, digest = json.loads(ended.stdout.splitlines()[-1])
    return first_s, first, decoded, held_mib, digest


def table_of(found: Mapping[tuple[int, int], tuple[Figures, Figures]]) -> Table:
    """Return the figures of both trees, by largest number of patches and tokens of a step.

    Raises:
        ValueError: A step has other samples in one tree than in the other.
    """
    rows = []
    for (patches, tokens), (before, now) in found.items():
        if before[-1] != now[-1]:
            raise ValueError(f"samples differ: {patches} patches, {tokens} tokens a step")
        for name, (first_s, first, decoded, held_mib, _) in (("before", before), ("now", now)):
            figures = (f"{first_s:.1f}", f"{first:,}", f"{decoded:,}", f"{held_mib:,}")
            rows.append((f"{patches:,}", f"{tokens:,}", name, *figures))
    return Table(
        columns=(
            *("most patches", "tokens a step", "", "s to the first batch"),
            *("images decoded before it", "decoded in all", "MiB of the process more"),
        ),
        rows=tuple(rows),
        caption="Eight steps, and what is read ahead of more",
    )


READING = """\
A thousand captions of four letters, each with a JPEG of 512 x 512 pixels, are read by one rank of the local runtime
with `loader.memory` of 256 MiB. The rank takes eight steps; the rest is read-ahead for further steps. Before is
commit {commit}; each tree runs in a process of its own, one after the other. Samples of every step are the same in
both. Seconds are of a machine with other work on it. Images are counted until at most 20 s after the last step."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", default=BEFORE, show_default=True, help="Commit to compare with.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(commit: str, report: bool) -> None:
    """Compare this tree with one that requested records by their tokens alone.

    \b
    Example:
      python -m benchmarks.data.images_ahead --no-report
    """  # noqa: D301 -- click's own marker
    found: dict[tuple[int, int], tuple[Figures, Figures]] = {}
    with tempfile.TemporaryDirectory() as made, tree_of(commit) as earlier:
        write_captions(Path(made))
        for patches, tokens in _CASES:
            before, now = (
                figures_of(tree, Path(made), patches, tokens) for tree in (earlier, _ROOT)
            )
            found[patches, tokens] = before, now
            click.echo(f"{patches} patches, {tokens} tokens: {before[:-1]} before, {now[:-1]} now")
    table = table_of(found)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "images_ahead",
            "Photographs that are decoded ahead of the first batch",
            f"python -m benchmarks.data.images_ahead --commit {commit}",
            [table],
            READING.format(commit=commit).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
