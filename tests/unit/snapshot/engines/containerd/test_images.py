"""Which layers can be read lazily: found by labels in the image they belong to, each indexed once."""

import threading

import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.engines.containerd import images as snapshotter_images
from snapshot.engines.containerd.chain import LayerWanted, chain_ids
from snapshot.engines.containerd.images import RegistryImages
from snapshot.image.layer.index_cache import IndexCache
from snapshot.oci.digest import digest_of
from snapshot.oci.image import fetched
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


class Place:
    """A layout in the place of a registry, with an image of two layers."""

    def __init__(self, folder):
        self.folder = folder
        self.store = OciLayout.create(folder / "layout")
        self.reference = f"oci:{folder / 'layout'}:v"
        self.tars = [a_tar(a_member(name, name.encode() * 9)) for name in ("one", "two")]
        self.image = self.push(self.tars)
        self.images = RegistryImages(folder / "indexes")

    def push(self, tars, diff_ids=None, compression="tar"):
        layers = [a_layer(self.store, tar, compression) for tar in tars]
        return an_image(self.store, list(zip(layers, diff_ids or tars, strict=True)))

    def wanted(self, place, image=None, manifest=None):
        image = image or self.image
        return LayerWanted(
            target=chain_ids(image.config.rootfs.diff_ids)[place],
            reference=self.reference,
            layer=image.layers[place].digest,
            manifest=manifest,
        )

    def indexed(self):
        cache = IndexCache(self.folder / "indexes")
        return [cache.get(layer.digest) is not None for layer in self.image.layers]


def test_layers_are_found_from_the_lowest_up_and_indexed_as_they_are(place):
    found, first = place.images.find(place.wanted(0), 0)
    assert place.indexed() == [True, False]
    again, second = place.images.find(place.wanted(1), 1)

    assert place.indexed() == [True, True]
    assert (first, second) == (1, 2)
    assert found == again
    assert found.digest == place.image.digest
    assert found.image().config == place.image.config


def test_the_documents_are_kept_as_they_came(place):
    kept = fetched(place.store, "v", reference=place.reference)

    assert digest_of(kept.manifest) == kept.digest == place.image.digest
    assert digest_of(kept.config) == place.image.manifest.config.digest
    assert kept.reference == place.reference


def test_the_manifest_is_asked_for_once_for_all_layers(place, monkeypatch):
    asked = []
    real = snapshotter_images.fetched

    def counted(*words, **named):
        asked.append(words)
        return real(*words, **named)

    monkeypatch.setattr(snapshotter_images, "fetched", counted)
    for layer in (0, 1):
        place.images.find(place.wanted(layer), layer)

    assert len(asked) == 1


def test_a_tag_that_moves_between_two_layers_is_looked_at_again(place):
    place.images.find(place.wanted(0), 0)
    newer = place.push([place.tars[0], a_tar(a_member("three", b"3"))])

    found, layers = place.images.find(place.wanted(1, newer), 1)

    assert (found.digest, layers) == (newer.digest, 2)
    with pytest.raises(ConfigError, match="it is unpacked instead"):
        place.images.find(place.wanted(1), 1)


def test_a_digest_decides_where_the_client_knows_one(place):
    place.push([a_tar(a_member("other", b"x"))])

    found, _ = place.images.find(place.wanted(0, manifest=place.image.digest), 0)

    assert found.digest == place.image.digest


@pytest.mark.parametrize("below", [0, 2])
def test_a_layer_that_lies_on_others_than_asked_is_not_taken(place, below):
    with pytest.raises(ConfigError, match=rf"at 1, not as sha256.* on {below} lazy"):
        place.images.find(place.wanted(1), below)

    assert place.indexed() == [False, False]


def test_a_layer_that_is_not_what_the_configuration_says_is_refused(place):
    image = place.push(place.tars, diff_ids=[b"another", place.tars[1]])

    with pytest.raises(IntegrityError, match="the configuration says"):
        place.images.find(place.wanted(0, image), 0)


