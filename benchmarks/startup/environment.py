"""Time of a start for its packages: pip, uv, and a snapshot that is mounted, linked or fetched.

    python -m benchmarks.startup.environment [--rounds 5] [--only "uv, warm" mounted ...] [--folder DIR]

Every contender brings the same packages into a new environment. Contenders alternate in rounds, so other work on the
machine affects them alike. The report has wall seconds and the processor seconds of all processes; processor seconds
do not depend on other work. uv is taken from the PATH or installed next to the measurement.

- *pip, cold* / *warm*: without and with its cache of wheels.
- *uv, warm*: from its cache, hard links, as it does by default; then the same with byte
  code, which pip and a snapshot have and uv leaves out; *uv, cold* with an empty cache.
- *mounted*, *linked*: ``omniload env restore --auto`` with the tree in the node cache.
- *fetched*: the same with an empty node cache: read from the store, verified, linked.
- Of both, *no byte code*: a snapshot that was saved without, to be compared with uv's default.
- *far*: wheels and store on one object store behind a link of ``--far-mb`` megabytes per second,
  that also counts the bytes.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup.environment_far import download, far_away
from benchmarks.startup.whole_place import KEYS

PACKAGES = ("numpy", "pandas", "pyarrow", "scipy", "scikit-learn")
IMPORTS = "import numpy, pandas, pyarrow, pyarrow.parquet, scipy.stats, sklearn.linear_model"
NAMES = ("pip, cold", "pip, warm", "uv, cold", "uv, warm", "uv, warm, byte code")
NAMES += ("fetched", "fetched, no byte code", "linked", "linked, no byte code", "mounted")
FAR_NAMES = ("uv, cold, far", "fetched, far", "fetched, no byte code, far")
FETCH = ("restore", "--auto", "--form", "link")
MAIN = "from omniload.base.cli import main; main()"


@dataclass(slots=True)
class Samples:
    """Wall and processor seconds of one contender, and megabytes through the link."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    moved_mb: list[float] = field(default_factory=list)

    def take(self, words: Sequence[str], variables: dict[str, str]) -> None:
        """Run once and keep the result."""
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != 0:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-2000:]}")
        self.wall_s.append(wall)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    @property
    def wall(self) -> float:
        """Median wall seconds."""
        return statistics.median(self.wall_s)

    @property
    def cpu(self) -> float:
        """Median processor seconds."""
        return statistics.median(self.cpu_s)


class Bench:
    """A folder with environments, caches and a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.python = self.venv / "bin" / "python"
        self.requirements = folder / "requirements.txt"
        self.requirements.write_text("\n".join(PACKAGES) + "\n")
        self.variables = {
            **os.environ,
            "PIP_CACHE_DIR": str(folder / "pip-cache"),
            "UV_CACHE_DIR": str(folder / "uv-cache"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        (folder / "store").mkdir(exist_ok=True)
        self.uv = self._uv()

    def _uv(self) -> str:
        found = shutil.which("uv")
        if found:
            return found
        tools = self.folder / "tools"
        subprocess.run([sys.executable, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin" / "pip", "install", "-q", "uv"], check=True)
        return str(tools / "bin" / "uv")

    def make_anew(self, venv: Path | None = None) -> None:
        """Make the environment again, empty."""
        self.umount()
        place = venv or self.venv
        self.empty(place.name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)

    def umount(self) -> None:
        """Unmount a mounted snapshot, if there is one."""
        if self.python.exists():
            words = [sys.executable, "-c", MAIN, "env", "umount", "--lazy", "--python", self.venv]
            subprocess.run(words, env=self.variables, capture_output=True, check=False)

    def pip(self, *more: str, python: Path | None = None) -> list[str]:
        """Return pip's command line."""
        words = [sys.executable, "-m", "pip", "--python", str(python or self.python), "install"]
        return [*words, "-q", "--disable-pip-version-check", *more, "-r", str(self.requirements)]

    def uv_words(self, *more: str) -> list[str]:
        """Return uv's command line."""
        words = [self.uv, "pip", "install", "-q", "--python", str(self.python)]
        return [*words, *more, "-r", str(self.requirements)]

    def ours(self, verb: str, *more: str, bare: bool = False, store: str = "") -> list[str]:
        """Return our command line; the request is pip's.

        Args:
            verb: ``save`` or ``restore``.
            more: Options.
            bare: The snapshot without byte code; a variable in its key distinguishes it from the other.
            store: URL; by default the store on this machine.
        """
        # A node that mounts and a node that links have caches of their own, because a linked tree is checked before
        # each use.
        cache = self.folder / f"node-cache-{more[-1] if more else verb}"
        more = (*more, "--input-env", "BARE") if bare else more
        if bare and verb == "save":
            more = (*more, "--no-byte-code")
        words = ["env"]
        if verb == "restore":  # our command has its byte code, as if pip had installed it
            words += ["-u", "PYTHONDONTWRITEBYTECODE"]
            words += [f"PYTHONPYCACHEPREFIX={self.folder / 'byte-code'}"]
        words += [f"OMNILOAD_ENV_CACHE={cache}", *(["BARE=1"] if bare else [])]
        words += [sys.executable, "-c", MAIN, "env", verb]
        return [
            *words,
            "-o",
            store or str(self.folder / "store"),
            "--python",
            str(self.venv),
            *more,
            "--",
            *self.pip(),
        ]

    def empty(self, name: str) -> None:
        """Move a cache or an environment aside; it is removed at the end.

        ext4 searches long for inodes if files were removed in the last minutes. A contender that writes many files
        then pays for the removal, up to three times its own cost.
        """
        if (self.folder / name).exists():
            (self.folder / "aside").mkdir(exist_ok=True)
            (self.folder / name).rename(self.folder / "aside" / f"{name}-{time.monotonic_ns()}")


