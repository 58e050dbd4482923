"""Whatever comes in whatever order: no hole is ever read, nobody waits for ever, no page comes twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from snapshot.image.precontent import (
    PAGE_BYTES,
    AccessAsked,
    AllowAccess,
    CompleteFile,
    DenyAccess,
    Filler,
    FillRange,
    RangeFailed,
    RangeFilled,
    RangesAtHand,
    Stopped,
)

PAGES = 700
OFFSETS = st.integers(0, PAGES * PAGE_BYTES - 1)
SIZES = st.one_of(st.integers(1, 3 * PAGE_BYTES), st.integers(1, PAGES * PAGE_BYTES))


def pages_of(offset, size):
    return set(range(offset // PAGE_BYTES, min(-(-(offset + size) // PAGE_BYTES), PAGES)))


class FillerModel(RuleBasedStateMachine):
    """The shell played by dice, against sets of pages."""

    @initialize()
    def start(self):
        self.filler = Filler(sizes=[PAGES * PAGE_BYTES] * 2)
        self.written = [set(), set()]
        self.coming = []
        self.waiting = {}
        self.next_token = 0
        self.completed = set()
        self.stopped = False

    def carry_out(self, commands):
        for command in commands:
            match command:
                case FillRange(file=file, offset=offset, size_bytes=size):
                    assert offset % PAGE_BYTES == size % PAGE_BYTES == 0
                    assert size
                    wanted = pages_of(offset, size)
                    assert not wanted & self.written[file], "a page is written once"
                    for other in self.coming:
                        if other.file == file:
                            assert not wanted & pages_of(other.offset, other.size_bytes)
                    self.coming.append(command)
                    assert not self.stopped
                case AllowAccess(token=token):
                    file, wanted = self.waiting.pop(token)
                    assert wanted <= self.written[file], "no hole is read"
                case DenyAccess(token=token):
                    self.waiting.pop(token)
                case CompleteFile(file=file):
                    assert self.written[file] == set(range(PAGES))
                    assert file not in self.completed
                    self.completed.add(file)

    @rule(file=st.integers(0, 1), offset=OFFSETS, size=SIZES)
    def ask(self, file, offset, size):
        self.next_token += 1
        self.waiting[self.next_token] = (file, pages_of(offset, size))
        self.carry_out(self.filler.handle(AccessAsked(self.next_token, file, offset, size)))

    @rule(file=st.integers(0, 1), ranges=st.lists(st.tuples(OFFSETS, SIZES), max_size=3))
    def find_at_hand(self, file, ranges):
        inside = tuple((o, min(s, PAGES * PAGE_BYTES - o)) for o, s in ranges)
        self.carry_out(self.filler.handle(RangesAtHand(file, inside)))

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def fill(self, data):
        done = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        self.written[done.file] |= pages_of(done.offset, done.size_bytes)
        event = RangeFilled(done.file, done.offset, done.size_bytes)
        self.carry_out(self.filler.handle(event))

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def fail(self, data):
        lost = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        event = RangeFailed(lost.file, lost.offset, lost.size_bytes)
        self.carry_out(self.filler.handle(event))

    @rule()
    def stop(self):
        self.stopped = True
        self.carry_out(self.filler.handle(Stopped()))

    @invariant()
    def whoever_waits_waits_for_something_that_comes(self):
        for file, wanted in self.waiting.values():
            coming = set()
            for command in self.coming:
                if command.file == file:
                    coming |= pages_of(command.offset, command.size_bytes)
            assert wanted - self.written[file] <= coming

    @invariant()
    def what_is_left_is_known(self):
        for file in (0, 1):
            left = set(range(PAGES)) - self.written[file]
            assert self.filler.left_bytes(file) == len(left) * PAGE_BYTES
            holes = set()
            for offset, size in self.filler.holes(file):
                holes |= pages_of(offset, size)
            assert holes == left

    @invariant()
    def at_most_one_range_comes_from_behind(self):
        assert sum(not command.is_urgent for command in self.coming) <= 1


TestFillerModel = FillerModel.TestCase
TestFillerModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(st.lists(st.tuples(OFFSETS, SIZES), max_size=8))
def test_all_that_is_at_hand_is_filled_in_the_end(ranges):
    filler, written = Filler(sizes=[PAGES * PAGE_BYTES]), set()
    inside = tuple((o, min(s, PAGES * PAGE_BYTES - o)) for o, s in ranges)
    expected = set()
    for offset, size in inside:
        expected |= set(range(-(-offset // PAGE_BYTES), (offset + size) // PAGE_BYTES))

    commands = list(filler.handle(RangesAtHand(0, inside)))
    while commands:
        command = commands.pop()
        if isinstance(command, FillRange):
            written |= pages_of(command.offset, command.size_bytes)
            event = RangeFilled(0, command.offset, command.size_bytes)
            commands += filler.handle(event)

    assert written == expected
