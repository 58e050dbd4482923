"""From an image's name to a container that has imported torch: pulled by containerd, or served lazily to it.

    python -m benchmarks.startup.containerd --folder DIR [--rounds 3] [--mbit 400] [--delay-ms 2]

The image is the running Python and its torch, built in DIR the first time, in a real registry behind a link of that
rate and delay. A real containerd, with its own folders, starts a container of it in four ways, alternately: *pulled*
and unpacked by containerd; *lazy* with nothing on the node; *traced*, if an earlier start left its trace and no
block; *here*, if its blocks are on the node. Between two starts, containerd forgets the image. Needs root, umoci,
skopeo, docker-registry, containerd, runc.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup.place import (
    Relay,
    build_images,
    environment,
    running_registry,
)
from tests.support.snapshot.containerd_builders import Containerd, served_snapshotter, views_of

WAYS = ("pulled", "lazy", "traced", "here")
WORK = ("/usr/bin/python", "-c", "import torch; print(int(torch.ones(8).sum()))")
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Took:
    """Figures of one start."""

    known_s: float
    """Time until containerd could start it."""
    done_s: float
    """Time from then until torch was imported and the container had ended."""
    moved_bytes: int
    """Bytes from the registry until then."""


Samples = dict[str, list[Took]]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="A container of containerd, pulled or lazy.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=400.0, help="Rate of the registry's link.")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="Delay of the link, one way.")
    parser.add_argument("--report", action="store_true", help="Write a dated report.")
    parser.add_argument("--reading", default="", help="Paragraph under its tables.")
    given = parser.parse_args(words)
    given.folder.mkdir(parents=True, exist_ok=True)
    samples: Samples = {way: [] for way in WAYS}
    with running_registry(given.folder) as port:
        build_images(given.folder, f"127.0.0.1:{port}", environment())
        relay = Relay(port, given.mbit * 1e6 / 8, given.delay_ms / 1e3)
        with relay.running() as slow, tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            place = Path(scratch)
            with served_snapshotter(place):
                containerd = Containerd(place)
                try:
                    for _ in range(given.rounds):
                        for way in WAYS:
                            samples[way].append(start(containerd, relay, slow, way))
                finally:
                    containerd.close()
    table = starts_table(samples)
    print_table(table)
    if given.report:
        line = f"python -m benchmarks.startup.containerd --folder DIR --rounds {given.rounds}"
        line += f" --mbit {given.mbit:g} --delay-ms {given.delay_ms:g}"
        title = "A container of containerd: pulled, and served lazily"
        write_report(__file__, "containerd_start", title, line, [table], given.reading)


def start(containerd: Containerd, relay: Relay, port: int, way: str) -> Took:
    """Start a container in one way, and let containerd forget its image."""
    folder: Path = containerd.folder
    if way != "here":
        shutil.rmtree(folder / "cache" / ("blocks" if way == "traced" else ""), ignore_errors=True)
    image = f"127.0.0.1:{port}/a/{'plain' if way == 'pulled' else 'lazy'}:v"
    snapshotter = "overlayfs" if way == "pulled" else "omniload"
    before, begin = relay.bytes_back, time.perf_counter()
    if way == "pulled":
        containerd.ctr("image", "pull", "--plain-http", "--snapshotter", snapshotter, image)
    else:
        containerd.pull(image)
    known = time.perf_counter()
    done = containerd.start(image, way, *WORK, snapshotter=snapshotter)
    ended = time.perf_counter()
    if done.stdout != "8\n":
        raise RuntimeError(f"{way}: the container said {done.stdout!r} {done.stderr[-500:]!r}")
    moved = relay.bytes_back - before
    names = containerd.ctr("images", "ls", "-q").stdout.split()
    containerd.ctr("images", "rm", "--sync", *names)
    forgotten(folder)
    return Took(known - begin, ended - known, moved)


def forgotten(folder: Path) -> None:
    """Return when no lazy layer is shown any more, because containerd collects at a time of its choice.

    Raises:
        TimeoutError: A lazy layer stays.
    """
    end_s = time.monotonic() + _WAIT_S
    while views_of(folder):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{views_of(folder)} still mounted after {_WAIT_S:g} s")
        time.sleep(0.05)


def starts_table(samples: Samples) -> Table:
    """Return a row for each way; the ratio is the median of the ratios within a round."""
    rows = []
    for way, found in samples.items():
        whole = [took.known_s + took.done_s for took in found]
        pulled = [took.known_s + took.done_s for took in samples["pulled"]]
        ratios = [w / p for w, p in zip(whole, pulled, strict=True)]
        rows.append(
            (
                way,
                f"{statistics.median(took.known_s for took in found):.2f}",
                f"{statistics.median(took.done_s for took in found):.2f}",
                f"{statistics.median(whole):.2f}",
                f"{min(whole):.2f} to {max(whole):.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{statistics.median(took.moved_bytes for took in found) / 1e6:.1f}",
            )
        )
    heads = ("way", "known s", "start s", "both s", "range", "of pulled", "MB moved")
    return Table(columns=heads, rows=tuple(rows), caption="Medians over rounds:")


if __name__ == "__main__":
    main()
