"""Images of a layer store: asked for once, looked at again with patience, and found when their tag moved."""

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.engines.podman import images as layer_store_images
from snapshot.engines.podman.images import ImageOpener, LayerStoreMount, RoutedTier, ServedImages
from snapshot.image.layer.index import block_refs
from snapshot.image.layer.index_cache import IndexCache
from snapshot.oci.layout import OciLayout
from snapshot.oci.reference import Reference
from tests.support.snapshot.engine_builders import LOWER, NAME, UPPER, FakeOpener, a_served_image
from tests.support.snapshot.image_builders import a_layer, a_tar, an_image

NONE = "sha256:" + "00" * 32


@pytest.fixture
def served(tmp_path):
    return a_served_image(tmp_path)


@pytest.fixture
def moved(tmp_path):
    """The same tag, later: another layer alone."""
    return a_served_image(tmp_path / "later", tars=(a_tar(),))


def layers_of(served):
    return [layer.digest for layer in served.image.layers]


def test_an_image_is_asked_for_once(served):
    opener = FakeOpener(served)
    images = ServedImages(opener, clock=FakeClock())

    assert images.of(NAME) is served
    assert images.of(NAME) is served
    assert [images.holding(NAME, digest) for digest in layers_of(served)] == [served, served]
    assert opener.asked == [("r.example/a:v", None)]


@pytest.mark.parametrize("error", [ConfigError("no"), UnavailableError("no"), OSError("no")])
def test_what_failed_is_asked_again_only_after_a_while(served, error, caplog):
    clock, opener = FakeClock(), FakeOpener(error, served)
    images = ServedImages(opener, clock=clock)

    assert images.of(NAME) is None
    clock.advance(9.9)
    assert images.of(NAME) is None
    assert images.holding(NAME, NONE) is None
    assert len(opener.asked) == 1
    clock.advance(0.2)

    assert images.of(NAME) is served
    assert "left to the engine" in caplog.text


def test_an_outage_longer_than_our_patience_is_not_asked_again_at_once():
    clock = FakeClock()

    def slow(*_):
        clock.advance(60.0)
        raise UnavailableError("no")

    images = ServedImages(slow, clock=clock)
    assert images.of(NAME) is None
    before = clock.now_s()
    assert images.of(NAME) is None
    assert clock.now_s() == before


def test_a_tag_is_looked_at_anew_when_the_engine_wants_a_layer_it_had_not(served, moved):
    clock, opener = FakeClock(), FakeOpener(served, moved)
    images = ServedImages(opener, clock=clock)
    (wanted,) = layers_of(moved)

    assert images.of(NAME) is served
    assert images.holding(NAME, wanted) is None
    clock.advance(11.0)

    assert images.holding(NAME, wanted) is moved
    assert images.of(NAME) is moved
    assert len(opener.asked) == 2


def test_a_layer_in_use_is_found_by_the_image_it_was_pinned_with(served, moved):
    opener = FakeOpener(moved, served)
    lower = layers_of(served)[0]
    pins = {lower: served.image.digest}
    images = ServedImages(opener, lambda _, layer: pins.get(layer), clock=FakeClock())
    images.of(NAME)

    assert images.holding(NAME, lower) is served

    assert opener.asked == [("r.example/a:v", None), ("r.example/a:v", served.image.digest)]
    assert images.of(NAME) is moved


def test_a_registry_that_does_not_answer_is_left_alone_for_layers_in_use_too(served):
    clock = FakeClock()
    opener = FakeOpener(*[UnavailableError("no")] * 2, served)
    images = ServedImages(opener, lambda *_: served.image.digest, clock=clock)
    lower, upper = layers_of(served)

    assert [images.holding(NAME, lower), images.holding(NAME, upper)] == [None, None]
    assert len(opener.asked) == 2  # for the image in use, and for what the tag means
    clock.advance(11.0)

    assert images.holding(NAME, lower) is served


def test_all_layers_of_an_image_in_use_are_found_by_one_request(served, moved):
    opener = FakeOpener(moved, served)
    images = ServedImages(opener, lambda *_: served.image.digest, clock=FakeClock())
    images.of(NAME)

    assert [images.holding(NAME, digest) for digest in layers_of(served)] == [served, served]
    assert len(opener.asked) == 2


def test_each_image_that_is_found_is_told_of(served):
    told = []
    images = ServedImages(FakeOpener(served), opened=told.append, clock=FakeClock())

    images.of(NAME)
    images.of(NAME)

    assert told == [served]


def test_an_image_that_is_what_it_was_is_not_held_a_second_time(served, tmp_path):
    clock, told = FakeClock(), []
    again = a_served_image(tmp_path / "again")
    opener = FakeOpener(served, again)
    images = ServedImages(opener, opened=told.append, clock=clock)
    images.of(NAME)
    clock.advance(11.0)

    assert images.holding(NAME, NONE) is None  # a layer that is not served: the tag may have moved

    assert len(opener.asked) == 2
    assert (images.of(NAME), told) == (served, [served])


def test_an_image_of_which_more_layers_can_be_shown_takes_the_place_of_itself(served, tmp_path):
    clock = FakeClock()
    part = a_served_image(tmp_path / "part", left_out={0})
    images = ServedImages(FakeOpener(part, served), clock=clock)
    lower = layers_of(served)[0]
    assert (images.of(NAME), images.holding(NAME, lower)) == (part, None)
    clock.advance(11.0)

    assert images.holding(NAME, lower) is served


