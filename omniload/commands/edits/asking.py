"""Asking for a change of a mix: of the plane that is up, or where none is, of the run's own files."""

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from omniload.actors.claim import LOCK_NAME
from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.status_file import STATUS_NAME, read_status
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
    system_refusals,
)
from omniload.base.linux.file_lock import FileLock, locked
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from omniload.mix.config import MixConfig
from omniload.mix.edits.amounts import require_drawable
from omniload.mix.edits.answers import (
    ANSWER_NAME,
    REQUEST_NAME,
    EditAnswer,
    EditRequest,
    EditTaken,
    fault_in,
    id_in,
)
from omniload.mix.edits.edit import (
    AddSource,
    Change,
    SkipShard,
    SkipSteps,
    require_no_secrets,
    said_of_going_back,
)
from omniload.mix.edits.edits_file import EDITS_NAME, read_history, write_history
from omniload.mix.edits.found import found_in, require_open
from omniload.mix.edits.history import History
from omniload.mix.edits.next_edit import undone_by
from omniload.mix.edits.shards import ShardsFound, shard_meant, shards_like
from omniload.mix.edits.stages import gone_through_in
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_journal, read_tail
from omniload.mix.progress import fingerprint_in, fold, records_in
from omniload.mix.run_record import RUN_RECORD_NAME, RunLife, no_run_in, read_run_record
from omniload.mix.state import MixState
from omniload.source.formats.opening import shards_of
from omniload.source.index import index_folder

__all__ = ["change_mix", "planned_to"]

_ASKING_NAME = ".edit.lock"
_LOOK_S = 0.05
_UP_S = 5.0
"""A status is written every second: one that is younger is of a plane that is up."""
_MOST_BYTES = 64 << 20
_ERRORS = {e.__name__: e for e in (ConfigError, StateError, UnavailableError, IntegrityError)}


@system_refusals("the run's folder")
def change_mix(run: Path, change: Change, at: int | None, timeout_s: float) -> EditTaken:
    """Have the mix of a run changed.

    Args:
        run: Folder of the run.
        change: What is wanted.
        at: First step that it is to hold at; ``None`` for the first that is not planned.
        timeout_s: Longest wait for the plane's answer.

    Raises:
        OmniloadError: It is refused, and nothing has changed.
        StateError: There is no run.
        UnavailableError: The plane did not answer in time, is up on a host that this one hears nothing of, or somebody
            else is changing the mix.
    """
    require_no_secrets(change)  # before it is asked: the question is a file too
    if isinstance(change, AddSource):
        _require_utf8(change)
    if not (run / LOCK_NAME).exists():
        raise no_run_in(run, LOCK_NAME)
    try:
        # One asks at a time: a plane has one file for questions, and one for answers.
        with locked(run / _ASKING_NAME, waits=False):
            try:
                # A plane that is up has it; where it can be had there is none, and none opens while it is held here.
                held = FileLock(run / LOCK_NAME)
            except BlockingIOError as error:
                _require_no_skip(run, change, str(error.strerror))
                return _asked(run, change, at, timeout_s, str(error.strerror))
            try:
                return _noted(run, change, at)
            finally:
                held.close()
    except BlockingIOError:
        raise UnavailableError(
            f"another command changes the mix of {run} at this moment; ask again when it has ended"
        ) from None


def _require_utf8(change: AddSource) -> None:
    """Refuse a source that JSON cannot hold: asked for and kept it is that, whatever paths a mix file may name.

    Raises:
        ConfigError: Naming its path.
    """
    try:
        change.model_dump_json()
    except PydanticSerializationError as error:
        raise ConfigError(
            f"source {change.name!r}: {change.source.paths[0]!r:.200} is not UTF-8, and a change of a mix is kept as "
            "JSON; rename the file or its folder, or name a link to it where all names are UTF-8"
        ) from error


def _require_no_skip(run: Path, change: Change, holder: str) -> None:
    if isinstance(change, SkipSteps):
        raise StateError(
            f"the data plane of {run} is open in {holder}: steps are skipped by going back before them; end the run, "
            f"skip them, and {said_of_going_back(change.first)}"
        )


def _asked(run: Path, change: Change, at: int | None, timeout_s: float, holder: str) -> EditTaken:
    """Ask the plane that is up."""
    request = EditRequest(id=uuid.uuid4().hex, change=change, at=at)
    place = run / REQUEST_NAME
    until_s = time.monotonic() + timeout_s
    # The plane's user must read what root asks.
    write_whole(place, request.model_dump_json().encode(), mode=0o600 if os.geteuid() else 0o644)
    try:
        # An answer to somebody's earlier question may lie there yet: their ids tell them apart.
        while (answer := _answer_in(run / ANSWER_NAME, request.id)) is None:
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"the data plane of {run}, open in {holder}, did not answer within {timeout_s:g} s; whether the "
                    f"change is taken up, {run / EDITS_NAME} says"
                )
            # By files: what the command and the plane share for certain is the folder of the run.
            time.sleep(_LOOK_S)
    finally:
        # Answered or not: a plane that comes up later must not take up what nobody waits for any more.
        with suppress(OSError):
            place.unlink()
    if answer.taken is None:
        # By name: the plane may be of another release, with errors that this one does not have.
        raise _ERRORS.get(answer.kind, OmniloadError)(str(answer.refused))
    return answer.taken


