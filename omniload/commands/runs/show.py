"""``omniload mix show``: the progress of a run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.base.state import JsonObject
from omniload.base.units import counted, format_count
from omniload.commands.display import Cell, FittedTable, colour_of, emit_json, output, say, table
from omniload.commands.mix_tables import stages_by_epochs_json
from omniload.commands.options import json_option, run_argument
from omniload.commands.runs.diagnosis import said_of_loaders
from omniload.commands.runs.looks import OLD_S, last_steps, taken_steps
from omniload.mix.edits.edit import Edit, said_of
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.found import never_reached
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import begun_anew
from omniload.mix.journal.groups import GroupProgress, group_progress
from omniload.mix.journal.losses import SourceLoss, latest_losses
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_extent, read_journal
from omniload.mix.journal.times import times_since
from omniload.mix.progress import RunProgress, progress_of
from omniload.mix.run_record import RunLife, read_run_record
from omniload.mix.runtime import BalanceConfig
from omniload.mix.schema.stages import said_epochs
from omniload.plan.fitting import FittedCost, Unfitted, fitted_cost

__all__ = ["show"]


@click.command
@run_argument
@json_option
def show(run: Path, as_json: bool) -> None:
    """Show the progress of a run: steps, shares and their targets, epochs, edits, losses, groups, costs.

    The run may still be going on; the command needs neither its sources nor its processes. Skipped records are counted
    before the next record of a source, from the first step of the journal on. Losses are means per label, or per
    preference pair, in the step that the training loop reported last. The position of the ranks and the rate since the
    latest start are the last that the processes reported; planned steps are ahead of them. If ranks report compute
    times, the command shows the costs that fit these times.

    \b
    Example:
      omniload mix show demo/run
    """  # noqa: D301 -- click's own marker
    life = read_run_record(run).last
    journal = journal_of(run)
    extent = read_extent(journal)
    # A run that continues may have more steps by now, so both reads are limited to the same steps.
    base, records = read_journal(journal, max(extent.first_step, extent.next_step - 1))
    history = read_history(run, life.mix())
    progress = replace(progress_of(history, base, records), first_step=extent.first_step)
    groups = group_progress(run, history.latest.names)
    measured = _measured_cost(run, life, history.base.balance)
    pace = _pace_of(run)
    losses = _losses_of(run, history)
    ahead = _edits_ahead(history, progress)
    if as_json:
        emit_json(
            {
                "mix": str(life.mix_path),
                "sizes": life.sizes,
                "started_at": life.from_step,
                **asdict(progress),
                "edits": history.edits_as_json(len(history.edits)),
                "edits_ahead": ahead,
                "stages_by_epochs": stages_by_epochs_json(history),
                "losses": losses.as_json(),
                "groups": None if groups is None else asdict(groups),
                "cost": None if measured is None else _json_of_cost(measured, history),
                "skipped": dict(extent.skipped),
                **pace.as_json(history.latest.batch.tokens),
            }
        )
        return
    console = output()
    console.print(_sources_of(progress, extent.skipped, losses.sources))
    ranks = ", ".join(f"{axis} {size}" for axis, size in life.sizes.items())
    say(
        console,
        f"mix {life.mix_path}; {ranks}; journal from step {progress.first_step:,}; "
        f"{progress.carried_tokens:,} tokens wait for a row",
    )
    if losses.sources:
        say(console, losses.said)
    _show_pace(console, pace, history.latest.batch.tokens, life.from_step)
    if groups is not None:
        _show_groups(console, groups)
    if measured is not None:
        say(console, _said_of_cost(measured, history))
    _show_edits(console, history, ahead, progress, pace)


def _show_pace(console: Console, pace: "_Pace", step_tokens: int, from_step: int) -> None:
    if pace.taken:
        heard = f"; last heard of {pace.age_s:.0f} s ago"
        say(console, _said_of_taken(pace.taken, from_step) + heard * (pace.age_s > OLD_S))
    if pace.steps_per_s:
        tokens = format_count(round(pace.steps_per_s * step_tokens))
        say(console, f"{pace.steps_per_s:.3g} steps/s, {tokens} tokens/s, since its latest start")
    if pace.loaders:
        say(console, pace.loaders)


def _said_of_taken(taken: Mapping[str, int | None], from_step: int) -> str:
    """Return how far ranks are: plans are ahead of them, and stay plans if the ranks are killed.

    Args:
        taken: The last step that each rank has taken since the latest start.
        from_step: The first step of that start.
    """
    steps = {name: -1 if step is None else step for name, step in taken.items()}
    last, first = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if steps[first] < 0:
        since = f" since the run went on, from step {from_step:,}" if from_step else ""
        return f"no rank has taken a step{since}"
    if steps[last] == steps[first]:
        return f"{'each rank' if len(steps) > 1 else last} has taken step {steps[last]:,}"
    since = f" since the run went on, from step {from_step:,}" if from_step else ""
    behind = f"no step{since}" if steps[last] < 0 else f"step {steps[last]:,}"
    return f"{last} has taken {behind}, {first} step {steps[first]:,}"


def _edits_ahead(history: History, progress: RunProgress) -> list[int]:
    """Return the edits that apply later: after the planned steps, or skips of a run at rest, until it continues."""
    return [
        edit.revision
        for edit in never_reached(history, 0)
        if edit.step >= progress.next_step or edit.revision > progress.revision
    ]


def _show_edits(
    console: Console, history: History, ahead: Sequence[int], progress: RunProgress, pace: "_Pace"
) -> None:
    """Print the edits of a run, with its position for those ``ahead`` of it, and the stages that wait."""
    stands = "ended before" if pace.has_ended else "is planned up to"
    gone = begun_anew(history)
    for edit in history.edits:
        waits = ""
        if edit.revision in gone:
            waits = "; holds no more, as a later edit of an earlier step has that found anew"
        elif edit.revision in ahead and edit.step >= progress.next_step:
            waits = f"; takes effect once the run reaches that step; it {stands} step {progress.next_step:,}"
        elif edit.revision in ahead:
            waits = "; takes effect once the run continues from there, or from an earlier step"
        say(console, _said_of_edit(edit) + waits)
    for stage in history.latest.mix.stages:
        if stage.waits:
            say(console, f"a stage waits until {said_epochs(stage.from_epochs or {})}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Losses:
    """Losses that a loop reported last."""

    step: int = 0
    sources: Mapping[str, SourceLoss] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """Line that says what the losses are means of."""
        of_pairs = {bool(told.pairs) for told in self.sources.values()}
        unit = " or ".join(["label"] * (False in of_pairs) + ["pair"] * (True in of_pairs))
        return f"losses are means of a {unit} of step {self.step:,}, as the loop reported them"

    def as_json(self) -> JsonObject | None:
        if not self.sources:
            return None
        means: JsonObject = {}
        for name, told in self.sources.items():
            pairs: JsonObject = {"pairs": told.pairs} if told.pairs else {}
            means[name] = {"loss": told.mean, "labels": told.labels, **pairs}
        return {"step": self.step, "sources": means}


def _losses_of(run: Path, history: History) -> _Losses:
    if (told := latest_losses(run)) is None:
        return _Losses()
    return _Losses(step=told[0], sources=told[1].by_source(history.pair_sources))


def _said_of_edit(edit: Edit) -> str:
    of = "" if edit.undoes is None else f" of edit {edit.undoes}"
    return f"edit {edit.revision}, from step {edit.step:,} on: {said_of(edit.change)}{of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Progress of a run since its latest start, according to the last reports of its processes."""

    steps_per_s: float = 0.0
    has_ended: bool = False
    """Whether the processes have closed the plane."""
    taken: Mapping[str, int | None] = field(default_factory=dict)
    """The last step that each rank has taken; ``None`` for none."""
    age_s: float = 0.0
    """Age of the report in seconds; 0 for a plane that is closed."""
    loaders: str = ""
    """Last action of the scaler and its reason; empty without a scaler."""

    def as_json(self, step_tokens: int) -> JsonObject:
        return {
            "steps_per_s": self.steps_per_s,
            "has_ended": self.has_ended,
            "taken": dict(self.taken),
            "tokens_per_s": self.steps_per_s * step_tokens,
            "loaders": self.loaders,
        }


