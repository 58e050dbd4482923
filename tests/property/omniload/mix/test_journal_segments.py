"""A journal on a store that loses, repeats, delays and tears puts, with planners that do not know they are stale.

The model is a text: the records that planners know to be durable. A store shows every put that was acknowledged, as
S3 and HDFS do. A put without acknowledgement may appear at any later moment, even torn, or never. Now and then a
planner drops old lines, and its mark may be such a put.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fusefs.stores.memory import MemoryStore
from omniload.base.errors import StateError, UnavailableError
from omniload.mix.journal.object_storage import ObjectStorage
from omniload.mix.journal.storage import Since
from tests.support.examples import few

FIRST = b"base\n"


class LateStore(MemoryStore):
    """Loses the answer of a put on command; the put itself appears later, or not at all."""

    def __init__(self):
        super().__init__()
        self.late = []
        self.fails = 0

    def publish(self, path, data, before=None, mode=None):
        if self.fails:
            self.fails -= 1
            self.late.append((path, bytes(data)))
            raise UnavailableError(f"{path}: no answer")
        return super().publish(path, data, before, mode)

    def come(self, index, size):
        path, data = self.late[index % len(self.late)]
        super().publish(path, data[:size])


class Planners(RuleBasedStateMachine):
    """Planners that write to one journal; the last of them owns it."""

    @initialize()
    def begin(self):
        self.store = LateStore()
        holder = ObjectStorage(self.store)
        holder.claim()
        holder.begin(FIRST)
        self.holder, self.stale = holder, []
        self.durable = FIRST
        """The acknowledged text."""
        self.maybe = set()
        """Possible continuations: a record whose put was not answered."""
        self.begins = {0}
        """Places where the journal may begin."""
        self.lines = 0

    def a_line(self):
        self.lines += 1
        return b"line %d\n" % self.lines

    @precondition(lambda self: self.holder is not None)
    @rule(count=st.sampled_from([1, 1, 3, 40]))
    def append(self, count):
        for _ in range(count):
            line = self.a_line()
            self.holder.append(line)
            self.durable += line
            self.maybe.clear()

    @precondition(lambda self: self.holder is not None)
    @rule()
    def lose_an_answer(self):
        line = self.a_line()
        self.store.fails = 1
        with pytest.raises(UnavailableError, match="no answer; resume once the store answers"):
            self.holder.append(line)
        self.maybe.add(line)
        with pytest.raises(UnavailableError, match="open the journal again"):
            self.holder.append(line)
        self.holder = None

    @precondition(lambda self: self.holder is not None)
    @rule(kept=st.integers(2, 6), is_lost=st.booleans())
    def drop(self, kept, is_lost):
        lines = self.durable.splitlines(keepends=True)
        offset = sum(map(len, lines[:-kept]))
        if offset <= max(self.begins):
            return
        since, self.store.fails = Since(offset, b"%016x" % offset), int(is_lost)
        assert self.holder.drop_before(since)
        # A planner whose mark is not answered goes on with a long journal; the mark may still come.
        self.begins = {*self.begins, offset} if is_lost else {offset}

    @precondition(lambda self: self.store.late)
    @rule(index=st.integers(0, 9), size=st.sampled_from([None, None, 3]))
    def a_put_comes_late(self, index, size):
        self.store.come(index, size)

    @rule(back=st.integers(0, 3))
    def take_over(self, back):
        """Let another planner continue, from the end or from some lines before it."""
        if self.holder is not None:
            self.stale.append(self.holder)
        holder = ObjectStorage(self.store)
        holder.claim()
        found = self.read()
        whole = found[: found.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        kept = b"".join(lines[: max(1, len(lines) - back)])
        # A run that goes back before its journal's begin moves it aside.
        begin = holder.since().offset
        kept = kept if len(kept) > begin else whole[: whole.index(b"\n", begin) + 1]
        holder.go_on(len(kept))
        self.holder, self.durable = holder, kept
        self.begins = {begin for begin in self.begins if begin < len(kept)}
        self.maybe.clear()

    @precondition(lambda self: self.stale)
    @rule(which=st.integers(0, 9))
    def a_stale_planner_writes(self, which):
        stale = self.stale.pop(which % len(self.stale))
        with pytest.raises(StateError, match="has taken the journal over"):
            stale.append(self.a_line())

    @invariant()
    def what_was_acknowledged_is_read(self):
        if hasattr(self, "store"):
            self.read()

    def read(self):
        for storage in (
            self.holder,
            *self.stale,
        ):  # merging and removing continue in the background
            if storage is not None:
                storage.close()
        begin = ObjectStorage(self.store).since()
        assert begin.offset in self.begins
        assert begin.before == (b"%016x" % begin.offset if begin.offset else b"")
        with ObjectStorage(self.store).opened() as file:
            assert file.tell() == begin.offset
            found = self.durable[: begin.offset] + file.read()
        rest = found.removeprefix(self.durable)
        assert found.startswith(self.durable)
        assert rest == b"" or any(line.startswith(rest) for line in self.maybe), rest
        return found


def test_what_was_acknowledged_is_read_and_no_stale_planner_adds_to_it():
    sequences = settings(few(30, soak=600), stateful_step_count=25)
    run_state_machine_as_test(Planners, settings=sequences)
