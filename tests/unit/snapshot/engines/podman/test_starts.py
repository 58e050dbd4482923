"""Starts from a layer store: reads of layers become a trace of the image, which comes first the next time."""

import pytest

from snapshot.engines.podman.images import RoutedTier
from snapshot.engines.podman.starts import ImageStarts, trace_for
from snapshot.image.block.loader import BlockLoader
from snapshot.image.trace.sharing import push_trace
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import Touch, encode_trace, trace_of
from snapshot.image.tree.single_layer import layer_tree
from snapshot.image.view.view import ImageView
from tests.support.snapshot.engine_builders import BIG, a_served_image


class Place:
    def __init__(self, folder, window_s=60.0, **changes):
        self.served = a_served_image(folder, **changes)
        self.traces = TraceStore(folder / "traces")
        self.now_s = 0.0
        tier = RoutedTier()
        tier.add(self.served)
        self.loader = BlockLoader({"registry": tier})
        self.starts = ImageStarts(
            self.served, self.loader, self.traces, lambda: self.now_s, window_s
        )

    def view(self, number):
        indexes = self.served.indexes
        tree = layer_tree([index.entries if index else () for index in indexes], number)
        recorder = self.starts.recorder_of(number, tree)
        return ImageView(tree, [indexes[number]], self.loader, recorder), tree

    def read(self, number, path, offset=0, size_bytes=10):
        view, tree = self.view(number)
        return bytes(view.read(tree.lookup(path).number, offset, size_bytes))

    def kept(self):
        return self.traces.get(self.served.image.digest, ("run",))


@pytest.fixture
def place(tmp_path):
    made = []

    def make(**changes):
        made.append(Place(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.starts.finish()
        each.loader.close()


def test_reads_of_layers_are_touches_of_the_merged_image(place):
    here = place()
    assert here.read(1, "tmp/new") == b"fresh"
    here.now_s = 0.5
    assert here.read(0, "bin", 100, 50) == BIG[100:150]

    here.starts.finish()

    kept = here.kept()
    assert (kept.image, kept.command, kept.runs) == (here.served.image.digest, ("run",), 1)
    assert kept.touches == (Touch(0, "tmp/new", 0, 5), Touch(500, "bin", 100, 50))


def test_a_file_that_another_layer_hides_is_no_touch_of_the_image(place):
    here = place()
    here.read(1, "tmp/new")
    assert here.read(0, "gone") == b"old"

    here.starts.finish()

    assert [touch.path for touch in here.kept().touches] == ["tmp/new"]


def test_the_window_begins_with_the_first_read_and_not_with_the_mount(place):
    here = place(window_s=10.0)
    here.now_s = 1000.0
    here.read(0, "bin", 0, 10)
    here.now_s = 1011.0
    here.read(0, "bin", 500, 10)

    here.starts.finish()

    assert here.kept().touches == (Touch(0, "bin", 0, 10),)


def test_nothing_is_kept_where_nothing_was_read_or_nothing_is_to_be_recorded(place, tmp_path):
    place().starts.finish()
    silent = place(window_s=0.0)
    silent.read(0, "bin")
    silent.starts.finish()

    assert silent.starts.recorder_of(0, layer_tree([()], 0)) is None
    assert silent.kept() is None


def test_hot_blocks_are_fetched_before_anybody_reads(place, tmp_path):
    first = place()
    first.read(0, "bin", 1_500_000, 10)
    first.starts.finish()
    again = place()

    assert again.starts.prefetch() == 1

    assert again.read(0, "bin", 1_500_000, 10) == BIG[1_500_000:1_500_010]
    assert again.loader.requests == 1


def test_an_image_without_a_trace_fetches_nothing(place):
    here = place()

    assert here.starts.prefetch() == 0
    assert here.loader.requests == 0


def test_a_trace_of_an_image_some_of_whose_layers_are_not_ours_serves_those_that_are(place):
    here = place(left_out={1})
    touches = [Touch(0, "tmp/new", 0, 5), Touch(1, "bin", 0, 10)]
    here.traces.add(trace_of(here.served.image.digest, ("run",), touches))

    assert here.starts.prefetch() == 1


class TestTraceFor:
    def trace(self, here, command, *paths):
        return trace_of(
            here.served.image.digest, command, [Touch(n, p, 0, 1) for n, p in enumerate(paths)]
        )

    def test_commands_that_are_started_alike_often_are_united_as_the_images_own(self, place):
        here = place()
        here.traces.add(self.trace(here, ("other",), "bin"))
        here.traces.add(self.trace(here, ("run",), "gone"))

        found = trace_for(here.traces, here.served)

        assert (found.command, found.runs) == (("run",), 2)
        assert {touch.path for touch in found.touches} == {"bin", "gone"}

    def test_a_command_that_is_rarely_started_is_left_out(self, place):
        here = place()
        here.traces.add(self.trace(here, ("rare",), "gone"))
        for _ in range(3):
            here.traces.add(self.trace(here, ("often",), "bin"))

        found = trace_for(here.traces, here.served)

        assert [touch.path for touch in found.touches] == ["bin"]

    def test_where_this_node_knows_none_those_beside_the_image_serve(self, place):
        here = place()
        push_trace(here.served.store, self.trace(here, ("entirely", "other"), "bin"))

        assert here.starts.prefetch() == 1
        assert trace_for(here.traces, here.served).command == ("run",)

    def test_one_that_is_broken_is_passed_over(self, place, caplog):
        here = place()
        good = here.traces.add(self.trace(here, ("other",), "bin"))
        folder = here.traces.path(here.served.image.digest, ()).parent
        (folder / "broken.trace").write_bytes(encode_trace(good)[:-5])

        assert trace_for(here.traces, here.served).touches == good.touches
        assert "passed over" in caplog.text

    def test_there_may_be_none(self, place):
        here = place()

        assert trace_for(here.traces, here.served) is None
