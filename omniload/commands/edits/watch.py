"""``omniload mix watch``: makes a run follow its mix file at each save, by the same edits that a user makes."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import click

from omniload.base.config import line_of, parse_yaml
from omniload.base.errors import ConfigError, OmniloadError, UnavailableError
from omniload.commands.display import emit_json, output, say
from omniload.commands.edits.arguments import real_path, with_absolute_paths, with_real_paths
from omniload.commands.edits.asking import change_mix
from omniload.commands.edits.at_rest import planned_to
from omniload.commands.edits.pulse import while_up
from omniload.commands.edits.untaken import untaken_from
from omniload.commands.options import json_option, run_argument
from omniload.mix.config import MixConfig, SourceConfig, load_mix
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import said_of
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.wanted import Asked, Refused, later_keys, wanted_of
from omniload.mix.run_record import read_run_record
from omniload.mix.schema.tokenizers import ByteTokenizer

__all__ = ["STILL_S", "Mark", "Saves", "Watching", "mark_of", "watch"]

_LOOK_S = 0.1
_AGAIN_S = 1.0
"""Seconds until a plane that did not answer is asked again."""
_ANSWER_S = 60.0
STILL_S = 0.3
"""Seconds for which a saved file must stay unchanged."""
Mark: TypeAlias = tuple[int, int, int]
"""Distinguishes one state of a file from another: its identity, its size, and when it was written."""


def mark_of(path: Path) -> Mark | None:
    """Return the mark of a file; ``None`` if it is missing or empty."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


@dataclass(slots=True)
class Saves:
    """Detects saves of a file by looking at its mark repeatedly. The state at the first look counts as a save.

    Editors empty a file and write it again, or write another file and rename it. In between, the file is short or
    missing. So a save counts once the file exists and has been the same for a while.
    """

    _taken: Mark | None = None
    """Mark of the last reported save."""
    _seen: Mark | None = None
    _since_s: float = 0.0

    def look(self, mark: Mark | None, now_s: float) -> bool:
        """Return whether the file was saved since the last reported save, and is complete.

        Args:
            mark: Present mark of the file.
            now_s: Time of a monotonic clock, in seconds.
        """
        if mark != self._seen:
            self._seen, self._since_s = mark, now_s
        if mark is None or mark == self._taken or now_s - self._since_s < STILL_S:
            return False
        self._taken = mark
        return True

    def forget(self) -> None:
        """Report the last save again."""
        self._taken = None


@dataclass(frozen=True, slots=True)
class _Found:
    """Changes that a file asks of a run, and its parts that have no effect."""

    changes: list[Asked]
    later: list[str]
    """Keys that take effect at the next start."""
    over: list[str]
    """Stages that are over, with their lines."""
    scheduled: list[str]
    """Edits of coming steps that the file does not have, with its lines."""


@dataclass(slots=True)
class Watching:
    """Makes one run follow one file."""

    run: Path
    file: Path
    _before: MixConfig | None = field(default=None, init=False)
    """Content of the file when it was last read."""

    def asked(self) -> "_Found":
        """Return the changes that the file asks for now.

        Raises:
            ConfigError: The file has faults, or asks for something that no change can do; names every fault with its
                line.
            OmniloadError: The run's folder does not say what the present mix is.
        """
        wanted, folder = load_mix(self.file)
        life = read_run_record(self.run).last
        # Read from the run's own copy, because the file of that name may have been edited since.
        declared = parse_yaml(life.text, MixConfig, name=str(life.mix_path))
        history = read_history(self.run, life.mix())
        # Not from the first unplanned step: a change takes plans back, and stages may begin in between.
        step = untaken_from(self.run, planned_to(self.run, history))
        placing = _placing(folder), _placing(life.base_dir)
        held = _with_tokenizer_as_spelt(declared, life.base_dir, wanted, folder)
        found = wanted_of(wanted, held, history, step, placing, with_real_paths)
        if found.refused:
            raise ConfigError("\n".join(map(self._told, found.refused)))
        # Compared with the file as last read. At the first read there is none, and a refused file does not count.
        later = [] if self._before is None else later_keys(wanted, self._before)
        self._before = wanted
        told = (list(map(self._told, faults)) for faults in (found.over, found.scheduled))
        return _Found(list(found.changes), later, *told)

    def _told(self, fault: Refused) -> str:
        line = line_of(self.file, *fault.at) or 1
        return f"{self.file}:{line}: {'.'.join(map(str, fault.at))} {fault.said}"

    def taken(self, asked: list[Asked]) -> Iterator[EditTaken]:
        """Request changes one after another; yield the result of each.

        Raises:
            OmniloadError: A change is refused. Those after it are not requested; those before it remain.
        """
        for done, (change, at) in enumerate(asked):
            try:
                yield change_mix(self.run, change, at, _ANSWER_S)
            except OmniloadError as error:
                left = "; ".join(said_of(change) for change, _ in asked[done:])
                error.add_note(
                    f"{done} of {len(asked)} changes hold; not asked for, or refused: {left}"
                )
                raise