def test_references_that_lead_nowhere_do_not_fill_the_store(served, monkeypatch, caplog):
    monkeypatch.setattr(layer_store_images, "MAX_IMAGES", 3)
    opener = FakeOpener(*[ConfigError("no")] * 7, served)
    images = ServedImages(opener, clock=FakeClock())
    others = [type(NAME).parse(f"r.example/b{number}:v") for number in range(7)]

    assert [images.of(other) for other in others] == [None] * 7

    assert images.of(NAME) is served
    assert "one too many" not in caplog.text


def test_more_images_than_can_be_shown_are_left_to_the_engine(served, monkeypatch, caplog):
    monkeypatch.setattr(layer_store_images, "MAX_IMAGES", 1)
    images = ServedImages(FakeOpener(served), clock=FakeClock())
    images.of(NAME)

    assert images.of(type(NAME).parse("r.example/b:v")) is None
    assert images.holding(type(NAME).parse("r.example/b:v"), NONE) is None
    assert "one too many" in caplog.text


def test_a_layer_without_an_index_is_not_shown(tmp_path):
    served = a_served_image(tmp_path, left_out={0})
    lower, upper = layers_of(served)

    assert (served.place_of(lower), served.place_of(upper), served.place_of(NONE)) == (
        None,
        1,
        None,
    )


class TestRoutedTier:
    def test_a_block_comes_from_the_repository_its_image_was_found_in(self, served):
        tier = RoutedTier()
        tier.add(served)
        index = served.indexes[0]
        (ref,) = block_refs(index, [0])

        found, moved = tier.fetch(index, [ref])

        assert found == {ref.digest: LOWER[: 1 << 20]}
        assert moved == 1 << 20

    def test_a_repository_that_lost_it_is_passed_over(self, served, tmp_path):
        tier = RoutedTier()
        tier.add(served)
        other = a_served_image(tmp_path / "other")
        tier.add(other)
        for blob in (tmp_path / "other/layout/blobs/sha256").iterdir():
            blob.unlink()
        index = served.indexes[1]
        (ref,) = block_refs(index, [0])

        found, _ = tier.fetch(index, [ref])

        assert found == {ref.digest: UPPER}

    @pytest.mark.parametrize("answer", [ConfigError("log in"), IntegrityError("short"), b"wrong"])
    def test_a_repository_that_refuses_or_holds_other_bytes_is_passed_over(
        self, served, tmp_path, monkeypatch, answer
    ):
        tier = RoutedTier()
        tier.add(served)
        other = a_served_image(tmp_path / "other")
        tier.add(other)

        def blob_range(digest, offset, size_bytes):
            if isinstance(answer, Exception):
                raise answer
            return answer.ljust(size_bytes, b"!")

        monkeypatch.setattr(other.store, "blob_range", blob_range)
        index = served.indexes[1]
        (ref,) = block_refs(index, [0])

        assert tier.fetch(index, [ref])[0] == {ref.digest: UPPER}

    def test_a_blob_of_no_image_is_nowhere(self, served):
        index = served.indexes[0]

        with pytest.raises(FileNotFoundError, match="no image with layer"):
            RoutedTier().fetch(index, list(block_refs(index, [0])))


class TestImageOpener:
    """Against a layout that stands where the registry would be."""

    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        store = OciLayout.create(tmp_path / "layout")
        self.addresses = []

        def opened(address, *, mirrors):
            self.addresses.append((address, mirrors))
            return store, "v"

        monkeypatch.setattr(layer_store_images, "open_store", opened)
        return store

    def opener(self, tmp_path, **changes):
        settings = {"mountpoint": "", "cache": str(tmp_path / "cache")}
        return ImageOpener(LayerStoreMount(**settings | changes))

    def test_layers_that_can_only_be_read_whole_are_left_to_the_engine(self, store, tmp_path):
        an_image(store, [(a_layer(store, tar, "tar"), tar) for tar in (LOWER, UPPER)])

        found = self.opener(tmp_path, mirrors=("m.example",))(NAME)

        assert found.indexes == (None, None)
        assert self.addresses == [("r.example/a:v", ("m.example",))]

    def test_an_image_of_dockers_hub_is_asked_for_at_its_server(self, store, tmp_path):
        an_image(store, [(a_layer(store, LOWER, "tar"), LOWER)])

        self.opener(tmp_path)(Reference.parse("docker.io/library/python:3.11"))

        assert self.addresses == [("registry-1.docker.io/library/python:3.11", ())]

    def test_unless_an_index_of_them_is_kept(self, store, tmp_path):
        layer = a_layer(store, LOWER, "tar")
        an_image(store, [(layer, LOWER), (a_layer(store, UPPER, "tar"), UPPER)])
        cache = IndexCache(tmp_path / "cache/indexes")
        cache.put(layer_store_images.index_layer(store, layer, cache))

        found = self.opener(tmp_path)(NAME)

        assert found.indexes[0].blob_digest == layer.digest
        assert found.indexes[1] is None

    def test_or_they_shall_be_indexed(self, store, tmp_path):
        image = an_image(store, [(a_layer(store, tar, "tar"), tar) for tar in (LOWER, UPPER)])

        found = self.opener(tmp_path, index=True)(NAME, image.digest)

        assert [index.blob_digest for index in found.indexes] == [d.digest for d in image.layers]

    def test_a_configuration_that_lies_about_a_layer_is_not_believed(self, store, tmp_path):
        an_image(store, [(a_layer(store, LOWER, "tar"), UPPER)])

        with pytest.raises(IntegrityError, match="build the image anew"):
            self.opener(tmp_path, index=True)(NAME)

    def test_an_image_that_is_not_there_is_said_so(self, store, tmp_path):
        with pytest.raises(ConfigError, match="no such image"):
            self.opener(tmp_path)(NAME)
