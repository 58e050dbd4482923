"""The file of a journal: one planner appends to it, and the next planner continues it.

The journal is a differential checkpoint: a base state, followed by what each step changed. Applying the records to the
base gives the state before any step. Therefore a run resumes from the last record, and "what was in step 1234?" is
answered by planning that step again.

The file is JSON lines, and the first line is the base. Each line ends in a checksum of the previous checksum and its
own text, so a missing, moved or repeated line is detected::

    {"version": 3, "base": {...}, "after": "..."}<TAB>xxh64
    {"step": 0, "revision": 0, "digest": "...", "after": "...", "drawn": {"web": [...]}, "carried": [...]}<TAB>xxh64
    ...
    {"kind": "base", "step": 1024, "state": {...}, "after": "..."}<TAB>xxh64
    {"step": 1024, ...}<TAB>xxh64
    {"kind": "world", "step": 1020, "generation": 1, "sizes": {"pp": 1, "dp": 3, "cp": 1, "tp": 1}}<TAB>xxh64

``drawn`` holds, for each source drawn from, the cursor afterwards (position, sub, token) and the amount drawn.
``after`` is ``MixState.digest`` of the state after the line. A missing *last* line is detected only by comparison: the
state that a run resumes from has the number of steps. A new base is written now and then, so that readers of the last
steps can start there. A world lists the ranks that steps from its step on were placed on. The ranks that the plane was
opened for have no world, unless there was another world before.

If only the last steps are kept, old records are dropped at a base: on a store a mark says where the journal begins, and
a file is written anew, with that base as its first line.

A torn last line, as a kill leaves it, is cut off. Any other line that does not match is an ``IntegrityError``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import orjson

from omniload.base.errors import IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.mix.journal.lines import (
    BASE,
    WORLD,
    JournalLine,
    base_of,
    first_line,
    last_base,
    line_of,
    restarted,
    since_of,
    sound_lines,
)
from omniload.mix.journal.reading import Head, Tail, head_before
from omniload.mix.journal.room import Room
from omniload.mix.journal.storage import FileStorage, JournalStorage, Since

__all__ = ["Journal"]

_LOG = get_logger(__name__)
_MOST_BEGINS = 1024
"""Number of steps that can be taken back: more than are planned ahead."""


class Journal:
    """An open journal that one planner appends to."""

    def __init__(self, storage: JournalStorage, head: Head, keep_steps: int = 0) -> None:
        """Continue a journal whose first lines are those of ``head``; ``storage`` contains no other lines."""
        self._storage = storage
        # What need not survive the machine is kept from the last base but one, because a planner that takes over may
        # plan steps before the last.
        self._keep_steps = keep_steps if storage.keeps_all else 1
        self._spare_at: int | None = None
        """Step of a base that was appended, after which old records may be dropped."""
        self.has_worlds = head.has_worlds or bool(head.moved)
        """Whether it contains worlds; if it does, every later change of ranks is noted as well."""
        self._end, self._last = head.size_bytes, head.checksum
        # Everything up to here is written. Staged lines come after it, and on failure the end returns to it.
        self._sure = self._end, self._last
        self._staged: list[bytes] = []
        self._together = False
        self._known: dict[int, bytes] = {}
        self._base_step = -1
        self._begins: dict[int, tuple[int, bytes]] = {}
        """For the latest appended steps: the place where the record of each begins, and the checksum before it."""

    @classmethod
    def leading_up(
        cls,
        place: Path | JournalStorage,
        state: JsonObject,
        digest: str,
        *,
        durable: bool = True,
        keep_steps: int = 0,
    ) -> Self:
        """Open a journal for a run that continues from ``state``.

        Records of earlier steps of the same mix stay. Records of ``state["step"]`` and later belong to lost work and
        are cut off. A journal is moved aside if it does not lead up to ``state``, or if it has steps while ``state``
        is that of step 0. Memory does not grow with the journal.

        Args:
            place: The file, or the claimed folder of a store.
            state: State before the next step.
            digest: ``MixState.digest`` of ``state``.
            durable: Whether what is appended to a file survives a power cut. Otherwise it survives only the end of
                the process that wrote it, and records that no planner needs any more are dropped.
            keep_steps: Number of last steps whose records are kept at least, as ``runtime.journal_steps``; 0 for all.

        Raises:
            StateError: The journal leads up to this step of this mix, but to another state.
            StateError: The disk or a quota is full.
            UnavailableError: The journal cannot be written.
        """
        storage = _storage(place, durable=durable)
        head = _leading_up(storage, state, digest)
        if head is None:
            first = first_line(state, digest)
            storage.begin(bytes(first))
            head = Head(len(bytes(first)), first.checksum, digest)
        else:
            storage.go_on(head.size_bytes)
        journal = cls(storage, head, keep_steps)
        # These ranks trained on steps that stay, but were noted after the cut, as they may be reported late.
        for world in head.moved:
            journal._append(line_of(world, journal._last))
        return journal

    @classmethod
    def taken_over(
        cls,
        place: Path | JournalStorage,
        tail: Tail,
        step: int,
        *,
        durable: bool = True,
        keep_steps: int = 0,
        room: Room | None = None,
    ) -> Self:
        """Open the journal of a lost planner, for a planner that plans again from ``step`` on.

        Existing records stay. Steps that are planned again must agree with their records.

        Args:
            place: As in ``leading_up``; claimed before ``tail`` was read.
            tail: The end of the journal.
            step: First step that is planned again.
            durable: As in ``leading_up``.
            keep_steps: As in ``leading_up``.
            room: Waits if there is no room for what is written here; ``None`` for no waiting.

        Raises:
            StateError: The disk or a quota is full.
            UnavailableError: The journal cannot be written.
        """
        storage = _storage(place, durable=durable)
        storage.room = room
        size = tail.since.offset + sum(len(bytes(line)) for line in tail.lines)
        storage.go_on(size, tail.bytes_from(step))
        journal = cls(storage, Head(size, tail.lines[-1].checksum, ""), keep_steps)
        journal._known = dict(tail.texts_from(step))
        # Bases before that step are there already, or later lines have taken their place.
        journal._base_step = tail.next_step
        return journal

    def wait_in(self, room: Room) -> None:
        """Wait in ``room`` if there is no room."""
        self._storage.room = room

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write everything that is appended inside together at the end, so a window of steps costs one sync or one put.

        Raises:
            StateError: As for ``append``; then none of it is written.
            UnavailableError: As for ``append``.
        """
        self._together = True
        try:
            yield
        except BaseException:
            # Otherwise the next record would bring along the beginning of a window that was never reported.
            if self._staged:
                self._staged.clear()
                self._end, self._last = self._sure
            raise
        finally:
            self._together = False
        self._write()

    def append(self, record: JsonObject) -> None:
        """Write the record of a step and wait until it is on the disk; an existing record is compared instead.

        Raises:
            IntegrityError: A lost planner recorded the step differently.
            StateError: The disk or a quota stayed full; the file ends with the previous record.
            UnavailableError: The record could not be written whole for another reason; the file ends in the same way.
        """
        step = record["step"]
        assert isinstance(step, int), "the planner made it"
        known = self._known.pop(step, None)
        if known is None:
            self._begins[step] = self._end, self._last
            if len(self._begins) > _MOST_BEGINS:
                del self._begins[next(iter(self._begins))]
            self._append(line_of(record, self._last))
        # Compared byte for byte: for equal values and the same order of keys, orjson writes equal bytes.
        elif known != orjson.dumps(record):
            raise IntegrityError(
                f"{self._storage}: step {step} planned again has digest {record['digest']}, not the one of "
                f"its record ({orjson.loads(known).get('digest')!r:.40}): its data changed meanwhile; "
                "put back the data of before and start again from the last checkpoint"
            )

    def append_base(self, state: JsonObject, digest: str) -> None:
        """Write the state before the next step, so that readers can start there.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        step = state["step"]
        assert isinstance(step, int), "the planner made it"
        if step <= self._base_step:
            return  # it was written before, or later lines have taken its place
        self._base_step = self._spare_at = step
        note: JsonObject = {"kind": BASE, "step": step, "state": state, "after": digest}
        self._append(line_of(note, self._last))

    def cut(self, step: int) -> None:
        """Take back the record of a step that was appended here, and everything after it.

        Raises:
            StateError: The step is not one of the latest; or as for ``append``.
            UnavailableError: As for ``append``.
        """
        if step not in self._begins:
            raise StateError(
                f"{self._storage}: step {step} cannot be taken back, it is none of the {len(self._begins)} that were "
                "recorded last"
            )
        self._write()
        self._end, self._last = self._begins[step]
        self._storage.cut(self._end)
        self._sure = self._end, self._last
        self._begins = {s: begin for s, begin in self._begins.items() if s < step}
        # A base of a later step will be written again; a base directly before this step's record is still there.
        self._base_step = min(self._base_step, step)

    def append_world(self, world: JsonObject) -> None:
        """Write the ranks from a step on, as given by ``World.to_json``.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        self._append(line_of({"kind": WORLD, **world}, self._last))

    def _append(self, line: JournalLine) -> None:
        before = self._end, self._last
        if not self._staged:
            # If the window does not fit, nothing of it stays: the end returns to where its first line began.
            self._sure = before
        self._staged.append(bytes(line))
        self._end, self._last = self._end + len(bytes(line)), line.checksum
        if not self._together:
            self._write()

    def _write(self) -> None:
        """Write the staged lines; on failure, none of them is appended."""
        if not self._staged:
            return
        # Emptied before the attempt, because refused lines must not come along with the next record.
        content, self._staged = b"".join(self._staged), []
        try:
            self._storage.append(content)
        except BaseException:
            self._end, self._last = self._sure
            raise
        if self._spare_at is not None:
            step, self._spare_at = self._spare_at, None
            self._drop_before(step)

    def _drop_before(self, step: int) -> None:
        """Drop the records that are not kept, once there are as many of them as of those that are kept.

        So each record is written once more at most, and a journal has no more than twice the kept steps.
        """
        if not self._keep_steps:
            return
        begun = since_of(self._storage)
        if step - base_of(next(sound_lines(self._storage, begun)))[1] < 2 * self._keep_steps:
            return
        since = last_base(self._storage, at_most=step - self._keep_steps)
        if since != begun and not self._storage.drop_before(since):
            self._restart_at(since)

    def _restart_at(self, since: Since) -> None:
        """Write the journal anew from a base on; its lines get other places and checksums."""
        begins, end, last, due = dict[int, tuple[int, bytes]](), 0, b"", 0

        def rewritten() -> Iterator[bytes]:
            nonlocal end, last, due
            for line in restarted(sound_lines(self._storage, since)):
                if not end:
                    due = base_of(line)[1]
                elif not line.is_note:
                    begins[due], due = (end, last), due + 1
                end, last = end + len(bytes(line)), line.checksum
                yield bytes(line)

        if self._storage.shorten(rewritten()):
            self._end, self._last = end, last
            self._begins = {step: begins[step] for step in self._begins if step in begins}

    def require_claim(self) -> None:
        """Return if no other planner continues the journal; see ``JournalStorage.require_claim``."""
        self._storage.require_claim()

    def close(self) -> None:
        """Stop appending."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _storage(place: Path | JournalStorage, *, durable: bool) -> JournalStorage:
    return FileStorage(place, durable=durable) if isinstance(place, Path) else place


def _leading_up(storage: JournalStorage, state: JsonObject, digest: str) -> Head | None:
    """Return the base and the records before ``state`` if the journal leads up to it.

    A journal that does not lead up to ``state`` (another mix, a gap, damage) is moved aside and never overwritten. The
    same happens to a journal with steps if this run begins at step 0.
    """
    try:
        if not storage.exists():
            return None
        found = head_before(storage, state)
    except (StateError, IntegrityError) as error:
        _LOG.warning("%s is moved to %s: %s", storage, storage.move_aside(), error)
        return None
    if found.digest != digest:
        # Either one was tampered with, or this release draws differently. Which of these is true cannot be decided
        # here.
        raise StateError(
            f"the state before step {state['step']} has digest {digest}, {storage} says {found.digest!r:.40}: "
            "it is not the state that this run reached; resume from another checkpoint, or move the journal away"
        )
    if found.lost and state["step"] == 0:
        # Only the user knows whether this is a start before the first checkpoint, or whether a state was not given.
        aside = storage.move_aside()
        _LOG.warning(
            "%s holds %d steps of an earlier run, but this run begins at step 0, so they are moved to %s. To "
            "continue the earlier run, move them back and give its state; to keep them in place, use another run_dir",
            storage,
            found.lost,
            aside,
        )
        return None
    return found