def contenders(bench: Bench) -> dict[str, tuple[Callable[[], None], list[str]]]:
    """Return, for each contender, the untimed preparation of a run and the run."""

    def nothing() -> None:
        pass

    def empty() -> None:
        bench.empty("node-cache-link")

    warm = "--auto", "--form"
    return {
        "pip, cold": (nothing, bench.pip("--no-cache-dir")),
        "pip, warm": (nothing, bench.pip()),
        "uv, cold": (lambda: bench.empty("uv-cache"), bench.uv_words()),
        "uv, warm": (nothing, bench.uv_words()),
        "uv, warm, byte code": (nothing, bench.uv_words("--compile-bytecode")),
        "fetched": (empty, bench.ours("restore", *warm, "link")),
        "linked": (nothing, bench.ours("restore", *warm, "link")),
        "fetched, no byte code": (empty, bench.ours("restore", *warm, "link", bare=True)),
        "linked, no byte code": (nothing, bench.ours("restore", *warm, "link", bare=True)),
        "mounted": (nothing, bench.ours("restore", *warm, "mount")),
    }


def measure(bench: Bench, rounds: int, only: Sequence[str]) -> dict[str, Samples]:
    """Run the contenders alternately; the first round fills the caches and is not counted."""
    samples: dict[str, Samples] = {}
    runs = contenders(bench)
    for bare in (False, True):
        save(bench, bench.ours("save", bare=bare))
    for number in range(rounds + 1):
        for name, (prepare, words) in runs.items():
            if name not in only or (number == 0 and name == "pip, cold"):
                continue
            bench.make_anew()
            prepare()
            taken = Samples() if number == 0 else samples.setdefault(name, Samples())
            taken.take(words, bench.variables)
            print(f"round {number}: {name}: {taken.wall_s[-1]:.2f} s", flush=True)
    return samples


def save(bench: Bench, words: list[str]) -> None:
    """Save a snapshot from a new environment."""
    bench.make_anew()
    subprocess.run(words, env=bench.variables, check=True, capture_output=True)


def measure_far(bench: Bench, rounds: int, bytes_per_s: float) -> dict[str, Samples]:
    """Fetch everything through one slow link, alternately."""
    wheels = bench.folder / "wheels"
    download(wheels, bench.requirements)
    samples = {name: Samples() for name in FAR_NAMES}
    with far_away(wheels, bytes_per_s) as far:
        bench.variables |= KEYS
        for bare in (False, True):
            save(bench, bench.ours("save", bare=bare, store=far.store(near=True)))
        ways = {
            "uv, cold, far": bench.uv_words("--no-index", "--find-links", far.page),
            "fetched, far": bench.ours(*FETCH, store=far.store()),
            "fetched, no byte code, far": bench.ours(*FETCH, bare=True, store=far.store()),
        }
        for number in range(rounds + 1):
            for name, words in ways.items():
                bench.make_anew()
                for cache in ("uv-cache", "node-cache-link"):
                    bench.empty(cache)
                before = far.relay.bytes_back
                taken = samples[name] if number else Samples()  # the first round loads the clients
                taken.take(words, bench.variables)
                taken.moved_mb.append((far.relay.bytes_back - before) / 1e6)
                print(f"round {number}: {name}: {taken.wall_s[-1]:.2f} s", flush=True)
    return samples


