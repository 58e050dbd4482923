"""Costs of the base install: disk, ``import omniload``, ``omniload --help``.

python -m benchmarks.install --help
"""

import os
import resource
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from statistics import median

import click

from benchmarks.report import Table, print_table, write_report

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_LINES = {
    "python": ("python", "-c", "pass"),
    "import omniload": ("python", "-c", "import omniload"),
    "import omniload; omniload.open": ("python", "-c", "import omniload; omniload.open"),
    "omniload --help": ("omniload", "--help"),
}


def _built(folder: Path) -> Path:
    """Return the wheel of the last commit."""
    tree, archive = folder / "tree", folder / "tree.tar"
    tree.mkdir()
    git = ["git", "-C", str(_ROOT), "archive", "-o", str(archive), "HEAD"]
    subprocess.run(git, check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(tree)]
    subprocess.run(wheel, check=True)
    return next(folder.glob("*.whl"))


def _installed(wheel: Path, folder: Path) -> Path:
    """Return the programs folder of an environment with the wheel and its requirements."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", str(wheel)]
    subprocess.run([*pip, "-c", str(_ROOT / "constraints.txt")], check=True)
    return programs


def _bytes_of(folder: Path) -> dict[str, int]:
    """Return the bytes on disk of each package of an environment, byte code included."""
    (site,) = (folder / "lib").glob("python*/site-packages")
    return {
        each.name: sum(f.stat().st_blocks * 512 for f in (each, *each.rglob("*")) if f.is_file())
        for each in site.iterdir()
    }


def _cpu_s(programs: Path, line: tuple[str, ...]) -> float:
    """Return the processor time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(programs / line[0]), *line[1:]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=programs, env={"PATH": ""})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.option("--repeats", default=9, show_default=True, help="Runs of each command.")
@click.option("--report/--no-report", default=True, show_default=True)
def main(repeats: int, report: bool) -> None:
    """Install the wheel of the last commit into a bare environment and measure it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = _built(folder)
        programs = _installed(wheel, folder / "venv")
        for line in _LINES.values():  # byte code, and the disk's cache
            _cpu_s(programs, line)
        times = {
            what: median(_cpu_s(programs, line) for _ in range(repeats))
            for what, line in _LINES.items()
        }
        sizes = _bytes_of(folder / "venv")
        wheel_kb = wheel.stat().st_size / 1000
    total = sum(sizes.values()) / 1e6
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:4]
    disk = Table(
        caption="Disk, with pip and byte code",
        columns=("what", "MB"),
        rows=(
            ("wheel", f"{wheel_kb / 1000:.2f}"),
            ("environment", f"{total:.0f}"),
            *((name, f"{size / 1e6:.0f}") for name, size in largest),
        ),
    )
    cpu = Table(
        caption="Processor time",
        columns=("command", "s", "above bare Python, s"),
        rows=tuple((what, f"{t:.3f}", f"{t - times['python']:.3f}") for what, t in times.items()),
    )
    for table in (disk, cpu):
        print_table(table)
    if report:
        load = f"{os.getloadavg()[0]:.0f}"
        reading = (
            f"The environment takes {total:.0f} MB of 400, `import omniload` "
            f"{times['import omniload'] - times['python']:.3f} s of 0.1, `omniload --help` "
            f"{times['omniload --help']:.2f} s of 0.4. Load of the machine: {load}."
        )
        write_report(
            __file__,
            "install",
            "Base install",
            "python -m benchmarks.install",
            [disk, cpu],
            reading,
        )


if __name__ == "__main__":
    main()