def _answer_in(place: Path, asked: str) -> EditAnswer | None:
    """Return the answer to a question, by its id; ``None`` where none is there yet.

    Raises:
        StateError: It is there, in words that this release does not know.
    """
    try:
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="an answer")
    except FileNotFoundError:
        return None
    try:
        answer = EditAnswer.model_validate_json(content)
    except ValidationError as error:
        if id_in(content) != asked:
            return None  # to somebody else, of another release; ours comes over it
        raise StateError(
            f"{place}: the data plane has answered, in words of another release than this one ({fault_in(error)}): "
            f"whether the change is taken up, {EDITS_NAME} beside it says; ask with the release that the run is of"
        ) from error
    return answer if answer.id == asked else None


def _noted(run: Path, change: Change, at: int | None) -> EditTaken:
    """Note a change in the folder of a run that is not up; it holds once the run goes on."""
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
        # As steps are skipped: the run goes on from a checkpoint of this step or before.
        change = _shard_in(change, history.latest, life.base_dir, index_folder(life.mix_path))
    else:
        # First: where a skip cannot be undone any more, no later step will do.
        undone_by(history, change, step, at_rest=step >= planned)
        # What was trained once stays as it was: attempts of a run see the same samples.
        require_open(step, planned=planned, end=None, ended=False)
    # Edited without facts first: that mix has the new source, under the number that it is opened by.
    facts = _facts_of(life, history.tried(change, step)) if isinstance(change, AddSource) else None

    def was_gone_through(name: str, epochs: float) -> bool:
        # Looked up when a stage waits for a source that is drawn no more, which is seldom: a journal may be long.
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
    """Refuse amounts that the run has passed; how far it is, its journal says."""
    state, records_S = _stand_of(run, before, planned)
    # The journal's fingerprint does not have the source yet that this edit brings.
    if facts is not None:
        records_S.append(facts.positions_per_epoch)
    _, entered = before.entered(state)
    require_drawable(before, after, entered, records_S)


def _stand_of(run: Path, history: History, step: int) -> tuple[MixState, list[int]]:
    """Return the state before a step, as the journal of a run gives it, and the raw records of each source.

    Raises:
        StateError: The journal does not reach back to it, or is damaged.
    """
    base, records = read_journal(journal_of(run))
    fingerprint = fingerprint_in(base)
    found = history.fingerprint_at(len(history.edits), fingerprint)
    state = fold(history, base, records, fingerprint, step)
    return state, records_in(found, history.latest.names)


def planned_to(run: Path, history: History) -> int:
    """Return the first step that is not planned, or will be planned again."""
    tail = read_tail(journal_of(run), 0)
    last = tail.records[-1]["revision"] if tail.records else tail.base.get("mix_revision")
    # The journal has steps that a skip since has left out, until the run goes on and plans them anew.
    return int(min(tail.next_step, history.replanned_from(last if isinstance(last, int) else 0)))


def _skipping(run: Path, history: History, change: SkipSteps, planned: int) -> History:
    """Return the history in which steps that were trained on are left out.

    Raises:
        ConfigError: They are not trained on, or lie before others that are skipped.
        StateError: The journal does not hold them.
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
    base, records = read_journal(journal_of(run))
    begun = base.get("step")
    if isinstance(begun, int) and change.first < begun:
        raise StateError(
            f"the journal of {run} begins at step {begun}, step {change.first} is before it; skip later steps"
        )
    # The first of them draws what the step behind the last would have drawn.
    behind = fold(history, base, records, fingerprint_in(base), change.stop)
    return history.edited(change, change.first, behind=behind, at_rest=True)


def _require_at_rest(run: Path) -> None:
    """Refuse a run whose plane is up on another host: not every network file system passes locks on.

    Raises:
        UnavailableError: Naming that host.
    """
    try:
        status = read_status(run)
    except StateError:
        return  # none was written, or by another release: the lock alone decides
    age_s = time.time() - status.written_at
    if status.host != socket.gethostname() and age_s < _UP_S:
        raise UnavailableError(
            f"{run / STATUS_NAME} was written {age_s:.1f} s ago by process {status.pid} on {status.host}, and its lock "
            f"is not seen here: the run may be up there; ask on {status.host}, or again once it has ended for "
            f"{_UP_S:g} s"
        )


def _facts_of(life: RunLife, history: History) -> SourceFacts:
    """Open the source that the last edit adds."""
    mix = history.latest
    number = len(mix.names) - 1
    shell = LoaderShell(
        mix,
        [number],
        base_dir=life.base_dir,
        cache_dir=index_folder(life.mix_path),
        activity=Activity("loader-0"),
    )
    try:
        return shell.facts()[number]
    finally:
        shell.close()


def _shard_in(change: SkipShard, mix: MixConfig, base_dir: Path, cache_dir: Path) -> SkipShard:
    """Return the change with the shard that it means; of all sources files are listed, of those that have it opened.

    Raises:
        ConfigError: There is no such shard or source, or there are several shards.
        OmniloadError: A source cannot be listed, or opened.
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
        having = names  # its shards may be groups of files, which no listing names
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
