"""``omniload mix skip``: leaves out the steps, the shard or the source that made the loss of a run jump."""

from pathlib import Path

import click

from omniload.base.errors import ConfigError
from omniload.base.units import decimal_of
from omniload.commands.display import output, say
from omniload.commands.edits.arguments import change_options, checked
from omniload.commands.edits.taken import ask, change_and_say, say_what_stays
from omniload.commands.options import run_argument
from omniload.mix.edits.edit import RetireSource, SkipShard, SkipSteps

__all__ = ["skip"]


@click.command("skip")
@run_argument
@click.option(
    "--steps",
    metavar="A:B",
    help="Leave out the samples of steps A to B - 1; no job of the run may be up.",
)
@click.option(
    "--source",
    "name",
    help="Stop drawing from a source, as omniload mix retire does; with --shard, the source of that shard.",
)
@click.option(
    "--shard",
    metavar="FILE",
    help="Stop drawing from a file of a source, given by its path or URL, or by the end of it from a / on.",
)
@change_options
def skip(  # noqa: PLR0913 -- one for each option
    run: Path,
    *,
    steps: str | None,
    name: str | None,
    shard: str | None,
    at: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Leave out the steps, the shard or the source that made the loss of RUN jump.

    With --steps, resume the run from a checkpoint of step A or before. Steps before A stay as they were, and step A
    draws the samples that step B would have drawn. Nothing else is lost, and nothing is drawn twice. With --shard,
    records of the shard that are not yet begun at the step of the change are left out, in later epochs too; all other
    records keep their order. If no job of the run is up, --at may be a step that was already trained on.

    \b
    Example:
      omniload mix skip demo/run --steps 30:32
      omniload mix skip demo/run --shard docstrings/part-001.jsonl
      omniload mix skip demo/run --source notices
    """  # noqa: D301 -- click's own marker
    # --source alone is a choice of its own; with --shard, it says which source's file is meant.
    if sum(each is not None for each in (steps, shard or name)) != 1 or shard == "":
        raise ConfigError(
            "say what to skip: --steps A:B, --shard FILE or --source NAME, one of them; --source beside --shard says "
            "which source has the file"
        )
    if shard is not None:
        _skip_shard(
            run, checked(SkipShard, {"file": shard, "source": name}), at, timeout_s, as_json
        )
        return
    if name is not None:
        change_and_say(run, checked(RetireSource, {"name": name}), at, timeout_s, as_json)
        return
    change = checked(SkipSteps, _range(str(steps)))
    if at not in (None, change.first):
        raise ConfigError(
            f"steps {steps} are skipped from step {change.first} on; leave --at {at} out"
        )
    if (taken := ask(run, change, None, timeout_s, as_json=as_json)) is None:
        return
    say(
        output(),
        f"edit {taken.edit.revision}: step {change.first:,} draws what step {change.stop:,} would have drawn; "
        f"{_how_to_go_back(change.first)}",
    )


def _how_to_go_back(step: int) -> str:
    """Return how a run at rest can draw a step again; there is no state of step 0."""
    if not step:
        return (
            "begin it anew in this folder, without a state: omniload.open without state=, or omniload train run FILE "
            "once its checkpoints lie elsewhere"
        )
    return (
        f"go on from a state of step {step:,} or before: omniload train run FILE --resume {step}, or state= of "
        "omniload.open"
    )


def _skip_shard(
    run: Path, change: SkipShard, at: int | None, timeout_s: float, as_json: bool
) -> None:
    if (taken := ask(run, change, at, timeout_s, as_json=as_json)) is None:
        return
    found, step = taken.edit.change, taken.edit.step
    assert isinstance(found, SkipShard), "it became this edit"
    console = output()
    say(
        console,
        f"edit {taken.edit.revision}: from step {step:,} on nothing more is drawn of {found.file}, one of {found.of} "
        f"shards of source {found.source}",
    )
    if step < taken.planned:
        say(
            console,
            f"steps from {step:,} on are planned anew; {_how_to_go_back(step)}",
        )
    say_what_stays(console, taken)


def _range(steps: str) -> dict[str, object]:
    from_text, colon, to_text = steps.partition(":")
    first, stop = decimal_of(from_text), decimal_of(to_text)
    if not colon or first is None or stop is None:
        raise ConfigError(
            f"--steps {steps!r:.40} is no range of steps; say A:B, as 1200:1210 for ten of them"
        )
    if stop <= first:
        raise ConfigError(
            f"--steps {steps} are none: the second number is the first step that is not skipped; say {first}:B with a "
            f"B above {first}"
        )
    return {"first": first, "stop": stop}
