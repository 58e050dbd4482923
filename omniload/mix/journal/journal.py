"""The file of a journal: appended to by one planner, continued by the next.

A differential checkpoint: a base state, then what each step changed. Folding the
records into the base gives the state before any step, so a run resumes from the last
record, and "what was in step 1234?" is answered by planning that step again.

The file is JSON lines. The first line is the base, each line ends in a checksum of the
checksum before it and of its own text, so that no line can go missing, move, or stand twice::

    {"version": 3, "base": {...}, "after": "..."}<TAB>xxh64
    {"step": 0, "revision": 0, "digest": "...", "after": "...", "drawn": {"web": [...]}, "carried": [...]}<TAB>xxh64
    ...
    {"kind": "base", "step": 1024, "state": {...}, "after": "..."}<TAB>xxh64
    {"step": 1024, ...}<TAB>xxh64
    {"kind": "world", "step": 1020, "generation": 1, "sizes": {"pp": 1, "dp": 3, "cp": 1, "tp": 1}}<TAB>xxh64

``drawn`` holds, for each source drawn from, the cursor afterwards (position, sub, token)
and what was drawn; ``after`` is ``MixState.digest`` of the state that the line leads to. A missing *last*
line shows only in what outlives it: the state that a run resumes from says how many steps there were.
A base now and then lets whoever needs the last steps only read from there. A world says which ranks steps were
placed on, from its step on: none does for those that the plane was opened for, unless there was another before.

A torn last line, as a kill leaves it, is cut off; any other that does not fit is an
``IntegrityError``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from omniload.base.errors import IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject
from omniload.mix.journal.lines import (
    BASE,
    WORLD,
    JournalLine,
    Since,
    base_of,
    chained,
    first_line,
    line_of,
    sound_lines,
)
from omniload.mix.journal.reading import Tail
from omniload.mix.journal.room import Room
from omniload.mix.journal.storage import FileStorage, JournalStorage

__all__ = ["Journal"]

_LOG = get_logger(__name__)
_MOST_BEGINS = 1024
"""Steps that may be taken back: more than are planned ahead."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The part of a journal that is kept."""

    size_bytes: int
    checksum: bytes
    """Of its last line."""
    digest: Json
    """``MixState.digest`` of the state that it leads to."""
    has_worlds: bool = False
    """Whether ranks are noted in it."""
    moved: tuple[JsonObject, ...] = ()
    """Ranks that trained on its last steps and are noted behind it: they may be told some steps late."""
    lost: int = 0
    """Steps that are recorded behind it."""


