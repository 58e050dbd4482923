"""Granules of a spool, compared with a model that keeps the state of each granule separately."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusefs.write.spool import Granules

SIZE = 4
changes = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 40), st.integers(1, 20)),
    st.tuples(st.just("fail"), st.integers(0, 40), st.integers(1, 20)),
    st.tuples(st.just("resize"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("fetch"), st.integers(0, 8), st.integers(1, 4)),
    st.tuples(st.just("publish"), st.just(0), st.just(0)),
)


class Model:
    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self.states = dict.fromkeys(self.touched(0, size_bytes), "absent")

    def touched(self, offset, end):
        return sorted({byte // SIZE for byte in range(offset, end)})

    def write(self, offset, end):
        self.size_bytes = max(self.size_bytes, end)
        self.states.update(dict.fromkeys(self.touched(offset, end), "changed"))

    def fail(self, offset, end):
        for granule in self.touched(offset, end):
            if self.states.get(granule) == "held":
                self.states[granule] = "changed"

    def resize(self, size_bytes):
        old, self.size_bytes = self.size_bytes, size_bytes
        kept = self.touched(0, size_bytes)
        self.states = {g: state for g, state in self.states.items() if g in kept}
        self.states.update(dict.fromkeys(self.touched(old, size_bytes), "changed"))

    def fetch(self, first, stop):
        for granule in range(first, stop):
            if self.states.get(granule) == "absent":
                self.states[granule] = "held"

    def publish(self):
        self.states = {g: "absent" if s == "absent" else "held" for g, s in self.states.items()}

    def apply(self, change):
        what, at, count = change
        match what:
            case "write":
                if at > self.size_bytes:
                    self.resize(at)  # as a spool fills a gap
                self.write(at, at + count)
            case "fail":
                self.fail(at, at + count)
            case "resize":
                self.resize(at)
            case "fetch":
                self.fetch(at, at + count)
            case "publish":
                self.publish()

    def bytes_that_are(self, *states):
        return {byte for byte in range(self.size_bytes) if self.states[byte // SIZE] in states}


def apply(granules, change):
    what, at, count = change
    match what:
        case "write":
            if at > granules.size_bytes:
                granules.resized(at)
            granules.being_written(at, at + count)
            granules.written(at, at + count)
        case "fail":
            granules.being_written(at, at + count)
        case "resize":
            granules.resized(at)
        case "fetch":
            granules.fetched(at, at + count)
        case "publish":
            granules.published()


@given(st.integers(0, 50), st.lists(changes, max_size=20), st.integers(0, 60), st.integers(1, 30))
def test_granules_are_in_the_state_of_a_model(size_bytes, script, offset, count):
    granules, model = Granules(SIZE, size_bytes), Model(size_bytes)
    for change in script:
        apply(granules, change)
        model.apply(change)
    end = offset + count

    assert granules.size_bytes == model.size_bytes
    changed = granules.changed()
    assert {byte for run in changed for byte in run} == model.bytes_that_are("changed")
    assert all(a.stop < b.start for a, b in itertools.pairwise(changed))
    runs = list(granules.runs(offset, end))
    assert [byte for at, until, _ in runs for byte in range(at, until)] == list(
        range(offset, min(end, model.size_bytes))
    )
    assert {byte for at, until, here in runs if not here for byte in range(at, until)} == {
        byte for byte in model.bytes_that_are("absent") if offset <= byte < end
    }
    assert granules.num_missing() == list(model.states.values()).count("absent")
    assert granules.num_missing(offset, end) == sum(
        model.states.get(granule, "absent") == "absent" for granule in model.touched(offset, end)
    )


@given(st.integers(1, 50), st.lists(changes, max_size=20), st.integers(0, 50), st.integers(1, 20))
def test_a_write_needs_exactly_those_absent_granules_that_keep_other_bytes(
    size_bytes, script, offset, count
):
    granules, model = Granules(SIZE, size_bytes), Model(size_bytes)
    for change in script:
        apply(granules, change)
        model.apply(change)
    offset = min(offset, model.size_bytes)
    written = set(range(offset, offset + count))

    edges = granules.absent_edges(offset, offset + count)

    absent = model.bytes_that_are("absent")
    assert set(edges) == {
        granule
        for granule in model.touched(offset, offset + count)
        if any(byte in absent - written for byte in range(granule * SIZE, (granule + 1) * SIZE))
        and model.states.get(granule) == "absent"
    }
