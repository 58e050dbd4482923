"""The account of a disk cache compared with plain dictionaries: it keeps its limit, and evicts the oldest copies."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.cache.copy_state import Ledger


class LedgerMachine(RuleBasedStateMachine):
    """The account compared with sizes and pins in plain dictionaries."""

    names = st.sampled_from("abcde")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(20)
        self.sizes, self.pins, self.order = Counter(), Counter(), []

    def used(self, name):
        self.order = [known for known in self.order if known != name] + [name]

    @rule(name=names, size=st.integers(1, 9))
    def charge(self, name, size):
        may_go = [n for n in self.order if n != name and not self.pins[n] and self.sizes[n]]
        missing = self.sizes.total() + size - 20

        leaving = self.ledger.make_room(name, size)

        if leaving is None:
            assert missing > sum(self.sizes[n] for n in may_go)
            return
        assert leaving == may_go[: len(leaving)]
        assert not leaving or missing > sum(self.sizes[n] for n in leaving[:-1])
        for gone in leaving:
            self.sizes[gone] = 0
        self.ledger.charge(name, size)
        self.ledger.touch(name)
        self.sizes[name] += size
        self.used(name)

    @rule(name=names)
    def touch(self, name):
        self.ledger.touch(name)
        if self.sizes[name] or self.pins[name]:
            self.used(name)

    @rule(name=names)
    def pin(self, name):
        self.ledger.pin(name)
        self.pins[name] += 1
        self.used(name)

    @precondition(lambda self: self.pins.total())
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(+self.pins)))
        self.ledger.unpin(name)
        self.pins[name] -= 1

    @rule(name=names)
    def forget(self, name):
        self.ledger.forget(name)
        self.sizes[name] = 0

    @invariant()
    def the_sum_is_right_and_under_the_cap(self):
        assert self.ledger.used_bytes == self.sizes.total() <= 20
        assert all(self.ledger.size_of(name) == self.sizes[name] for name in "abcde")


TestLedgerAgainstDictionaries = LedgerMachine.TestCase