def measure_imports(bench: Bench, rounds: int) -> dict[str, Samples]:
    """Import everything from an environment of pip's and from a mounted one, alternately."""
    native = bench.folder / "native"
    bench.make_anew(native)
    subprocess.run(bench.pip(python=native / "bin" / "python"), env=bench.variables, check=True)
    bench.make_anew()
    words = bench.ours("restore", "--auto", "--form", "mount")
    subprocess.run(words, env=bench.variables, check=True, capture_output=True)
    pythons = {"native": native / "bin" / "python", "mounted": bench.python}
    samples = {name: Samples() for name in pythons}
    for number in range(2 * rounds + 2):
        for name, python in pythons.items():
            taken = Samples() if number < 2 else samples[name]
            taken.take([str(python), "-c", IMPORTS], bench.variables | {"PYTHONPATH": ""})
    return samples


def far_table(samples: dict[str, Samples], far_mb: float) -> Table:
    """Return the figures of fetches through the slow link."""
    moved = (f"{statistics.median(taken.moved_mb):.0f}" for taken in samples.values())
    rows = _rows(samples, samples["uv, cold, far"])
    return Table(
        columns=("contender", "median s", "best s", "processor s", "of uv, cold", "cpu", "MB"),
        rows=tuple((*row, mb) for row, mb in zip(rows, moved, strict=True)),
        caption=f"With all caches of the node empty, behind a link of {far_mb:g} MB/s:",
    )


def tables_of(restores: dict[str, Samples], imports: dict[str, Samples]) -> list[Table]:
    """Return the figures, as ratios to uv with a warm cache, and to a native environment."""
    rows = _rows(restores, restores["uv, warm"])
    import_rows = _rows(imports, imports["native"])
    seconds = ("median s", "best s", "processor s")
    return [
        Table(
            columns=("contender", *seconds, "of uv, warm", "the same, processor"),
            rows=rows,
            caption="Bringing the packages into an empty environment:",
        ),
        Table(
            columns=("environment", *seconds, "of native", "the same, processor"),
            rows=import_rows,
            caption="Importing them in a new process:",
        ),
    ]


def _rows(samples: dict[str, Samples], yard: Samples) -> tuple[tuple[str, ...], ...]:
    """Return a row of each contender: seconds, and ratios to the yardstick."""
    return tuple(
        (
            name,
            *(f"{s:.2f}" for s in (taken.wall, min(taken.wall_s), taken.cpu)),
            f"{taken.wall / yard.wall:.2f}",
            f"{taken.cpu / yard.cpu:.2f}",
        )
        for name, taken in samples.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="CONTENDER")
    parser.add_argument("--far-mb", type=float, default=25, help="MB/s of the slow link; 0: none.")
    parser.add_argument("--folder", type=Path, help="Folder for environments and caches.")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="environment-", dir=given.folder))
    bench = Bench(folder)
    try:
        restores = measure(bench, given.rounds, given.only)
        imports = measure_imports(bench, given.rounds)
        far = measure_far(bench, given.rounds, given.far_mb * 1e6) if given.far_mb else None
    finally:
        bench.umount()
        shutil.rmtree(folder, ignore_errors=True)
    tables = tables_of(restores, imports)
    if far:
        tables.append(far_table(far, given.far_mb))
    for table in tables:
        print_table(table)
    left_out = len(given.only) < len(NAMES)
    chosen = " --only " + " ".join(f'"{name}"' for name in given.only) if left_out else ""
    path = write_report(
        __file__,
        "environment",
        "Environment snapshots: what a start pays for its packages",
        f"python -m benchmarks.startup.environment --rounds {given.rounds} --far-mb {given.far_mb:g}{chosen}",
        tables,
        "Contenders alternated in rounds, so ratios are reliable even if seconds are not. uv leaves "
        "byte code out by default; pip and a snapshot include it by default. Folders that were "
        "emptied between runs were moved aside, not removed: see ``Bench.empty``.",
    )
    print(path)


if __name__ == "__main__":
    main()