def _pace_of(run: Path) -> _Pace:
    try:
        status = read_status(run)
    except StateError:
        # The run was never opened with a folder, or by another release; the journal says the rest.
        return _Pace()
    # A step counts as taken once the last rank has it.
    taken = min(taken_steps(status).values(), default=0.0)
    return _Pace(
        steps_per_s=taken / status.up_s if status.up_s else 0.0,
        has_ended=status.has_ended,
        taken=last_steps(status),
        # The host that wrote the status has a clock of its own, which may be ahead.
        age_s=0.0 if status.has_ended else max(0.0, time.time() - status.written_at),
        loaders=said_of_loaders(status),
    )


def _sources_of(
    progress: RunProgress, skipped: Mapping[str, int], losses: Mapping[str, SourceLoss]
) -> FittedTable:
    unit = f"{progress.level}s"
    rows: list[list[Cell]] = [
        [
            Text(source.name, colour_of(s)),
            format_count(source.drawn),
            f"{source.share:.3%}",
            f"{source.target:.3%}",
            "ended" if source.has_ended else f"{source.drawn - source.due:+,.0f}",
            f"{source.position:,}",
            f"{source.epochs:.2f}",
            format_count(skipped.get(source.name, 0)),
            *([_said_of_loss(losses.get(source.name))] if losses else []),
        ]
        for s, source in enumerate(progress.sources)
    ]
    headings = [f"{unit} drawn", "share", "target", f"{unit} off"]
    if progress.level == "amount":  # each source counts in its own unit
        headings = ["drawn", "of its amount", "of all", "off"]
    headings += ["next record", "epochs", "skipped", *(["loss"] if losses else [])]
    columns = [("source", False), *((heading, True) for heading in headings)]
    return table(f"planned up to step {progress.next_step:,}", columns, rows)


