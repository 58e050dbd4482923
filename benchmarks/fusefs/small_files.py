"""Small files on a local store, compared with disk and memory: creations per second, an archive, a git clone.

python -m benchmarks.fusefs.small_files --help
"""

import io
import math
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import click

from benchmarks.report import Table, print_table, write_report
from fusefs.bridge.process.launch import umount
from fusefs.mounts.lifecycle import mount

__all__ = ["main"]

_FOLDERS = 50
_EMPTY = "answers alone"
_MOUNTED_WITHIN_S = 60.0
_TASKS = (
    "creations a second",
    "tar x, s",
    "git clone, s",
    "daemon's ms a creation",
    "a file of tar",
)
_FORMS = ("{:,.0f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}")


def archive(path: Path, num_files: int) -> None:
    """Write an archive of small files of 100 to 8,100 bytes, each with its own mode and time."""
    rng = random.Random(1)
    with tarfile.open(path, "w") as made:
        for number in range(num_files):
            if number < _FOLDERS:
                folder = tarfile.TarInfo(f"d{number}")
                folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, 1_700_000_000
                made.addfile(folder)
        for number in range(num_files):
            file = tarfile.TarInfo(f"d{number % _FOLDERS}/f{number}")
            file.size, file.mode = 100 + rng.randrange(8000), 0o644
            file.mtime = 1_700_000_000 + number
            made.addfile(file, io.BytesIO(rng.randbytes(file.size)))


def repository(path: Path, num_files: int) -> None:
    """Commit ``num_files`` small text files."""
    path.mkdir()
    for number in range(num_files):
        file = path / f"d{number % _FOLDERS}/f{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"line {number}\n" * (number % 200 + 1))
    who = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "files"]):
        subprocess.run(["git", "-C", path, *words], check=True, capture_output=True)


def creations(folder: Path, num_files: int) -> float:
    """Create, write and close files one after the other; return how many per second."""
    folder.mkdir()
    begin = time.perf_counter()
    for number in range(num_files):
        file = os.open(folder / f"f{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(file, b"x" * 1000)
        os.close(file)
    return num_files / (time.perf_counter() - begin)


def seconds(*command: str | Path) -> float:
    """Run a program; return how long it took."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def daemon_ms() -> float:
    """Return the processor time of this process's only child so far; NaN if there is none."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    if not children:
        return math.nan
    fields = Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) * 1000 / os.sysconf("SC_CLK_TCK")


def measured(
    root: Path, base: Path, turn: int, num_files: int, *, clones: bool
) -> tuple[float, ...]:
    """Measure the tasks below a directory, in the order of ``_TASKS``; NaN for tasks that are not possible.

    The files stay until the end. After a removal, ext4 passes over the numbers of the removed files one by one for
    minutes, so a later turn would measure that.
    """
    folder = root / f"turn-{turn}"
    folder.mkdir()
    (folder / "tar").mkdir()
    begun_ms = daemon_ms()
    rate = creations(folder / "made", num_files)
    made_ms = daemon_ms()
    unpacked_s = seconds("tar", "xf", base / "files.tar", "-C", folder / "tar")
    unpacked_ms = daemon_ms()
    cloning = ("git", "clone", "-q", "--no-hardlinks", base / "repository", folder / "git")
    cloned_s = seconds(*cloning) if clones else math.nan
    return (
        rate,
        unpacked_s,
        cloned_s,
        (made_ms - begun_ms) / num_files,
        (unpacked_ms - made_ms) / num_files,
    )


@contextmanager
def _place(base: Path, what: str, settings: dict[str, str]) -> Iterator[Path]:
    store, root = base / f"{what}-store", base / what
    root.mkdir(exist_ok=True)
    if _EMPTY in what:
        with _empty(root, settings["bridge"]):
            yield root
    elif settings:
        store.mkdir(exist_ok=True)
        with mount(str(store), root, settings):
            yield root
    else:
        yield root


@contextmanager
def _empty(root: Path, bridge: str) -> Iterator[None]:
    """Mount the file system that only answers, and wait for its first answer."""
    words = ["-m", "benchmarks.fusefs.empty", "--bridge", bridge, root]
    serving = subprocess.Popen([sys.executable, *words])
    until = time.monotonic() + _MOUNTED_WITHIN_S
    while not root.is_mount():
        if serving.poll() is not None or time.monotonic() > until:
            raise click.ClickException(f"{root} was not mounted within {_MOUNTED_WITHIN_S:g} s")
        os.sched_yield()
    try:
        yield
    finally:
        umount(str(root))
        serving.wait(_MOUNTED_WITHIN_S)


_PLACES: dict[str, dict[str, str]] = {
    "disk": {},
    "memory": {},
    "device": {"bridge": "device"},
    f"device, {_EMPTY}": {"bridge": "device"},
    "pyfuse3": {"bridge": "pyfuse3"},
    f"pyfuse3, {_EMPTY}": {"bridge": "pyfuse3"},
    "device, durable_at=close": {"bridge": "device", "durable_at": "close"},
}


@click.command()
@click.option("--files", "num_files", default=5000, show_default=True)
@click.option("--turns", default=3, show_default=True, help="Turns of each; medians are shown.")
@click.option("--report", is_flag=True, help="Write a report.")
def main(num_files: int, turns: int, *, report: bool) -> None:
    """Measure small files on the disk, in memory, and on mounts of a store on that disk."""
    base = Path(tempfile.mkdtemp(prefix="small-files-"))
    memory = Path(tempfile.mkdtemp(prefix="small-files-", dir="/dev/shm"))
    loads: list[float] = []
    try:
        archive(base / "files.tar", num_files)
        repository(base / "repository", num_files // 5)
        found: dict[str, list[tuple[float, ...]]] = {what: [] for what in _PLACES}
        for turn in range(turns):
            for what, settings in _PLACES.items():
                with _place(memory if what == "memory" else base, what, settings) as root:
                    loads.append(os.getloadavg()[0])
                    measure = partial(measured, clones=_EMPTY not in what)
                    found[what].append(measure(root, base, turn, num_files))
        rows = tuple(
            (what, *(_shown(task, [turn[task] for turn in each]) for task in range(len(_TASKS))))
            for what, each in found.items()
        )
        table = Table(columns=("where", *_TASKS), rows=rows)
        print_table(table)
        if report:
            _write(table, num_files, turns, loads)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def _shown(task: int, turns: list[float]) -> str:
    if any(map(math.isnan, turns)):
        return "-"
    form = _FORMS[task].format
    return f"{form(median(turns))} ({form(min(turns))} to {form(max(turns))})"


def _write(table: Table, num_files: int, turns: int, loads: list[float]) -> None:
    reading = (
        f"{num_files} files of 1,000 bytes are created one after the other; an archive has as many of 100 to 8,100 "
        f"bytes, a repository {num_files // 5}. Figures are medians of {turns} turns, with all places in each turn; in "
        "brackets are the least and the most. The load of the machine, with other work on it, was "
        f"{min(loads):.1f} to {max(loads):.1f} on two cores. "
        "Disk and memory are without a mount, and without fsync of their own. "
        f"*{_EMPTY}* is a file system in memory that answers the same requests through that binding and does "
        "nothing else, so no real store can be quicker. The last two columns are processor time of the daemon, "
        "which the load stretches less than wall time."
    )
    command = (
        f"python -m benchmarks.fusefs.small_files --files {num_files} --turns {turns} --report"
    )
    path = write_report(
        __file__, "fusefs_small_files", "Small files on a local store", command, [table], reading
    )
    click.echo(path)


if __name__ == "__main__":
    main()
