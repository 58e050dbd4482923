"""Indexes beside an image: used where somebody vouches for them, refused where anything is wrong."""

import gzip
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.image.entries import Entry, Extent
from snapshot.image.index_checking import check_index
from snapshot.image.index_file import IndexCache, encode_index
from snapshot.image.index_sharing import (
    INDEX_TYPE,
    SharedIndexes,
    key_of,
    push_index,
    signature_of,
)
from snapshot.image.layers import index_image, read_stream
from snapshot.oci.artifacts import push_artifact
from snapshot.oci.layout import OciLayout
from tests.support.image_builders import (
    BlobSource,
    a_layer,
    a_member,
    a_tar,
    an_image,
    zran_friendly,
)

BIG = zran_friendly(6_000_000)
TAR = a_tar(a_member("d/big", BIG), a_member("small", b"x"))
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


class Counting:
    """A store that counts what is read of layers."""

    def __init__(self, store):
        self.store, self.ranges, self.wholes = store, 0, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def blob_range(self, digest, offset, size_bytes):
        self.ranges += size_bytes
        return self.store.blob_range(digest, offset, size_bytes)

    def blob_chunks(self, blob):
        self.wholes.append(blob.digest)
        return self.store.blob_chunks(blob)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An image in a layout, and the index of its layer; made once, since that takes its time."""
    folder = tmp_path_factory.mktemp("made")
    layout = OciLayout.create(folder / "layout")
    image = an_image(layout, [(a_layer(layout, gzip.compress(TAR, 6)), TAR)])
    (index,) = index_image(layout, image, IndexCache(folder / "indexes"))
    return folder / "layout", image, index


@pytest.fixture
def layout(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "layout")
    return OciLayout(tmp_path / "layout")


@pytest.fixture
def image(made):
    return made[1]


@pytest.fixture
def index(made):
    return made[2]


def shared(store, image, **trust):
    return SharedIndexes(store=store, image=image.digest, **trust)


def layer_and_id(image):
    return image.layers[0], image.config.rootfs.diff_ids[0]


@pytest.mark.parametrize("trust", [{"key": KEY}, {"any_pusher": True}])
def test_another_node_reads_only_what_it_touches_of_a_gzip_layer(
    layout, image, index, tmp_path, trust
):
    push_index(layout, image.digest, index, KEY)
    store = Counting(layout)

    found = index_image(
        store, image, IndexCache(tmp_path / "second"), shared(store, image, **trust)
    )

    assert image.layers[0].digest not in store.wholes
    assert encode_index(found[0]) == encode_index(index)
    (extent,) = next(e for e in found[0].entries if e.path == "d/big").extents
    source = BlobSource(store)
    assert read_stream(found[0], source, extent.stream_offset + 9, 10) == BIG[9:19]
    assert sum(size for _, size in source.fetched) < image.layers[0].size / 3


def test_what_was_found_once_is_kept_by_the_node(layout, image, index, tmp_path):
    push_index(layout, image.digest, index, KEY)
    cache = IndexCache(tmp_path / "second")
    index_image(layout, image, cache, shared(layout, image, key=KEY))

    assert cache.get(index.blob_digest) is not None


@pytest.mark.parametrize("trust", [{}, {"key": OTHER_KEY}])
def test_an_index_nobody_here_vouches_for_is_not_used(layout, image, index, tmp_path, trust):
    push_index(layout, image.digest, index, KEY)
    store = Counting(layout)

    index_image(store, image, IndexCache(tmp_path / "second"), shared(store, image, **trust))

    assert store.wholes == [image.layers[0].digest] or image.layers[0].digest in store.wholes


def test_an_unsigned_index_is_refused_where_a_key_is_given(layout, image, index, caplog):
    push_index(layout, image.digest, index)

    with caplog.at_level(logging.WARNING, "omniload"):
        assert shared(layout, image, key=KEY).find(*layer_and_id(image)) is None

    assert "is not signed" in caplog.text
    assert shared(layout, image, any_pusher=True).find(*layer_and_id(image)) is not None


def test_a_signed_one_is_found_behind_others(layout, image, index):
    push_artifact(layout, image.digest, INDEX_TYPE, b"nonsense", {"io.omniload.index.layer": "x"})
    push_index(layout, image.digest, index)
    push_index(layout, image.digest, index, OTHER_KEY)
    push_index(layout, image.digest, index, KEY)

    found = shared(layout, image, key=KEY).find(*layer_and_id(image))

    assert found is not None
    assert encode_index(found) == encode_index(index)


def test_a_signature_is_for_one_layer_its_tar_and_these_bytes():
    given = (KEY, "sha256:a", "sha256:b", b"index")
    known = signature_of(*given)

    for place, other in enumerate((OTHER_KEY, "sha256:b", "sha256:c", b"indeX")):
        changed = [*given]
        changed[place] = other
        assert signature_of(*changed) != known


def altered(index, **changes):
    """Return an index with records of its blocks changed."""
    blocks_B = index.blocks_B.copy()
    for name, value in changes.items():
        blocks_B[name][1] = value
    return replace(index, blocks_B=blocks_B)


def with_entry(index, **changes):
    entry = Entry(path="f", kind="file", mode=0o644, size_bytes=10, extents=(Extent(0, 0, 10),))
    return replace(index, entries=(*index.entries, replace(entry, **changes)))


HOSTILE = {
    "another layer": lambda i: replace(i, blob_digest="sha256:" + "0" * 64),
    "another size": lambda i: replace(i, blob_bytes=i.blob_bytes + 1),
    "another tar": lambda i: replace(i, diff_id="sha256:" + "0" * 64),
    "another format": lambda i: replace(i, format="tar"),
    "block beyond the blob": lambda i: altered(i, blob_offset=i.blob_bytes),
    "block far beyond the blob": lambda i: altered(i, blob_offset=(1 << 64) - 1),
    "block of 4 GiB": lambda i: altered(i, blob_size=0xFFFFFFFF),
    "no such window": lambda i: altered(i, window=len(i.windows_W)),
    "window below none": lambda i: altered(i, window=-2),
    "nine bits": lambda i: altered(i, bits=9),
    "climbing path": lambda i: with_entry(i, path="../f"),
    "absolute path": lambda i: with_entry(i, path="/f"),
    "path that is a number": lambda i: with_entry(i, path=7),
    "unknown kind": lambda i: with_entry(i, kind="socket"),
    "mode as text": lambda i: with_entry(i, mode="755"),
    "mode too large": lambda i: with_entry(i, mode=1 << 20),
    "no number": lambda i: with_entry(i, uid=True),
    "hard link out": lambda i: with_entry(i, kind="hardlink", target="../../etc/passwd"),
    "beyond the stream": lambda i: with_entry(i, extents=(Extent(0, i.stream_bytes - 9, 10),)),
    "beyond the file": lambda i: with_entry(i, extents=(Extent(5, 0, 10),)),
    "attribute as number": lambda i: with_entry(i, xattrs=((7, b""),)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused(image, index, name):
    with pytest.raises(IntegrityError):
        check_index(HOSTILE[name](index), *layer_and_id(image))


@pytest.mark.parametrize("name", ["another layer", "block beyond the blob", "climbing path"])
def test_a_hostile_index_costs_a_whole_read_and_no_wrong_byte(
    layout, image, index, tmp_path, caplog, name
):
    data = encode_index(HOSTILE[name](index))
    annotations = {"io.omniload.index.layer": index.blob_digest}
    push_artifact(layout, image.digest, INDEX_TYPE, data, annotations)

    with caplog.at_level(logging.WARNING, "omniload"):
        (found,) = index_image(
            layout, image, IndexCache(tmp_path / "n"), shared(layout, image, any_pusher=True)
        )

    assert "passed over" in caplog.text
    assert encode_index(found) == encode_index(index)


@pytest.mark.parametrize(
    "data", [b"", b"no index", b'{"omniload_layer_index": 2}\n', b'{"omniload_layer_index": 1}\n']
)
def test_what_is_no_index_of_this_version_is_passed_over(layout, image, data):
    annotations = {"io.omniload.index.layer": image.layers[0].digest}
    push_artifact(layout, image.digest, INDEX_TYPE, data, annotations)

    assert shared(layout, image, any_pusher=True).find(*layer_and_id(image)) is None


def test_the_index_itself_is_right(image, index):
    assert check_index(index, *layer_and_id(image)) is index
    empty = replace(index, blocks_B=np.zeros(0, index.blocks_B.dtype), entries=(), stream_bytes=0)
    assert check_index(empty, *layer_and_id(image)) is empty


@pytest.mark.parametrize("error", [UnavailableError("gone"), IntegrityError("forged"), OSError(5)])
def test_a_registry_without_referrers_costs_a_warning(image, caplog, error):
    class Failing:
        location = "a registry"

        def referrers(self, *_):
            raise error

    with caplog.at_level(logging.WARNING, "omniload"):
        assert shared(Failing(), image, key=KEY).find(*layer_and_id(image)) is None

    assert "no indexes from a registry" in caplog.text


def test_where_nobody_is_believed_nobody_is_asked(image):
    class Silent:
        def referrers(self, *_):
            raise AssertionError("nobody should ask")

    assert shared(Silent(), image).find(*layer_and_id(image)) is None


def test_a_key_is_read_from_its_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert key_of(str(path)) == KEY

    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes; write 16"):
        key_of(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        key_of(str(tmp_path / "none"))
