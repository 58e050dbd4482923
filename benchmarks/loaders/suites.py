"""PyTorch's and torchdata's own tests of their loaders, run with our loader instead.

The tests come from a checkout of any version; none of them is kept here. A test that plain torch passes and ours
fails must be listed in docs/how-to/trainers/dataloader-deviations.md with its reason.

python -m benchmarks.loaders.suites --help
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as XmlTree

import click

from benchmarks.loaders.suites_plugin import VARIABLE
from benchmarks.report import Table, print_table

__all__ = ["deviations_in", "main", "needless", "outcomes_in", "unlisted"]

_ROOT = Path(__file__).resolve().parents[2]
_RAN = (0, 1)
"""Exit codes of pytest if it ran cases; a suite that cannot be collected has not passed."""
_IN_CHILDREN = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import benchmarks.loaders.suites_plugin
"""
"""Code that every Python of a suite runs at its start.

Without it, cases that start a process would test torch's loader there.
"""
_DEVIATIONS = _ROOT / "docs/how-to/trainers/dataloader-deviations.md"


def outcomes_in(report: str) -> dict[str, str]:
    """Return ``passed``, ``failed`` or ``skipped`` of each case in a JUnit report."""
    outcomes = {}
    for case in XmlTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcomes[name] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def deviations_in(page: str) -> dict[str, str]:
    """Return the reason of each case in the page's table, whose rows begin with a name in backquotes."""
    return dict(re.findall(r"^\| `([^`]+)` \| (.+?) \|$", page, flags=re.MULTILINE))


def unlisted(theirs: dict[str, str], ours: dict[str, str], listed: dict[str, str]) -> list[str]:
    """Return the cases that their loader passes and ours fails, without a reason."""
    return sorted(
        name
        for name, outcome in theirs.items()
        if outcome == "passed" and ours.get(name) != "passed" and name not in listed
    )


def needless(theirs: dict[str, str], ours: dict[str, str], listed: dict[str, str]) -> list[str]:
    """Return the listed tests that both loaders pass."""
    return sorted(name for name in listed if theirs.get(name) == ours.get(name) == "passed")


def _run(tests: Path, loader: str, limit_s: int, only: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        (Path(folder) / "sitecustomize.py").write_text(_IN_CHILDREN, encoding="utf-8")
        options = ["-p", "benchmarks.loaders.suites_plugin", "-c", os.devnull, "-q"]
        options += ["--rootdir", str(tests.parent), "--timeout", str(limit_s)]
        options += ["--junitxml", str(report), "-p", "no:cacheprovider", "-k", only]
        places = [folder, str(_ROOT), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            VARIABLE: loader,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        }
        command = [sys.executable, "-m", "pytest", *options, str(tests)]
        done = subprocess.run(
            command, cwd=tests.parent, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists() or done.returncode not in _RAN:
            raise click.ClickException(
                f"{tests} did not run with {loader}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return outcomes_in(report.read_text(encoding="utf-8"))


@click.command()
@click.option("--torch", "torchs", type=click.Path(exists=True, path_type=Path), multiple=True,
              help="PyTorch's test/test_dataloader.py.")  # fmt: skip
@click.option("--torchdata", "torchdatas", type=click.Path(exists=True, path_type=Path),
              multiple=True, help="torchdata's test/stateful_dataloader, or a file of it.")  # fmt: skip
@click.option("--limit-s", default=120, show_default=True, help="Time limit of a case in seconds.")
@click.option("--only", default="", help="Cases to run, as for pytest's -k.")
def main(torchs: tuple[Path, ...], torchdatas: tuple[Path, ...], limit_s: int, only: str) -> None:
    """Run suites of loader tests with their own loader and with ours, and compare case by case."""
    listed, rows = deviations_in(_DEVIATIONS.read_text(encoding="utf-8")), []
    missing: list[str] = []
    spare: list[str] = []
    for tests in (path.resolve() for path in (*torchs, *torchdatas)):
        theirs = _run(tests, "theirs", limit_s, only)
        ours = _run(tests, "ours", limit_s, only)
        new = unlisted(theirs, ours, listed)
        missing += new
        spare += needless(theirs, ours, listed)
        counts = Counter(theirs.values()), Counter(ours.values())
        rows.append(
            (tests.name, counts[0]["passed"], counts[1]["passed"], counts[0]["skipped"], len(new))
        )
    columns = (
        "suite",
        "their loader passes",
        "ours passes",
        "skipped",
        "neither passed nor listed",
    )
    print_table(Table(columns=columns, rows=tuple(rows)))
    for name in missing:
        click.echo(f"not passed: {name}")
    for name in spare:
        click.echo(f"listed, and passed: {name}")
    sys.exit(1 if missing or spare else 0)


if __name__ == "__main__":
    main()
