"""Changes of the mix of a run without a plane: in the run's own files, with the same result as by its planner."""

import socket
import time
from pathlib import Path

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.status_file import STATUS_NAME, read_status
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.commands.edits.pulse import UP_S, Pulse
from omniload.mix.config import MixConfig
from omniload.mix.edits.amounts import require_drawable
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import AddSource, Change, SkipShard, SkipSteps
from omniload.mix.edits.edits_file import read_history, write_history
from omniload.mix.edits.found import found_in, require_open
from omniload.mix.edits.history import History
from omniload.mix.edits.next_edit import undone_by
from omniload.mix.edits.shards import ShardsFound, shard_meant, shards_like
from omniload.mix.edits.stages import gone_through_in
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_extent, read_journal, read_tail
from omniload.mix.progress import fingerprint_in, fold, records_in
from omniload.mix.run_record import RUN_RECORD_NAME, RunLife, read_run_record
from omniload.mix.state import MixState
from omniload.source.access.index_folders import index_folder
from omniload.source.formats.opening import shards_of

__all__ = ["change_at_rest", "planned_to"]

_LOOK_S = 0.25
"""Seconds between looks at the status of a plane that may be up on another host."""


def change_at_rest(run: Path, change: Change, at: int | None) -> EditTaken:
    """Note a change in the folder of a run; it takes effect when the run continues.

    Args:
        run: Folder of the run, whose lock the caller holds.
        change: The change.
        at: First step that the change is to apply to; ``None`` for the first step that is not planned.

    Raises:
        OmniloadError: The change is refused, and nothing has changed.
        StateError: The folder does not say what the run's mix is.
        UnavailableError: A plane of the run is up on a host whose locks are invisible here.
    """
    if not (run / RUN_RECORD_NAME).exists():
        raise StateError(
            f"no data plane of {run} is up, and the folder does not say what its mix is (it has no {RUN_RECORD_NAME}); "
            "start the job, and ask again"
        )
    _require_at_rest(run)
    life = read_run_record(run).last
    history = read_history(run, life.mix())
    planned = planned_to(run, history)
    if isinstance(change, SkipSteps):
        after = _skipping(run, history, change, planned)
        write_history(run, after)
        return EditTaken.of(history, after, planned, planned, at_rest=True)
    step = planned if at is None else at
    if isinstance(change, SkipShard):
        # As with skipped steps, the run continues from a checkpoint of this step or an earlier one.
        change = _shard_in(change, history.latest, life.base_dir, index_folder(life.mix_path))
    else:
        # This comes first: if a skip cannot be undone any more, no later step helps.
        undone_by(history, change, step, at_rest=step >= planned)
        # Steps that were trained on stay as they were, because all attempts of a run see the same samples.
        require_open(step, planned=planned, end=None, ended=False)
    # The edit is tried without facts first, because the resulting mix has the new source and the number to open it by.
    facts = _facts_of(life, history.tried(change, step)) if isinstance(change, AddSource) else None

    def was_gone_through(name: str, epochs: float) -> bool:
        # Looked up only if a stage waits for a source that is no longer drawn. This is rare, and a journal may be long.
        state, records_S = _stand_of(run, history, min(step, planned))
        return gone_through_in(history, state, records_S)(name, epochs)

    found = found_in(change, facts)
    after = history.edited(change, step, found, at_rest=True, gone_through=was_gone_through)
    if after.edits[-1].amounts is not None:
        _require_drawable(run, history, after, planned, facts)
    write_history(run, after)
    return EditTaken.of(history, after, planned, planned, at_rest=True)


def _require_drawable(
    run: Path, before: History, after: History, planned: int, facts: SourceFacts | None
) -> None:
    """Refuse amounts that the run has already exceeded, according to its journal."""
    state, records_S = _stand_of(run, before, planned)
    # The journal's fingerprint does not yet have the source that this edit adds.
    if facts is not None:
        records_S.append(facts.positions_per_epoch)
    _, entered = before.entered(state)
    require_drawable(before, after, entered, records_S)


