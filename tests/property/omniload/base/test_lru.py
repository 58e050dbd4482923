"""The cache of values under any order of calls, compared with a list: which values stay or leave, in which order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omniload.base.lru import Lru

CAPACITY = 10
KEYS = st.sampled_from("abcdef")
SIZES = st.integers(0, CAPACITY + 2)


class LruMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.lru = Lru(CAPACITY)
        self.model = []  # [key, value, size, pins], the least recently used first
        self.next_value = 0

    def line(self, key):
        return next((line for line in self.model if line[0] == key), None)

    def used(self, key):
        line = self.line(key)
        self.model.remove(line)
        self.model.append(line)

    def room_for(self, size, but=None):
        missing = sum(line[2] for line in self.model) + size - CAPACITY
        leaving = []
        for line in self.model:
            if missing > 0 and line[2] and not line[3] and line[0] != but:
                leaving.append(line)
                missing -= line[2]
        if missing > 0:
            return None
        self.model = [line for line in self.model if line not in leaving]
        return [(key, value) for key, value, _, _ in leaving]

    @rule(key=KEYS, size=SIZES)
    def put(self, key, size):
        self.next_value += 1
        line, pins = self.line(key), 0
        if line is not None:
            self.model.remove(line)
            pins = line[3]
        gone = self.room_for(size) if size else []

        assert self.lru.put(key, self.next_value, size) == (
            [(key, self.next_value)] if gone is None else gone
        )

        if gone is not None:
            self.model.append([key, self.next_value, size, pins])

    @rule(key=KEYS)
    def get(self, key):
        line = self.line(key)
        assert self.lru.get(key) == (line[1] if line is not None else None)
        if line is not None:
            self.used(key)

    @rule(key=KEYS)
    def peek(self, key):
        line = self.line(key)
        assert self.lru.peek(key) == (line[1] if line is not None else None)

    @rule(key=KEYS)
    def pin(self, key):
        if (line := self.line(key)) is not None:
            self.lru.pin(key)
            line[3] += 1

    @rule(key=KEYS)
    def unpin(self, key):
        line = self.line(key)
        if line is not None and line[3]:
            line[3] -= 1
            assert self.lru.unpin(key) == (line[3] == 0)

    @rule(key=KEYS, size=SIZES)
    def resize(self, key, size):
        if (line := self.line(key)) is not None:
            self.lru.resize(key, size)
            line[2] = size

    @rule(size=SIZES, but=st.none() | KEYS)
    def make_room(self, size, but):
        expected = self.room_for(size, but)
        assert self.lru.make_room(size, but=but) == expected

    @rule(key=KEYS)
    def pop(self, key):
        line = self.line(key)
        assert self.lru.pop(key) == (line[1] if line is not None else None)
        if line is not None:
            self.model.remove(line)

    @rule(keys=st.sets(KEYS))
    def pop_where(self, keys):
        going = [line for line in self.model if line[0] in keys]
        assert self.lru.pop_where(keys.__contains__) == [line[1] for line in going]
        self.model = [line for line in self.model if line not in going]

    @rule()
    def clear(self):
        self.lru.clear()
        self.model = []

    @invariant()
    def agrees(self):
        assert self.lru.values() == [line[1] for line in self.model]
        assert list(self.lru) == [line[0] for line in self.model]
        assert self.lru.used == sum(line[2] for line in self.model)
        assert len(self.lru) == len(self.model)
        assert self.lru.oldest() == next((line[0] for line in self.model if not line[3]), None)
        for key in "abcdef":
            line = self.line(key)
            assert (key in self.lru) == (line is not None)
            assert self.lru.size_of(key) == (line[2] if line is not None else 0)
            assert self.lru.is_pinned(key) == (line is not None and line[3] > 0)


TestLruAgainstAList = LruMachine.TestCase


def test_room_for_a_value_is_not_made_of_that_value_nor_of_pinned_ones():
    lru = Lru(CAPACITY)
    for key in "abc":
        lru.put(key, key, 3)
    lru.pin("b")

    assert lru.make_room(4, but="a") == [("c", "c")]
    assert lru.make_room(5, but="a") is None
    assert lru.values() == ["a", "b"]