def _said_of_loss(told: SourceLoss | None) -> str:
    return "" if told is None or told.mean is None else f"{told.mean:.3f}"


def _show_groups(console: Console, groups: GroupProgress) -> None:
    rows: list[list[Cell]] = [
        [
            Text(each.name, colour_of(number)),
            format_count(each.drawn),
            *(
                f"{count / max(each.drawn, 1):.1%}"
                for count in (each.differing, each.all_right, each.all_wrong)
            ),
            f"{each.right / each.answers:.1%}" if each.answers else "",
        ]
        for number, each in enumerate(groups.sources.values())
    ]
    headings = ("groups drawn", "differ", "all right", "all wrong", "answers right")
    columns = [("source", False), *((heading, True) for heading in headings)]
    console.print(table(f"groups of answers up to batch {groups.next_batch:,}", columns, rows))
    differ = sum(each.differing for each in groups.sources.values())
    first = groups.next_batch - groups.batches
    # Groups that already waited when the folder was begun from a state were drawn in another folder.
    left = (
        f"decisions from batch {first:,} on, for which groups of before may have waited"
        if first
        else f"{differ - groups.groups:,} groups that differ wait or were left over"
    )
    say(
        console,
        f"{counted(groups.batches, 'batch', 'batches')}, {counted(groups.groups, 'group')} in all, drawn in "
        f"{counted(groups.rounds, 'round')}; {left}",
    )


def _measured_cost(
    run: Path, life: RunLife, balance: BalanceConfig
) -> FittedCost | Unfitted | None:
    """Return the cost fitted to the times that ranks have reported since the latest start; ``None`` if not asked for.

    Args:
        run: Folder of the run.
        life: The latest start.
        balance: Present settings; if they ask for fitted costs, missing times are reported.
    """
    if balance.cost != "quadratic":
        return None
    times = times_since(run, life.from_step, life.began_s)
    return fitted_cost(times) if len(times) or balance.fit_every else None


def _said_of_cost(measured: FittedCost | Unfitted, history: History) -> str:
    if isinstance(measured, Unfitted):
        return f"no cost is fitted: {measured.why}"
    cost, declared, held = measured.cost, history.base.balance, history.latest.balance
    now = (
        ""
        if held == declared
        else f", by the edit that holds {measured.pair_share_by(held.linear, held.quadratic):.0%}"
    )
    return (
        f"{measured.measured:,} compute times come to linear {cost.linear:g}, quadratic {cost.quadratic:g} s, and are "
        f"{measured.residual:.1%} off in the median; token pairs are {measured.pair_share:.0%} of the work, by the mix "
        f"file {measured.pair_share_by(declared.linear, declared.quadratic):.0%}{now}"
    )


def _json_of_cost(measured: FittedCost | Unfitted, history: History) -> JsonObject:
    if isinstance(measured, Unfitted):
        return {"unfitted": measured.why}
    declared, held = history.base.balance, history.latest.balance
    return {
        "linear": measured.cost.linear,
        "quadratic": measured.cost.quadratic,
        "measured": measured.measured,
        "used": measured.used,
        "residual": measured.residual,
        "pair_share": measured.pair_share,
        "pair_share_declared": measured.pair_share_by(declared.linear, declared.quadratic),
        "pair_share_held": measured.pair_share_by(held.linear, held.quadratic),
    }