def _stand_of(run: Path, history: History, step: int) -> tuple[MixState, list[int]]:
    """Return the state before a step, from the journal of a run, and the raw records of each source.

    Raises:
        StateError: The journal does not reach back to the step, or is damaged.
    """
    base, records = read_journal(journal_of(run), step)
    fingerprint = fingerprint_in(base)
    found = history.fingerprint_at(len(history.edits), fingerprint)
    state = fold(history, base, records, fingerprint, step)
    return state, records_in(found, history.latest.names)


def planned_to(run: Path, history: History) -> int:
    """Return the first step that is not planned, or will be planned again."""
    tail = read_tail(journal_of(run), 0)
    last = tail.records[-1]["revision"] if tail.records else tail.base.get("mix_revision")
    # The journal keeps steps that a later skip has left out, until the run continues and plans them anew.
    return int(min(tail.next_step, history.replanned_from(last if isinstance(last, int) else 0)))


def _skipping(run: Path, history: History, change: SkipSteps, planned: int) -> History:
    """Return the history in which steps that were trained on are left out.

    Raises:
        ConfigError: The steps are not trained on, or come before other skipped steps.
        StateError: The journal does not contain them.
    """
    if change.stop > planned:
        raise ConfigError(
            f"steps {change.first}:{change.stop} are not all trained on: the run has planned every step before "
            f"{planned}; "
            + (
                f"say {change.first}:{planned} or less"
                if change.first < planned
                else f"skip steps below {planned}"
            )
        )
    journal = journal_of(run)
    begun = read_extent(journal).first_step
    if change.first < begun:
        raise StateError(
            f"the journal of {run} begins at step {begun}, step {change.first} is before it; skip later steps"
        )
    base, records = read_journal(journal, change.stop)
    # The first of the steps draws what the step after the last would have drawn.
    behind = fold(history, base, records, fingerprint_in(base), change.stop)
    return history.edited(change, change.first, behind=behind, at_rest=True)


def _require_at_rest(run: Path) -> None:
    """Refuse a run whose plane is up on another host, because not every network file system passes locks on.

    The clock of that host may differ. So a plane counts as up if its status is young, or changes while it is observed.

    Raises:
        UnavailableError: A plane is up; the message names its host.
    """
    try:
        status = read_status(run)
    except StateError:
        return  # no status was written, or by another release, so the lock alone decides
    if status.host == socket.gethostname():
        return
    pulse, until_s = Pulse(run), time.monotonic() + UP_S
    while not (pulse.was_up or status.has_ended) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        pulse.silent_s()
    if pulse.was_up:
        raise UnavailableError(
            f"{run / STATUS_NAME} was written less than {UP_S:g} s ago by process {status.pid} on {status.host}, and "
            f"its lock is not seen here: the run may be up there; ask on {status.host}, or again once it has ended for "
            f"{UP_S:g} s"
        )


def _facts_of(life: RunLife, history: History) -> SourceFacts:
    """Open the source that the last edit adds."""
    mix = history.latest
    number = len(mix.names) - 1
    shell = LoaderShell(
        mix,
        [],
        base_dir=life.base_dir,
        cache_dir=index_folder(life.mix_path),
        activity=Activity("loader-0"),
    )
    try:
        return shell.open_also(number, mix)
    finally:
        shell.close()


def _shard_in(
    change: SkipShard, mix: MixConfig, base_dir: Path, cache_dir: Path | None
) -> SkipShard:
    """Return the change with the shard that it means; lists the files of all sources, and opens those with the shard.

    Raises:
        ConfigError: There is no such shard or source, or there are several shards.
        OmniloadError: A source cannot be listed or opened.
    """
    names = [name for name in mix.names if change.source in (None, name)]
    with LimitedCalls("omniload-listing") as calls:
        listed = {
            name: [
                file.path
                for file in shards_of(name, mix.sources[name], base_dir=base_dir, calls=calls)
            ]
            for name in names
        }
    having = [name for name in names if shards_like(change, {name: listed[name]}).matches]
    if change.source is not None:
        having = names  # the source's shards may be groups of files, which no listing names
    if not having:
        return shard_meant(change, mix.names, [shards_like(change, listed)])
    shell = LoaderShell(
        mix,
        [mix.names.index(name) for name in having],
        base_dir=base_dir,
        cache_dir=cache_dir,
        activity=Activity("loader-0"),
    )
    try:
        found: ShardsFound = shell.look_for_shard(change)
    finally:
        shell.close()
    return shard_meant(change, mix.names, [found])
