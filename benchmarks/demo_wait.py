"""Share of a step for which the included trainer waits for data, with two ranks through Ray.

python -m benchmarks.demo_wait --help
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import yaml

from benchmarks.report import Table, print_table, write_report
from omniload.source.sample_data.corpus import build_sample_corpus
from trainer_integration.run.launch import Launcher
from trainer_integration.run.run_log import StepLine, last_of_each_step, read_log

__all__ = ["Waits", "main", "waits_of"]

_ROOT = Path(__file__).resolve().parent.parent
_EXAMPLES = _ROOT / "examples"
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Shares of the step time, over the steps of a run."""

    steps: int
    ranks: int
    seconds: float
    """Median of a step."""
    median: float
    """Median share of the slowest rank's wait."""
    ninth: float
    """Share that nine of ten steps stay below."""
    most: float
    """Highest share."""
    whole: float
    """All waits over all step time."""


def waits_of(steps: Sequence[StepLine]) -> Waits:
    """Return the waits of ranks; the first steps, in which everything starts, are left out.

    Raises:
        ValueError: There are no other steps.
    """
    kept = steps[_WARM_UP_STEPS:]
    if not kept:
        raise ValueError(f"the run has {len(steps)} steps; {_WARM_UP_STEPS + 1} or more are needed")
    seconds = np.array([line.seconds for line in kept])
    # Gradients are summed, so the rank with the longest wait keeps all others waiting.
    waited = np.array([max(line.wait_s) for line in kept])
    shares = waited / seconds
    return Waits(
        steps=len(kept),
        ranks=len(kept[0].wait_s),
        seconds=float(np.median(seconds)),
        median=float(np.median(shares)),
        ninth=float(np.quantile(shares, 0.9)),
        most=float(shares.max()),
        whole=float(waited.sum() / seconds.sum()),
    )


def run_demo(folder: Path, steps: int) -> Path:
    """Train as ``examples/train.yaml`` says, in a folder of its own; return the run's folder."""
    build_sample_corpus(folder / "demo" / "corpus")
    examples = folder / "examples"
    examples.mkdir()
    mix = (_EXAMPLES / "quickstart.yaml").read_text(encoding="utf-8")
    (examples / "quickstart.yaml").write_text(mix, encoding="utf-8")
    train = yaml.safe_load((_EXAMPLES / "train.yaml").read_text(encoding="utf-8"))
    (examples / "train.yaml").write_text(yaml.safe_dump(train | {"steps": steps}), encoding="utf-8")
    launcher = Launcher(examples / "train.yaml")
    if code := launcher.run():
        raise click.ClickException(f"the training ended with exit code {code}")
    return launcher.run_dir


READING = """\
The trainer waits for data {median:.2f} % of a step in the median, {ninth:.2f} % or less in nine steps of ten,
{most:.1f} % at most, and {whole:.2f} % of all its time. The wait is that of the slowest rank, measured in the client
from the request of a batch to its arrival. There are {ranks} ranks on this machine, and a step takes {seconds:.2f} s
in the median; the first {warm} steps are left out. The run is that of the demo without its kill. Two trainer
processes, planner, loaders and constructors share the cores, so the processor time that the data plane takes from the
trainer shows in the length of the step and not in the wait."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--run-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read the log of this run instead of training.",
)
@click.option(
    "--steps", default=80, show_default=True, type=click.IntRange(3), help="Steps to train."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(run_dir: Path | None, steps: int, report: bool) -> None:
    """Measure the wait for data in the demo's training.

    \b
    Example:
      python -m benchmarks.demo_wait --run-dir demo/run --no-report
    """  # noqa: D301 -- click's own marker
    if run_dir is None:
        with tempfile.TemporaryDirectory() as made:
            found = waits_of(last_of_each_step(read_log(run_demo(Path(made), steps))))
    else:
        found = waits_of(last_of_each_step(read_log(run_dir)))
    table = table_of(found)
    print_table(table)
    if report:
        reading = READING.format(
            median=found.median * 100,
            ninth=found.ninth * 100,
            most=found.most * 100,
            whole=found.whole * 100,
            ranks=found.ranks,
            seconds=found.seconds,
            warm=_WARM_UP_STEPS,
        )
        path = write_report(
            __file__,
            "demo_wait",
            "The trainer's wait for data",
            f"python -m benchmarks.demo_wait --steps {steps}",
            [table],
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


def table_of(found: Waits) -> Table:
    """Return the one row."""
    return Table(
        columns=(
            "ranks",
            "steps",
            "step, s",
            "wait, median",
            "nine of ten below",
            "most",
            "of all time",
        ),
        rows=(
            (
                found.ranks,
                found.steps,
                f"{found.seconds:.3f}",
                *(f"{x * 100:.2f} %" for x in (found.median, found.ninth, found.most, found.whole)),
            ),
        ),
        caption="Wait of the slowest rank, part of the step",
    )


if __name__ == "__main__":
    main()
