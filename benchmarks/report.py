"""Dated benchmark reports: the figures, the hardware, the command and the commit.

Every benchmark writes its report with this module, so all reports read alike and contain everything that is needed to
repeat them. Run benchmarks from the root of the tree, as modules::

    python -m benchmarks.planner.balance

"""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from typing_extensions import override

__all__ = [
    "REPORTS",
    "Machine",
    "Table",
    "commit",
    "format_report",
    "print_table",
    "this_machine",
    "write_report",
]

_BENCHMARKS = Path(__file__).resolve().parent
REPORTS = _BENCHMARKS / "reports"
"""Folder of the reports, with the same subfolders as the benchmarks."""

Cell = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware in words that make sense elsewhere; never a host's name."""

    cpu: str
    """Model of the processor."""
    cores: int
    """Cores that this process may use."""
    memory_gib: int
    """Memory, rounded."""
    accelerator: str = ""
    """Model of the accelerator, if the benchmark used one."""

    @property
    def label(self) -> str:
        """Short name for file names: ``2core``, or ``2core-h100``."""
        tail = "-".join(self.accelerator.lower().split())
        return f"{self.cores}core-{tail}" if tail else f"{self.cores}core"

    @override
    def __str__(self) -> str:
        tail = f", {self.accelerator}" if self.accelerator else ""
        cores = "core" if self.cores == 1 else "cores"
        return f"{self.cpu}, {self.cores} {cores}, {self.memory_gib} GiB memory{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under a header. Format numbers yourself: all shown digits are significant."""

    columns: tuple[str, ...]
    """Header."""
    rows: tuple[tuple[Cell, ...], ...]
    """Cells, one tuple for each row."""
    caption: str = ""
    """Line above the table."""

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows[{i}] has {len(row)} cells under {len(self.columns)} columns; give each column one cell"
                )

    def as_markdown(self) -> str:
        """Return the table as markdown, with its caption above."""
        lines = [_line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows)]
        return "\n".join([*([self.caption, ""] if self.caption else []), *lines])


def this_machine(accelerator: str = "") -> Machine:
    """Describe this machine; ``accelerator`` names an accelerator that the benchmark used."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / (1 << 30)),
        accelerator=accelerator,
    )


def commit() -> str:
    """Return the short commit of the tree, and say so if tracked files differ from it."""
    root = _BENCHMARKS.parent
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git tree)"
    return f"{head} with local changes" if changed else head


def format_report(title: str, facts: Sequence[tuple[str, str]], body: Sequence[str]) -> str:
    """Return a report as markdown: title, a list of facts, then the blocks of ``body``."""
    listed = "\n".join(f"- **{name}**: {value}" for name, value in facts)
    return "\n\n".join([f"# {title}", listed, *body]) + "\n"


def write_report(  # noqa: PLR0913 -- what was measured, by what, and what came out
    benchmark: str,
    name: str,
    title: str,
    command: str,
    tables: Sequence[Table],
    reading: str,
    *,
    machine: Machine | None = None,
) -> Path:
    """Write ``reports/<folder>/<date>-<hardware>-<name>.md``; a report of the same day is replaced.

    The folder of a report is that of the benchmark: reports of ``benchmarks/planner/balance.py`` are in
    ``reports/planner``.

    Args:
        benchmark: ``__file__`` of the benchmark.
        name: Subject of the measurement, in one word for the file name, such as ``balance``.
        title: Heading.
        command: Command line that repeats the measurement from the root of the tree.
        tables: The figures.
        reading: One paragraph: what the figures show, and what they do not.
        machine: Hardware; by default this machine without an accelerator.

    Returns:
        The file of the report.

    Raises:
        ValueError: The benchmark lies outside of ``benchmarks``.
    """
    hardware = machine or this_machine()
    date = datetime.now(UTC).date().isoformat()
    facts = (
        ("Date", date),
        ("Hardware", str(hardware)),
        ("Python", platform.python_version()),
        ("Command", f"`{command}`"),
        ("Commit", commit()),
    )
    folder = REPORTS / Path(benchmark).resolve().parent.relative_to(_BENCHMARKS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{date}-{hardware.label}-{name}.md"
    blocks = [*(table.as_markdown() for table in tables), reading.strip()]
    path.write_text(format_report(title, facts, blocks), encoding="utf-8")
    return path


def print_table(table: Table) -> None:
    """Show a table on the terminal; a pipe has no width limit."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    shown = RichTable(*table.columns, title=table.caption or None)
    for row in table.rows:
        shown.add_row(*map(str, row))
    console.print(shown)


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