class Journal:
    """An open journal, appended to by one planner."""

    def __init__(self, storage: JournalStorage, head: _Head) -> None:
        """Go on with a journal whose first lines are those of ``head``; ``storage`` holds no other."""
        self._storage = storage
        self.has_worlds = head.has_worlds or bool(head.moved)
        """Whether ranks are noted in it: those that go on are noted as well."""
        self._end, self._last = head.size_bytes, head.checksum
        # Up to here all is written: what is staged lies behind it, and is taken back to it.
        self._sure = self._end, self._last
        self._staged: list[bytes] = []
        self._together = False
        self._known: dict[int, bytes] = {}
        self._base_step = -1
        self._base: Since | None = None
        self._begins: dict[int, tuple[int, bytes]] = {}
        """Where the record of each step that was appended begins, and the checksum before it, of the latest ones."""

    @classmethod
    def leading_up(
        cls, place: Path | JournalStorage, state: JsonObject, digest: str, *, durable: bool = True
    ) -> Self:
        """Open a journal for a run that continues from ``state``.

        Records of earlier steps of the same mix stay where they are; those of ``state["step"]``
        and later belong to work that was lost and are cut off. A journal that does not lead up
        to ``state``, or has steps where ``state`` is that of step 0, is moved aside. Memory does not grow with the
        journal.

        Args:
            place: The file, or the folder of a store, claimed.
            state: State before the next step.
            digest: ``MixState.digest`` of ``state``.
            durable: Of a file, whether what is appended survives a power cut, and every record is kept. Without that it
                survives the end of the process that wrote it, and records that nobody can ask for are dropped in time.

        Raises:
            StateError: The journal leads up to this step of this mix, and to another state.
            StateError: The disk, or a quota, is full.
            UnavailableError: It cannot be written.
        """
        storage = _storage(place, durable=durable)
        head = _leading_up(storage, state, digest)
        if head is None:
            first = first_line(state, digest)
            storage.begin(bytes(first))
            head = _Head(len(bytes(first)), first.checksum, digest)
        else:
            storage.go_on(head.size_bytes)
        journal = cls(storage, head)
        # They trained on steps that stay, and were noted behind the cut, as they may be told some steps late.
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
        room: Room | None = None,
    ) -> Self:
        """Open the journal of a planner that was lost, for one that plans from ``step`` on again.

        What was recorded stays. Steps that are planned again must be what their records say.

        Args:
            place: As for ``leading_up``; claimed before ``tail`` was read.
            tail: Its end.
            step: First step that is planned again.
            durable: As for ``leading_up``.
            room: Waits where there is none for what is written here; ``None`` for nobody to wait.

        Raises:
            StateError: The disk, or a quota, is full.
            UnavailableError: It cannot be written.
        """
        storage = _storage(place, durable=durable)
        storage.room = room
        size = tail.since.offset + sum(len(bytes(line)) for line in tail.lines)
        storage.go_on(size, tail.bytes_from(step))
        journal = cls(storage, _Head(size, tail.lines[-1].checksum, ""))
        journal._known = dict(tail.texts_from(step))
        # Bases before that step are there, or what is written behind their place is.
        journal._base_step = tail.next_step
        return journal

    def wait_in(self, room: Room) -> None:
        """Have ``room`` wait where there is none."""
        self._storage.room = room

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write what is appended inside at the end, at once: a window of steps costs one sync, or one put.

        Raises:
            StateError: As for ``append``; none of it is there then.
            UnavailableError: As for ``append``.
        """
        self._together = True
        try:
            yield
        except BaseException:
            # Else the next record would bring along the beginning of a window that nobody was told of.
            if self._staged:
                self._staged.clear()
                self._end, self._last = self._sure
            raise
        finally:
            self._together = False
        self._write()

    def append(self, record: JsonObject) -> None:
        """Write the record of a step and wait until it is on the disk; one that is there already is compared.

        Raises:
            IntegrityError: The step was recorded by a planner that was lost, as another one.
            StateError: The disk, or a quota, stayed full; the file ends with the record before.
            UnavailableError: It could not be written whole for another reason; likewise.
        """
        step = record["step"]
        assert isinstance(step, int), "the planner made it"
        known = self._known.pop(step, None)
        if known is None:
            self._begins[step] = self._end, self._last
            if len(self._begins) > _MOST_BEGINS:
                del self._begins[next(iter(self._begins))]
            self._append(line_of(record, self._last))
        # Byte for byte: of equal values and keys in one order orjson makes equal bytes.
        elif known != orjson.dumps(record):
            raise IntegrityError(
                f"{self._storage}: step {step} planned again has digest {record['digest']}, not the one of "
                f"its record ({orjson.loads(known).get('digest')!r:.40}): its data changed meanwhile; "
                "put back the data of before and start again from the last checkpoint"
            )

    def append_base(self, state: JsonObject, digest: str) -> None:
        """Write the state before the next step, for whoever reads from there on.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        step = state["step"]
        assert isinstance(step, int), "the planner made it"
        if step <= self._base_step:
            return  # it was written before, or its place is taken
        # The last but one is begun with: a planner that takes over may have to plan steps before the last.
        before, self._base_step = self._base, step
        note: JsonObject = {"kind": BASE, "step": step, "state": state, "after": digest}
        self._base = Since(self._end, self._last)
        self._append(line_of(note, self._last))
        if before is not None and not self._storage.keeps_all:
            self._drop(before)

    def cut(self, step: int) -> None:
        """Take back the record of a step that was appended here, and all that was appended behind it.

        Raises:
            StateError: It is none of the latest steps; or as for ``append``.
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
        # A base of a later step is written again; one that stands before this step's record is there still.
        self._base_step = min(self._base_step, step)
        if self._base is not None and self._base.offset >= self._end:
            self._base = None

    def append_world(self, world: JsonObject) -> None:
        """Write which ranks there are from a step on: what ``World.to_json`` gives.

        Raises:
            StateError: As for ``append``.
            UnavailableError: As for ``append``.
        """
        self._append(line_of({"kind": WORLD, **world}, self._last))

    def _append(self, line: JournalLine) -> None:
        before = self._end, self._last
        if not self._staged:
            # What does not fit leaves nothing of a window: the end is then where its first line began.
            self._sure = before
        self._staged.append(bytes(line))
        self._end, self._last = self._end + len(bytes(line)), line.checksum
        if not self._together:
            self._write()

    def _write(self) -> None:
        """Add what was staged; where that fails, nothing of it was appended."""
        if not self._staged:
            return
        # Emptied before it is tried: what was refused must not come along with the next record.
        content, self._staged = b"".join(self._staged), []
        try:
            self._storage.append(content)
        except BaseException:
            self._end, self._last = self._sure
            raise

    def _drop(self, since: Since) -> None:
        """Begin anew with the base at ``since``; no planner takes over from further back."""
        # The base that is begun with must be there before what lies in front of it goes.
        self._write()
        base, *lines = sound_lines(self._storage, since)
        state, due = base_of(base)
        written = [first_line(state, str(base.parsed()["after"]))]
        begins, end = dict[int, tuple[int, bytes]](), len(bytes(written[0]))
        for line in lines:
            if not line.is_note:
                begins[due], due = (end, written[-1].checksum), due + 1
            # Each checksum is of the one before it: behind another first line all are made anew.
            written.append(chained(line.text, written[-1].checksum))
            end += len(bytes(written[-1]))
        self._storage.shorten(b"".join(map(bytes, written)))
        last = written[-1]
        self._end, self._last = end, last.checksum
        self._begins = {step: begins[step] for step in self._begins if step in begins}
        self._base = Since(self._end - len(bytes(last)), written[-2].checksum)

    def require_claim(self) -> None:
        """Return where no other planner goes on with it; see ``JournalStorage.require_claim``."""
        self._storage.require_claim()

    def close(self) -> None:
        """Add nothing any more."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _storage(place: Path | JournalStorage, *, durable: bool) -> JournalStorage:
    return FileStorage(place, durable=durable) if isinstance(place, Path) else place