def _placing(folder: Path) -> Callable[[SourceConfig], SourceConfig]:
    return lambda source: with_absolute_paths(source, folder.resolve())


def _with_tokenizer_as_spelt(
    declared: MixConfig, declared_dir: Path, wanted: MixConfig, wanted_dir: Path
) -> MixConfig:
    """Return the mix of the run's file, with its tokenizer's path as spelt in the other file."""
    held, asked = declared.tokenizer, wanted.tokenizer
    if isinstance(held, ByteTokenizer | None) or isinstance(asked, ByteTokenizer | None):
        return declared
    then, now = (
        real_path(str(folder.resolve() / tokenizer.path))
        for folder, tokenizer in ((declared_dir, held), (wanted_dir, asked))
    )
    if then != now:
        return declared
    return declared.model_copy(update={"tokenizer": held.model_copy(update={"path": asked.path})})


@click.command("watch")
@run_argument
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Apply FILE once, now, and exit.")
@json_option
def watch(run: Path, file: Path, once: bool, as_json: bool) -> None:
    """Apply FILE to the mix of RUN, now and each time FILE is saved.

    FILE is a copy of the mix file, because a resume needs the mix file unchanged. You may change weights and amounts,
    and add or remove sources. Each change becomes an edit, as if it had been typed. A file with a fault changes
    nothing, and the run continues with its current mix. The command ends with the run. Ctrl-C ends only the command,
    not the run.

    \b
    Example:
      omniload mix watch demo/run live.yaml
      omniload mix watch demo/run live.yaml --once
    """  # noqa: D301 -- click's own marker
    watching = Watching(run, file)
    # Reports immediately if the folder has no run.
    _require_a_copy(file, read_run_record(run).last.mix_path)
    if once:
        _apply(watching, None, as_json=as_json)
        return
    while_up(
        run,
        _Follower(watching, as_json=as_json).look,
        every_s=_LOOK_S,
        goes_on="watching",
        instead="watch then, or have the file applied to a run that is to go on later, with --once",
        after=f"{file} is watched no more, and what holds stays",
    )


def _require_a_copy(file: Path, mix_path: Path) -> None:
    """Refuse the file that the run was started with: resumed with another text, its edits would belong to another mix.

    Raises:
        ConfigError: It is that file.
    """
    if Path(os.path.realpath(file)) == mix_path:  # realpath does not refuse links in a circle
        raise ConfigError(
            f"{file} is the mix file that the run was started with, and a resume needs it as it was; copy it, as "
            f"{file.with_stem('live')}, and edit and watch the copy"
        )


class _Follower:
    """Applies each save of a watched file once; a save that a busy plane did not accept is applied later."""

    def __init__(self, watching: Watching, *, as_json: bool) -> None:
        self._watching, self._as_json = watching, as_json
        self._saves, self._said, self._ask_from_s = Saves(), "", 0.0

    def look(self) -> None:
        """Apply a save, if there is one; a fault of the file is reported and ends nothing."""
        mark, now_s = mark_of(self._watching.file), time.monotonic()
        # The order matters: a save is reported once, and would be lost while the plane must not be asked.
        if now_s < self._ask_from_s or not self._saves.look(mark, now_s):
            return
        try:
            _apply(self._watching, mark, as_json=self._as_json)
            self._said = ""
        except UnavailableError as error:  # a plane that is busy, or being started again
            self._saves.forget()
            self._ask_from_s = now_s + _AGAIN_S
            self._say(f"not applied yet: {error}")
        except OmniloadError as error:
            self._say(_fault_of(error))

    def _say(self, text: str) -> None:
        """Print a text once, however often it applies."""
        if text != self._said:
            click.echo(text, err=True)
        self._said = text


def _fault_of(error: OmniloadError) -> str:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"not applied, the run goes on with what it has:\n{error}{notes}"


def _apply(watching: Watching, mark: Mark | None, *, as_json: bool) -> None:
    """Make the run follow its file; if the file has another mark by now, wait for its next save."""
    try:
        found = watching.asked()
    except ConfigError:
        if mark in (None, mark_of(watching.file)):
            raise
        return  # the fault may come from reading half a file
    # The file was saved again while it was read, and the next look handles that save.
    if mark not in (None, mark_of(watching.file)):
        return
    asked = [said_of(change) for change, _ in found.changes]
    if not as_json:
        say(output(), f"{watching.file}: {'; '.join(asked) or 'the run is as it says'}")
        if found.later:
            say(output(), f"from the next start of the run on: {', '.join(found.later)}")
        for each in (*found.over, *found.scheduled):
            say(output(), f"warning: {each}", "yellow")
    edits = []
    for taken in watching.taken(found.changes):
        edits.append(taken.model_dump(mode="json"))
        if not as_json:
            say(output(), taken.said)
    if as_json:
        told = {"later": found.later, "over": found.over, "scheduled": found.scheduled}
        emit_json({"asked": asked, "edits": edits, **told})
