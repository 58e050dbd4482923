"""What shows an image that is whole on the node: our FUSE process, or the kernel's EROFS by itself.

    python -m benchmarks.image_views --folder DIR [--rounds 3]

The image is the running Python and its torch, as an OCI layout built in DIR at the first
time; all its blocks are in the block store, and all its layers are whole blobs, before
anything is measured. The two ways take turns in rounds. Each step is done *cold* (the kernel has
dropped its caches; the files of the cache folder are on the disk) and *warm* (once more).
Needs root, umoci and a kernel that mounts EROFS from files.

The steps run in a process of their own that reads from the mount; its own Python is the
machine's. Processor seconds are those of that process and of the daemon behind the mount.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup_place import build_layout
from snapshot.image.mounting import mount
from snapshot.image.options import mount_settings
from snapshot.image.precontent_kernel import unmount

WAYS = ("fuse", "erofs")
TEMPERATURES = ("cold", "warm")
STEPS = {
    "import numpy": "import numpy",
    "import torch": "import torch",
    "stat of every file": (
        "n = sum(len(f) for d, _, f in os.walk(root)); "
        "[os.lstat(os.path.join(d, f)) for d, _, fs in os.walk(root) for f in fs]"
    ),
    "2000 small files": (
        "found = sorted(os.path.join(d, f) for d, _, fs in os.walk(root) for f in fs "
        "if f.endswith('.py'))[:2000]; "
        "[open(p, 'rb', buffering=0).read(4096) for p in found]"
    ),
    "libtorch_cpu.so, read whole": (
        "f = open(root + '/opt/site/torch/lib/libtorch_cpu.so', 'rb', buffering=0); "
        "b = bytearray(1 << 20)\nwhile f.readinto(b): pass"
    ),
}
_CHILD = """
import json, os, resource, sys, time
root = sys.argv[1]
sys.path.insert(0, root + '/opt/site')
sys.dont_write_bytecode = True
begin = time.perf_counter()
exec(sys.argv[2])
took = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([took, used.ru_utime + used.ru_stime]))
"""


@dataclass(frozen=True, slots=True)
class Took:
    """One step, once."""

    seconds: float
    reader_cpu_s: float
    daemon_cpu_s: float


Samples = dict[tuple[str, str, str], list[Took]]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="An image through FUSE and by EROFS, whole here.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="Write a dated report.")
    parser.add_argument("--reading", default="", help="Paragraph under its tables.")
    given = parser.parse_args(words)
    given.folder.mkdir(parents=True, exist_ok=True)
    image = f"oci:{build_layout(given.folder)}:v"
    make_whole(image, given.folder)
    samples: Samples = {}
    mounts: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            run_round(image, given.folder, way, samples, mounts[way])
    tables = [steps_table(samples), mounts_table(mounts)]
    for table in tables:
        print_table(table)
    if given.report:
        line = f"python -m benchmarks.image_views --folder DIR --rounds {given.rounds}"
        title = "An image that is whole on the node: through FUSE, and by the kernel's EROFS"
        write_report("image_views", title, line, tables, given.reading)


def make_whole(image: str, folder: Path) -> None:
    """Bring all blocks and all blobs of the image to the cache folder."""
    with mounted(image, folder, "erofs", "stream", "bandwidth=0") as (_, process):
        process.wait()  # it ends when nobody is needed any more


def run_round(image: str, folder: Path, way: str, samples: Samples, mounts: list[float]) -> None:
    """Mount, do every step cold and warm, unmount."""
    drop_caches()
    begin = time.perf_counter()
    with mounted(image, folder, way) as (root, process):
        mounts.append(time.perf_counter() - begin)
        for name, code in STEPS.items():
            drop_caches()
            for temperature in TEMPERATURES:
                took = step(root, code, process)
                samples.setdefault((way, name, temperature), []).append(took)


def step(root: Path, code: str, daemon: "subprocess.Popen[bytes]") -> Took:
    """Do one step in a process of its own."""
    before = cpu_of(daemon)
    line = [sys.executable, "-S", "-c", _CHILD, str(root), code]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    seconds, reader = json.loads(done.stdout.splitlines()[-1])
    return Took(seconds, reader, cpu_of(daemon) - before)


def cpu_of(process: "subprocess.Popen[bytes]") -> float:
    """Return the processor seconds of a daemon; none where it has ended."""
    if process.poll() is not None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


@contextmanager
def mounted(
    image: str, folder: Path, way: str, *options: str
) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """Mount for the time of a ``with``."""
    root = folder / "mnt"
    root.mkdir(exist_ok=True)
    told = (f"cache={folder / 'cache'}", f"through={way}", *options)
    process = mount(mount_settings(image, str(root), told), log_path=str(folder / "log"))
    try:
        yield root, process
    finally:
        unmount(str(root), lazily=False)
        process.terminate()  # a namespace made meanwhile may hold a copy of the mount
        process.wait()


def drop_caches() -> None:
    """Let the kernel forget what it has read."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


def steps_table(samples: Samples) -> Table:
    """Return a row for each step and temperature; ratios are medians over rounds."""
    rows = []
    for name in STEPS:
        for temperature in TEMPERATURES:
            fuse, erofs = (samples[way, name, temperature] for way in WAYS)
            ratios = [e.seconds / f.seconds for e, f in zip(erofs, fuse, strict=True)]
            cells = [f"{statistics.median(t.seconds for t in way):.3f}" for way in (fuse, erofs)]
            used = [
                f"{statistics.median(t.reader_cpu_s + t.daemon_cpu_s for t in way):.2f}"
                for way in (fuse, erofs)
            ]
            rows.append((name, temperature, *cells, f"{statistics.median(ratios):.2f}", *used))
    heads = ("step", "caches", "FUSE s", "EROFS s", "EROFS of FUSE")
    columns = (*heads, "FUSE processor s", "EROFS processor s")
    return Table(columns=columns, rows=tuple(rows), caption="Steps:")


def mounts_table(mounts: dict[str, list[float]]) -> Table:
    """Return what it takes to mount."""
    rows = tuple((way, f"{statistics.median(found):.2f}") for way, found in mounts.items())
    return Table(
        columns=("way", "median s"), rows=rows, caption="From the command to a usable mount:"
    )


if __name__ == "__main__":
    main()
