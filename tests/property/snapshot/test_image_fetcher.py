"""The fetcher under any sequence of requests and answers keeps its promises."""

from hypothesis import given
from hypothesis import strategies as st

from snapshot.image.block.fetcher import (
    BlocksFetched,
    BlockWanted,
    FetchBlocks,
    Fetcher,
    FetchSettings,
    GiveUpBlock,
    HandOverBlock,
    Priority,
)
from snapshot.image.layer.index import BlockRef

SIZE = 10
WISHES = st.tuples(
    st.just("want"),
    st.sampled_from(Priority),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30)), min_size=1, max_size=6),
)
ANSWERS = st.tuples(st.just("answer"), st.integers(0, 20), st.integers(0, 255))
SETTINGS = st.builds(
    FetchSettings,
    tiers=st.sampled_from([("registry",), ("peer", "registry")]),
    slots=st.integers(3, 6),
    reserved_slots=st.integers(1, 2),
    coalesce_bytes=st.sampled_from([5, 10, 35]),
    bridge_bytes=st.sampled_from([0, 10, 25]),
)


def block(blob, number):
    return BlockRef(f"{blob}:{number}", blob, number, number * SIZE, SIZE)


class Simulation:
    """Carries out commands, and checks the invariants after each event."""

    def __init__(self, settings):
        self.settings, self.fetcher = settings, Fetcher(settings=settings)
        self.running, self.waiting, self.urgency = {}, set(), {}
        self.tiers = {}

    def apply(self, event):
        if isinstance(event, BlockWanted):
            for ref in event.blocks:
                known = self.urgency[ref.digest] if ref.digest in self.waiting else Priority.HOT
                self.urgency[ref.digest] = min(known, event.priority)
                self.waiting.add(ref.digest)
        for command in self.fetcher.handle(event):
            match command:
                case FetchBlocks():
                    self.started(command)
                case HandOverBlock(digest=digest) | GiveUpBlock(digest=digest):
                    assert digest in self.waiting
                    self.waiting.remove(digest)
                    self.tiers.pop(digest, None)
        self.check()

    def started(self, command):
        on_the_way = {ref.digest for other in self.running.values() for ref in other.blocks}
        span = command.blocks[-1].end - command.blocks[0].offset
        assert span <= max(self.settings.coalesce_bytes, SIZE)
        for before, ref in zip(command.blocks, command.blocks[1:], strict=False):
            assert before.blob == ref.blob
            assert 0 <= ref.offset - before.end <= self.settings.bridge_bytes
        for ref in command.blocks:
            assert ref.digest in self.waiting
            assert ref.digest not in on_the_way
            assert self.urgency[ref.digest] == command.priority
            # Tiers are asked in order, each once.
            assert self.settings.tiers.index(command.tier) == self.tiers.get(ref.digest, -1) + 1
            self.tiers[ref.digest] = self.settings.tiers.index(command.tier)
        if command.priority is not Priority.DEMAND:
            assert not self.queued_demands(), "prefetch overtook a reader"
        self.running[command.request] = command

    def queued_demands(self):
        on_the_way = {ref.digest for c in self.running.values() for ref in c.blocks}
        return {d for d in self.waiting - on_the_way if self.urgency[d] is Priority.DEMAND}

    def check(self):
        prefetch = sum(c.priority is not Priority.DEMAND for c in self.running.values())
        assert len(self.running) <= self.settings.slots
        assert prefetch <= self.settings.slots - self.settings.reserved_slots
        assert not self.queued_demands() or len(self.running) == self.settings.slots

    def answer(self, which, mask):
        if self.running:
            request = sorted(self.running)[which % len(self.running)]
            command = self.running.pop(request)
            came = {ref.digest for i, ref in enumerate(command.blocks) if mask >> (i % 8) & 1}
            self.apply(BlocksFetched(request, frozenset(came)))

    def end(self):
        for _ in range(3000):
            if not self.waiting:
                break
            self.answer(0, 255)
        assert self.waiting == set()
        assert self.running == {}


@given(SETTINGS, st.lists(WISHES | ANSWERS, max_size=40))
def test_no_prefetch_overtakes_a_reader_and_every_request_ends(settings, steps):
    simulation = Simulation(settings)
    for kind, first, second in steps:
        if kind == "want":
            blocks = tuple(block(blob, number) for blob, number in second)
            simulation.apply(BlockWanted(blocks, first))
        else:
            simulation.answer(first, second)

    simulation.end()
    # An ended request is forgotten: a new request goes to the first tier again.
    simulation.apply(
        BlockWanted(tuple(block("a", number) for number in range(31)), Priority.DEMAND)
    )
    simulation.end()