def _leading_up(storage: JournalStorage, state: JsonObject, digest: str) -> _Head | None:
    """Return the base and the records before ``state``, where the journal leads up to it.

    One that does not (another mix, a gap, damage), and a whole run where this one begins at step 0, is moved aside,
    never overwritten.
    """
    try:
        if not storage.exists():
            return None
        found = _head_before(storage, state)
    except (StateError, IntegrityError) as error:
        _LOG.warning("%s is moved to %s: %s", storage, storage.move_aside(), error)
        return None
    if found.digest != digest:
        # One of both was tampered with, or this release draws otherwise; which of them cannot be told here.
        raise StateError(
            f"the state before step {state['step']} has digest {digest}, {storage} says {found.digest!r:.40}: "
            "it is not the state that this run reached; resume from another checkpoint, or move the journal away"
        )
    if found.lost and state["step"] == 0:
        # A start before the first checkpoint, or one whose state was forgotten: which of them, only the user can tell.
        aside = storage.move_aside()
        _LOG.warning(
            "%s holds %d steps of a run, and this one begins at step 0: they are moved to %s. To go on with them, "
            "move them back and give the state; another run_dir leaves them where they are",
            storage,
            found.lost,
            aside,
        )
        return None
    return found


def _head_before(storage: JournalStorage, state: JsonObject) -> _Head:
    """Check every line, and add up those that come before ``state``; records are not parsed.

    Raises:
        StateError: The file does not lead up to ``state``.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    lines = sound_lines(storage)
    first = next(lines)
    base, reached = base_of(first)
    step = state["step"]
    assert isinstance(step, int), "the planner wrote it"
    if not _is_of(base.get("fingerprint"), state["fingerprint"]):
        raise StateError("it is of another mix or other data")
    if reached > step:
        raise StateError(f"it starts at step {reached}, the run goes on from step {step}")
    size, last, record, has_worlds = len(bytes(first)), first, first, False
    moved: list[JsonObject] = []
    # Counted and not parsed: opening a long journal costs the checksum of each line, and no memory.
    for line in lines:
        # Notes of a step stand before its record: the base, and the ranks, that it is planned with.
        if reached < step or (reached == step and line.is_note):
            size, last = size + len(bytes(line)), line
            has_worlds |= line.is_world
        elif line.is_world and line.noted_step < step:
            moved.append(line.parsed())
        if not line.is_note:  # what follows is checked, and cut off
            record = line if reached < step else record
            reached += 1
    if reached < step:
        raise StateError(
            f"it ends before step {reached}, the run goes on from step {step}: its last lines are missing"
        )
    after = record.parsed().get("after")
    return _Head(size, last.checksum, after, has_worlds, tuple(moved), lost=reached - step)


def _is_of(begun: Json, now: Json) -> bool:
    """Tell whether a journal that began with one fingerprint may go on with another: edits may have added sources."""
    return isinstance(begun, dict) and isinstance(now, dict) and begun.items() <= now.items()
