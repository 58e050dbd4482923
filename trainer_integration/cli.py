"""``omniload train``: run the included trainer, prove a run, show what it came to."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
import orjson
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from typing_extensions import override

from omniload.actors.status_file import PlaneStatus, read_status
from omniload.base.cli import FiniteRange
from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.units import decimal_of, format_bytes
from omniload.base.writing import write_whole
from omniload.commands.runs.top import once_option, roles_view, status_json, watch_until_interrupted
from omniload.front.launch import Launch, launch_of
from omniload.mix.config import MixConfig
from trainer_integration.config import load_train
from trainer_integration.report.display import (
    JobConsole,
    RunDisplay,
    print_proof,
    print_summary,
    run_line,
    run_now,
)
from trainer_integration.report.proof import Proof, prove
from trainer_integration.report.report import (
    ReportProcess,
    kept_report,
    read_finished,
    write_report,
)
from trainer_integration.run.imports import kept_imports
from trainer_integration.run.launch import Launcher
from trainer_integration.run.resuming import Resume

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_RUN = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))


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


@click.group("train")
def command() -> None:
    """Train the included MoE model through the data plane."""


@command.command("run")
@click.argument("config", type=_FILE)
@click.option(
    "--resume",
    type=_Resume(),
    default="never",
    show_default=True,
    help="Continue from the checkpoint of STEP, or from the newest that is whole; later ones are set "
    "aside. Refuse to touch an old run otherwise.",
)
@click.option(
    "--profile",
    type=_StepRange(),
    help="Write a Chrome trace of these steps, the first and the last or one, into the run's folder.",
)
def run_job(config: Path, resume: Resume, profile: tuple[int, int] | None) -> int:
    """Train as CONFIG says: data plane, ranks, restarts, report.

    Under torchrun, or as several tasks of Slurm, each process is one rank, and what starts them
    restarts them.

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
        # One rank under torchrun, or one task of Slurm's for all ranks: a start made again goes on.
        again = "latest" if launch.restarts else resume
        launcher = Launcher(config, resume=again, observer=display.observe, profile=profile)
        launcher.plan.require_ranks(launch)
        display.expect(launcher.train.steps, launcher.mix, launcher.run_dir)
        # From a thread: this process waits for its ranks, and has time.
        with kept_report(launcher.run_dir):
            code = launcher.run()
    console.print(f"run folder: {launcher.run_dir.resolve()}", highlight=False, soft_wrap=True)
    _report(launcher.run_dir)
    return code


def _run_rank(config: Path, launch: Launch, resume: Resume, profile: tuple[int, int] | None) -> int:
    """Run one rank; rank 0 shows the job."""
    with kept_imports():
        from trainer_integration.run.external_rank import run_rank  # noqa: PLC0415 -- torch takes seconds

    if launch.rank:
        return run_rank(config, launch, resume)
    with ReportProcess() as report, _ReportedDisplay(JobConsole(), report) as display:
        code = run_rank(config, launch, resume, display=display, profile=profile)
    _report(_folder_of(config))
    return code


class _ReportedDisplay(RunDisplay):
    """Shows a job, and has its report kept from when its run is known."""

    def __init__(self, console: Console, report: ReportProcess) -> None:
        super().__init__(console)
        self._report = report

    @override
    def expect(self, steps: int, mix: MixConfig, run_dir: Path | None = None) -> None:
        super().expect(steps, mix, run_dir)
        if run_dir is not None:
            self._report.start(run_dir)


@command.command("verify")
@_RUN
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First step to replay; the run's journal says where it starts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def verify(run: Path, from_step: int, as_json: bool) -> None:
    """Prove that RUN, however often it was interrupted, saw the samples of an unbroken run.

    RUN is a run's folder or its training file. The mix is replayed on one rank without
    training; every step's digest must be the one that was logged, in each attempt.
    Ends with exit code 5 where a step differs.

    \b
    Example:
      omniload train verify demo/run
      omniload train verify examples/train.yaml --from-step 40
    """  # noqa: D301 -- click's own marker
    folder = _folder_of(run)
    proof = _proved(folder, from_step)
    if as_json:
        content = proof.model_dump(mode="json") | {"holds": proof.holds}
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    else:
        print_proof(Console(), proof)
        _report(folder)
    proof.require()


@command.command("show")
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--html", is_flag=True, help="Write the report again too.")
@click.option(
    "--beside",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Show another run in the report.",
)
def show(run: Path, as_json: bool, html: bool, beside: Path | None) -> None:
    """Show what RUN, a run's folder or its training file, came to.

    \b
    Example:
      omniload train show demo/run
      omniload train show examples/train.yaml --json
      omniload train show demo/run --html --beside demo/run-before
    """  # noqa: D301 -- click's own marker
    folder = _folder_of(run)
    finished = read_finished(folder)
    if html or beside is not None:
        write_report(folder, beside=None if beside is None else _folder_of(beside))
    if as_json:
        proved = None if finished.proof is None else finished.proof.holds
        content = asdict(finished.summary) | {"proved": proved}
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        return
    console = Console()
    print_summary(console, finished.summary)
    if finished.proof is not None:
        print_proof(console, finished.proof)


