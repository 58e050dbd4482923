"""``omniload train run``: a job from its training file, or one rank of a job that another launcher started."""

import os
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from typing_extensions import override

from omniload.base.units import decimal_of
from omniload.front.launch import Launch, launch_of
from omniload.mix.config import MixConfig
from trainer_integration.commands.run_folder import folder_of, report_of
from trainer_integration.report.display import JobConsole, RunDisplay
from trainer_integration.report.report import ReportProcess, kept_report
from trainer_integration.run.imports import kept_imports
from trainer_integration.run.launch import Launcher
from trainer_integration.run.resuming import Resume

__all__ = ["run_job"]


class _Resume(click.ParamType[Resume]):
    """``never``, ``latest`` or a step."""

    name = "resume"

    @override
    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[never|latest|STEP]"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Resume:
        if isinstance(value, int) or value in ("never", "latest"):
            return cast("Resume", value)
        if (step := decimal_of(str(value))) is not None:
            return step
        raise click.BadParameter(
            f"{value!r:.60} is neither never nor latest nor the step of a checkpoint", ctx, param
        )


class _StepRange(click.ParamType[tuple[int, int]]):
    """``10``, or ``10-12``."""

    name = "steps"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        first, dash, last = str(value).partition("-")
        found = [decimal_of(part) for part in (first, last if dash else first)]
        if found[0] is None or found[1] is None or found[0] > found[1]:
            raise click.BadParameter(
                f"{value!r} is neither a step such as 10 nor steps such as 10-12", ctx, param
            )
        return found[0], found[1]


@click.command("run")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--resume",
    type=_Resume(),
    default="never",
    show_default=True,
    help="STEP: continue from the checkpoint of that step. latest: continue from the newest complete "
    "checkpoint. Later checkpoints are set aside. never: refuse to touch an existing run.",
)
@click.option(
    "--profile",
    type=_StepRange(),
    help="Write a Chrome trace of one step, or of a range FIRST-LAST, into the run's folder.",
)
def run_job(config: Path, resume: Resume, profile: tuple[int, int] | None) -> int:
    """Train as described in CONFIG: data plane, ranks, restarts, report.

    Ranks report the compute time of each microbatch. balance.fit_every of the mix file fits costs to these times, and
    omniload mix show RUN shows the result.

    Under torchrun, or as several tasks of Slurm, each process is one rank; then the launcher restarts the ranks.

    \b
    Example:
      omniload train run examples/train.yaml
      omniload train run examples/train.yaml --resume latest
      omniload train run examples/train.yaml --profile 10-12
      torchrun --nproc-per-node 2 -m omniload train run train.yaml
      srun --ntasks 2 omniload train run train.yaml
      omniload train run examples/train.yaml --resume 40
    """  # noqa: D301 -- click's own marker
    launch = launch_of(os.environ)
    if launch.world_size > 1:
        return _run_rank(config, launch, resume, profile)
    console = JobConsole()
    with RunDisplay(console) as display:
        # One rank under torchrun, or one task of Slurm for all ranks: a repeated start resumes.
        again = "latest" if launch.restarts else resume
        launcher = Launcher(config, resume=again, observer=display.observe, profile=profile)
        launcher.plan.require_ranks(launch)
        display.expect(launcher.train.steps, launcher.mix, launcher.run_dir)
        # In a thread, because this process only waits for its ranks, and has time.
        with kept_report(launcher.run_dir):
            code = launcher.run()
    console.print(f"run folder: {launcher.run_dir.resolve()}", highlight=False, soft_wrap=True)
    report_of(launcher.run_dir)
    return code


def _run_rank(config: Path, launch: Launch, resume: Resume, profile: tuple[int, int] | None) -> int:
    """Run one rank; rank 0 shows the job."""
    with kept_imports():
        from trainer_integration.run.external_rank import run_rank  # noqa: PLC0415 -- torch takes seconds

    # Only one rank shows the job, because all ranks have the same terminal.
    if launch.rank:
        return run_rank(config, launch, resume)
    with ReportProcess() as report, _ReportedDisplay(JobConsole(), report) as display:
        code = run_rank(config, launch, resume, display=display, profile=profile)
    report_of(folder_of(config))
    return code


class _ReportedDisplay(RunDisplay):
    """Shows a job, and keeps its report up to date once its run is known."""

    def __init__(self, console: Console, report: ReportProcess) -> None:
        super().__init__(console)
        self._report = report

    @override
    def expect(self, steps: int, mix: MixConfig, run_dir: Path | None = None) -> None:
        super().expect(steps, mix, run_dir)
        if run_dir is not None:
            self._report.start(run_dir)