def test_a_format_that_is_not_read_in_parts_is_refused(place):
    image = place.push([b"any"], compression="zstd")

    with pytest.raises(ConfigError, match="omniload image convert"):
        place.images.find(place.wanted(0, image), 0)


def test_two_who_want_one_layer_at_once_read_it_once(place, monkeypatch):
    first, go = threading.Event(), threading.Event()
    read = []
    real = snapshotter_images.index_layer

    def slow(store, layer, cache):
        if cache.get(layer.digest) is None:
            read.append(layer.digest)
            first.set()
            assert go.wait(30)
        return real(store, layer, cache)

    monkeypatch.setattr(snapshotter_images, "index_layer", slow)
    threads = [
        threading.Thread(target=place.images.find, args=(place.wanted(0), 0)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert first.wait(30)
    go.set()
    for thread in threads:
        thread.join()

    assert read == [place.image.layers[0].digest]


def test_documents_that_were_changed_after_they_were_kept_are_refused(place):
    kept = fetched(place.store, "v", reference=place.reference)

    for change in ({"manifest": kept.manifest + b" "}, {"config": kept.config + b" "}):
        fields = {name: getattr(kept, name) for name in kept.__slots__} | change
        with pytest.raises(IntegrityError):
            type(kept)(**fields).image()


def test_few_layers_are_read_whole_at_once(place, monkeypatch):
    image = place.push([a_tar(a_member(str(n), b"x")) for n in range(9)])
    lock, go = threading.Lock(), threading.Event()
    inside, most, entered = 0, 0, threading.Semaphore(0)
    real = snapshotter_images.index_layer

    def slow(*words):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        entered.release()
        assert go.wait(30)
        with lock:
            inside -= 1
        return real(*words)

    monkeypatch.setattr(snapshotter_images, "index_layer", slow)
    threads = [
        threading.Thread(target=place.images.find, args=(place.wanted(n, image), n))
        for n in range(9)
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert entered.acquire(timeout=60)
    go.set()
    for thread in threads:
        thread.join()

    assert most == 4


def test_a_layer_that_could_not_be_read_is_read_again_by_the_next(place, monkeypatch):
    def broken(*_):
        raise UnavailableError("cut off")

    with monkeypatch.context() as changed:
        changed.setattr(snapshotter_images, "index_layer", broken)
        with pytest.raises(UnavailableError):
            place.images.find(place.wanted(0), 0)

    assert place.images.find(place.wanted(0), 0)[1] == 1


@pytest.mark.parametrize(
    ("reference", "lies"),
    [
        ("good.example/team/image:v", True),
        ("good.example/team/image@sha256:" + "ab" * 32, True),
        ("good.example/team/deep/image:v", True),
        ("good.example/other:v", False),
        ("good.example/teamwork/image:v", False),
        ("good.example:5000/team/image:v", False),
        ("good.example.evil/team/image:v", False),
        ("evil.example/good.example/team/image:v", False),
        ("local:5000/anything:v", True),
        ("local:50001/anything:v", False),
        ("docker.io/library/python:3.11", True),
        ("docker.io/library/python-evil:3.11", False),
    ],
)
def test_an_image_lies_in_a_folder_by_whole_names(reference, lies):
    places = ("good.example/team/", "local:5000", "docker.io/library/python")

    assert snapshotter_images.lies_in(reference, places) is lies


def test_an_image_from_elsewhere_is_unpacked_and_its_registry_not_asked(place, monkeypatch):
    """Its tables may say of any bytes that they are a layer which other images have, too."""

    def asked(*_, **__):
        raise AssertionError("nobody should ask")

    folder = place.reference.rpartition(":")[0]
    near = RegistryImages(place.folder / "indexes", lazy_from=[folder])
    assert near.find(place.wanted(0), 0)[1] == 1
    far = RegistryImages(place.folder / "indexes", lazy_from=["good.example/team"])
    monkeypatch.setattr(snapshotter_images, "open_store", asked)

    with pytest.raises(ConfigError, match=r"in none of good\.example/team; it is unpacked"):
        far.find(place.wanted(0), 0)