@command.command("watch")
@_RUN
@once_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def watch(run: Path, once: bool, as_json: bool) -> None:
    """Watch RUN, a run's folder or its training file, as it goes on.

    The last step, its loss and waits, the last checkpoint, and what every role of the data plane
    does; below, the last line of each role in trouble. Ctrl-C ends the view, not the run.

    \b
    Example:
      omniload train watch demo/run
      omniload train watch demo/run --once --json
    """  # noqa: D301 -- click's own marker
    folder = _folder_of(run)
    if as_json:
        plane = _plane_of(folder)
        content = {
            "run": run_now(folder).to_json(),
            "plane": None if plane is None else status_json(folder, plane),
        }
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        return
    watch_until_interrupted(lambda: _view_of(folder), once=once)


def _view_of(folder: Path) -> RenderableType:
    plane = _plane_of(folder)
    roles = "no data plane is up" if plane is None else roles_view(folder, plane)
    return Group(run_line(run_now(folder)), roles)


def _plane_of(folder: Path) -> PlaneStatus | None:
    try:
        return read_status(folder)
    except StateError:
        return None  # before the plane is up, and of an older release


@command.command("export")
@_RUN
@click.argument("folder", type=_FOLDER)
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint; the newest by default.")
def export(run: Path, folder: Path, step: int | None) -> None:
    """Write the model of RUN to FOLDER as Hugging Face's Mixtral, with the tokenizer that its mix names.

    \b
    Example:
      omniload train export demo/run model
    """  # noqa: D301 -- click's own marker
    from trainer_integration.export.from_run import export_run  # noqa: PLC0415 -- torch takes seconds

    found = export_run(_folder_of(run), _checkpoints_of(run), folder, step)
    click.echo(f"step {found.step}: {folder.resolve()}")


@command.command("sample")
@_RUN
@click.option("--prompt", required=True, help="Text to go on from.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--temperature", type=FiniteRange(0, 100), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint; the newest by default.")
def sample(
    run: Path, prompt: str, tokens: int, temperature: float, seed: int, step: int | None
) -> None:
    """Print text as the model of RUN goes on from a prompt.

    \b
    Example:
      omniload train sample demo/run --prompt "def main("
    """  # noqa: D301 -- click's own marker
    from trainer_integration.export.from_run import (  # noqa: PLC0415 -- torch takes seconds
        continued_text,
        model_of_run,
    )

    found = model_of_run(_folder_of(run), _checkpoints_of(run), step)
    click.echo(continued_text(found, prompt, tokens, temperature=temperature, seed=seed))


@command.command("crossover")
@click.argument("config", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--tokens", type=click.IntRange(1, 1 << 24), default=1024, show_default=True)
@click.option("--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True)
def crossover(config: Path, output: Path, tokens: int, repetitions: int) -> None:
    """Measure on this host whether a2a or ag_rs is the faster for the layers of CONFIG; write OUTPUT.

    A layer of experts of the training file's model runs on its sp ranks, over gloo, with 1, 2, ...
    experts for each of TOKENS tokens a rank. `parallel: {crossover: OUTPUT}` then decides for `auto`.

    \b
    Example:
      omniload train crossover train.yaml crossover.json
    """  # noqa: D301 -- click's own marker
    from trainer_integration.run.crossover_ranks import measured_crossover  # noqa: PLC0415 -- torch takes seconds

    train, _ = load_train(config)
    sp, shape = train.parallel.sp, train.model
    if sp < 2:
        raise ConfigError(f"{config}: parallel.sp is {sp}; experts are shared out from 2 on")
    # By bytes the two are level at sp: as far again shows where time puts it.
    top_ks = range(1, min(shape.num_experts, 2 * sp + 2) + 1)
    found = measured_crossover(shape, sp=sp, tokens=tokens, top_ks=top_ks, repetitions=repetitions)
    write_whole(output, orjson.dumps(found.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    table = Table(header_style="dim")
    for heading in ("experts a token", "a2a, ms", "ag_rs, ms", "a2a, bytes", "ag_rs, bytes"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        times = (f"{1000 * row.seconds[name]:.2f}" for name in ("a2a", "ag_rs"))
        sizes = (format_bytes(row.sent_bytes[name]) for name in ("a2a", "ag_rs"))
        table.add_row(str(row.top_k), *times, *sizes)
    Console().print(table)
    click.echo(
        f"a2a is the faster up to {found.by_time} experts a token, and sends less up to {found.by_bytes}"
    )


def _checkpoints_of(run: Path) -> str:
    """Return where the checkpoints of a run are; its folder alone has them within."""
    if run.is_dir():
        return str(run / "checkpoints")
    train, folder = load_train(run)
    return train.checkpoint_location(folder)


def _folder_of(run: Path) -> Path:
    """Return the folder of a run that is named by it or by its training file."""
    if run.is_dir():
        return run
    train, folder = load_train(run)
    return train.run_folder(folder)


def _proved(folder: Path, from_step: int) -> Proof:
    console = Console(stderr=True)
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("replaying", total=None)
        return prove(
            folder,
            from_step=from_step,
            tell=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _report(folder: Path) -> None:
    """Write the report and say where it is; a run does not fail for want of one."""
    try:
        path = write_report(folder)
    except (OmniloadError, OSError) as error:
        click.echo(f"no report: {error}", err=True)
        return
    click.echo(f"report: {path.resolve()}")
