"""The block cache under any order of requests, answers, failures, reads and drops, compared with a model."""

import itertools
import weakref
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.cache.block_cache import BlockCache, PageCacheEstimate
from tests.support.examples import few

CAPACITY = 12
KEYS = range(9)
keys = st.sampled_from(KEYS)


def size_of(key):
    return 2 + key % 3


class Memory(bytearray):
    """The bytes of one read, distinguishable from others; tests can see when they are freed."""


class Fill:
    """The model's record of a read."""

    def __init__(self, keys, *, kept):
        self.unserved = {key: size_of(key) for key in keys}
        self.kept = kept
        """Whether it is freed once all of it was served."""
        self.memory = Memory(itertools.chain.from_iterable([key] * size_of(key) for key in keys))
        self.is_there = weakref.ref(self.memory)

    def views(self):
        """Cut the memory into blocks, which are then its only references."""
        memory, at = memoryview(self.memory), 0
        del self.memory
        for key in self.unserved:
            yield key, memory[at : at + size_of(key)]
            at += size_of(key)


class BlockCacheBesideModel(RuleBasedStateMachine):
    """The model keeps None for a block on its way, and otherwise the fill that brought the block."""

    def __init__(self):
        super().__init__()
        self.cache = BlockCache(CAPACITY)
        self.blocks = OrderedDict()
        self.waiting = {}
        self.estimate = PageCacheEstimate(1 << 16)
        self.fills = []

    def used(self):
        return sum(map(size_of, self.blocks))

    def release(self, fill):
        for key in fill.unserved:
            assert self.blocks.pop(key) is fill

    def make_room(self, size):
        while self.used() + size > CAPACITY:
            oldest = next((fill for fill in self.blocks.values() if fill is not None), None)
            if oldest is None:
                return False
            self.release(oldest)
        return True

    @rule(key=keys)
    def claim(self, key):
        block, is_mine = self.cache.claim(key, size_of(key))

        if key in self.blocks:
            self.blocks.move_to_end(key)
            assert not is_mine
            assert block.data.done() == (self.blocks[key] is not None)
            assert block is self.waiting.get(key, block)
            return
        self.estimate.asked(key)
        has_room = self.make_room(size_of(key))
        assert (block is not None, is_mine) == (has_room, has_room)
        if has_room:
            self.blocks[key] = None
            self.waiting[key] = block

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def fill(self, data):
        together = data.draw(
            st.lists(st.sampled_from(sorted(self.waiting)), min_size=1, unique=True)
        )
        fill = Fill(together, kept=self.estimate.will_keep(together))
        self.fills.append(fill)
        self.cache.fill(dict(fill.views()))

        for key in together:
            self.blocks[key] = fill
            assert bytes(self.waiting.pop(key).data.result()) == bytes([key] * size_of(key))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def fail(self, data):
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.cache.fail(key, OSError("gone"))

        del self.blocks[key]
        with pytest.raises(OSError, match="gone"):
            self.waiting.pop(key).data.result()

    @rule(parts=st.lists(st.tuples(keys, st.integers(0, 4)), max_size=4))
    def served(self, parts):
        self.cache.served(parts)

        for key, size in parts:
            fill = self.blocks.get(key)
            if fill is None:
                continue
            fill.unserved[key] = max(0, fill.unserved[key] - size)
            if fill.kept and not any(fill.unserved.values()):
                self.estimate.took(tuple(fill.unserved))
                self.release(fill)

    @rule(wanted=st.lists(keys, max_size=3))
    def drop(self, wanted):
        before = self.used()
        dropped = self.cache.drop(wanted)

        for key in wanted:
            if (fill := self.blocks.get(key)) is not None:
                self.release(fill)
        assert dropped == before - self.used()

    @rule(key=keys)
    def get(self, key):
        found = self.cache.get(key)

        if self.blocks.get(key) is None:
            assert found is None
        else:
            assert bytes(found) == bytes([key] * size_of(key))
            self.blocks.move_to_end(key)

    @invariant()
    def all_that_is_there_is_counted_and_nothing_else(self):
        assert self.cache.used_bytes == self.used() <= CAPACITY
        there = {key for key, fill in self.blocks.items() if fill is not None}
        assert {key for key in KEYS if self.cache.holds(key)} == there

    @invariant()
    def what_the_kernel_has_lies_nowhere_else(self):
        served = {key for key in KEYS if self.cache.is_served(key)}
        assert served == {key for key in KEYS if self.estimate.has(key)}
        assert not served & self.blocks.keys()
        assert self.cache.kernel.num_invalidations == self.estimate.num_invalidations

    @invariant()
    def memory_goes_with_the_last_of_its_blocks(self):
        held = [fill for fill in self.fills if fill in self.blocks.values()]
        assert all((fill.is_there() is not None) == (fill in held) for fill in self.fills)
        self.fills = held


TestBlockCache = BlockCacheBesideModel.TestCase
TestBlockCache.settings = settings(few(25, soak=500), stateful_step_count=40)
