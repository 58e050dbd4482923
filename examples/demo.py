"""The main job, end to end: corpus, mix, training, kill, resume, proof, report.

    python examples/demo.py            a few minutes on two cores
    python examples/demo.py --fresh    build the corpus anew and forget earlier runs

Ends with an exit code other than 0 if the loss does not fall, the killed run does not come back, or a step has other
samples than in an unbroken run.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omniload import OmniloadError
from omniload.base.log import set_up_logging
from trainer_integration.config import load_train
from trainer_integration.report.display import RunDisplay, print_proof, print_summary
from trainer_integration.report.proof import Proof, prove
from trainer_integration.report.report import read_finished, write_report
from trainer_integration.report.run_summary import RunSummary
from trainer_integration.run.launch import Launcher
from trainer_integration.run.run_log import EventLine, StepLine

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
CORPUS = "demo/corpus"
MIX = "examples/quickstart.yaml"
TRAIN = "examples/train.yaml"
VICTIM = "rank 1"
WAIT_TARGET = 0.02
LEAST_FALL = 1.0
"""Nats that the loss must fall by; token frequencies alone account for about two."""


class DemoError(Exception):
    """A phase did not show what it should."""


@dataclass
class Demo:
    """The phases, and the time of each."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Print the title of a phase and time it."""
        self.console.print()
        self.console.rule(f"[bold cyan]{len(self.seconds) + 1}[/]  [bold]{title}[/]", align="left")
        began_s = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - began_s

    def omniload(self, *arguments: str) -> None:
        """Run a command as a user would type it."""
        self.console.print(f"\n[dim]$[/] [bold]omniload {' '.join(arguments)}[/]", highlight=False)
        self.console.file.flush()
        line = [sys.executable, "-m", "omniload", *arguments]
        done = subprocess.run(line, cwd=ROOT, check=False)
        if done.returncode:
            raise DemoError(f"omniload {arguments[0]} {arguments[1]} ended with {done.returncode}")


class Killer:
    """Ends one trainer rank with SIGKILL, once, in the middle between two checkpoints."""

    def __init__(self, display: RunDisplay) -> None:
        self._display = display
        self.killed = False

    def observe(self, launcher: Launcher, line: StepLine | EventLine) -> None:
        """Show the line, then kill at the chosen step."""
        self._display.observe(launcher, line)
        if self.killed or not isinstance(line, StepLine):
            return
        due = line.step >= between(launcher.train.steps, launcher.train.checkpoint.every_steps)
        pid = launcher.pids.get(VICTIM)
        if due and pid is not None:
            self.killed = True
            self._display.say(f"[bold red]kill -9 {pid}[/]   {VICTIM}, as a failing machine would")
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run the demo; return its exit code."""
    options = options_of(__doc__)
    set_up_logging("WARNING")
    os.chdir(ROOT)
    demo = Demo(Console(highlight=False))
    try:
        clear(DEMO / "run", fresh=options.fresh)
        _data(demo)
        run_dir = _train(demo)
        proof, summary = prove_run(demo, run_dir, TRAIN)
        conclude(demo, proof, summary, run_dir)
    except DemoError as failure:
        demo.console.print(f"\n[bold red]failed:[/] {failure}")
        return 1
    except OmniloadError as error:
        demo.console.print("\n[bold red]failed:[/]", str(error), markup=True, soft_wrap=True)
        return error.exit_code
    return 0


def options_of(told: str) -> argparse.Namespace:
    """Return the options of the command line; ``told`` is the description in ``--help``."""
    parser = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fresh", action="store_true", help="remove demo/ with its corpus and earlier runs first"
    )
    return parser.parse_args()


def clear(run: Path, *, fresh: bool) -> None:
    """Make room for a new run; an earlier run is kept under another name."""
    if fresh and DEMO.exists():
        shutil.rmtree(DEMO)
    if run.exists():
        names = (f"{run.name}-{number}" for number in range(1, 10_000))
        run.rename(next(path for name in names if not (path := run.with_name(name)).exists()))


def _data(demo: Demo) -> None:
    with demo.phase("A real corpus, offline: what this Python installation holds"):
        demo.omniload("mix", "sample", CORPUS)
    with demo.phase("The mix: checked, forecast and looked at before anything starts"):
        demo.omniload("mix", "check", MIX, "--dp", "2")
        steps = str(load_train(TRAIN)[0].steps)
        demo.omniload("mix", "plan", MIX, "--steps", steps, "--dp", "2")
        demo.omniload("mix", "preview", MIX, "--step", "3", "--rows", "2", "--dp", "2")


def _train(demo: Demo) -> Path:
    with demo.phase(f"Training on two ranks; {VICTIM} is killed half-way and the job comes back"):
        demo.console.print(f"\n[dim]$[/] [bold]omniload train run {TRAIN}[/]\n")
        with RunDisplay(demo.console) as display:
            killer = Killer(display)
            launcher = Launcher(Path(TRAIN), observer=killer.observe)
            display.expect(launcher.train.steps, launcher.mix)
            code = launcher.run()
        if code:
            raise DemoError(f"training ended with exit code {code}; see {launcher.run_dir}/logs")
        if not killer.killed:
            raise DemoError(f"{VICTIM} was never killed, so nothing was resumed")
    return launcher.run_dir.resolve()


def prove_run(demo: Demo, run_dir: Path, train: str) -> tuple[Proof, RunSummary]:
    """Prove a run that was killed; ``train`` is the command that a user would run."""
    with demo.phase("Proof: every step saw the samples of an unbroken run"):
        demo.console.print(f"\n[dim]$[/] [bold]omniload train verify {train}[/]\n")
        proof = prove(run_dir)
        print_proof(demo.console, proof)
        proof.require()
        summary = read_finished(run_dir).summary
        if summary.failures < 1 or not proof.repeated:
            raise DemoError("no step was trained twice, so the kill proved nothing")
        demo.console.print()
        print_summary(demo.console, summary)
        if not summary.last_loss < summary.first_loss - LEAST_FALL:
            raise DemoError(
                f"the loss went from {summary.first_loss:.3f} to {summary.last_loss:.3f}, "
                f"less than {LEAST_FALL} nats down"
            )
    return proof, summary


def conclude(demo: Demo, proof: Proof, summary: RunSummary, run_dir: Path) -> None:
    """Write the report, and print the results."""
    report = write_report(run_dir)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    table.add_column()
    for title, seconds in demo.seconds.items():
        table.add_row(f"{seconds:.0f} s", title)
    table.add_row(f"[bold]{sum(demo.seconds.values()):.0f} s[/]", "[bold]in all[/]")
    demo.console.print()
    demo.console.rule("[bold green]done[/]", align="left")
    demo.console.print(table)
    waits = f"wait for data {summary.wait_share:.2%} of a step (target {WAIT_TARGET:.0%})"
    if summary.wait_share > WAIT_TARGET:
        waits = f"[yellow]{waits}: above target[/]"
    demo.console.print(
        f"\nloss {summary.first_loss:.2f} to {summary.last_loss:.2f}, "
        f"{len(proof.repeated)} steps trained twice on the same samples, {waits}",
        soft_wrap=True,
    )
    demo.console.print(f"report: [bold]{report}[/]", soft_wrap=True)


def between(steps: int, every: int) -> int:
    """Return a step half-way through the run and half-way between two checkpoints."""
    return steps // 2 // every * every + every // 2


if __name__ == "__main__":
    sys.exit(main())
