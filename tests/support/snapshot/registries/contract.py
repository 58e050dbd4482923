"""The promises of every image store; a new store adds a fixture named ``store`` that starts empty."""

import io

import orjson
import pytest

from omniload.base.errors import IntegrityError
from snapshot.oci.digest import digest_of
from snapshot.oci.manifest import INDEX_TYPE, MANIFEST_TYPE, Descriptor

__all__ = ["ImageStoreContract", "a_manifest", "descriptor_of", "push"]

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"


def descriptor_of(data, media_type=LAYER, **changes):
    return Descriptor(media_type=media_type, digest=digest_of(data), size=len(data), **changes)


def push(store, data, media_type=LAYER):
    blob = descriptor_of(data, media_type)
    store.push_blob(blob, lambda: io.BytesIO(data))
    return blob


def a_manifest(store, layers=(b"layer",), **changes):
    """Push blobs, and return the bytes of a manifest that lists them."""
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": push(store, orjson.dumps(config), CONFIG).model_dump(
            by_alias=True, exclude_none=True
        ),
        "layers": [push(store, d).model_dump(by_alias=True, exclude_none=True) for d in layers],
        **changes,
    }
    return orjson.dumps(value)


class ImageStoreContract:
    def test_a_blob_reads_back_whole_and_by_any_range(self, store):
        data = bytes(range(256)) * 9000
        blob = push(store, data)

        assert b"".join(store.blob_chunks(blob)) == data
        assert store.blob_range(blob.digest, 0, len(data)) == data
        assert store.blob_range(blob.digest, 300, 7) == data[300:307]
        assert store.blob_range(blob.digest, len(data) - 1, 1) == data[-1:]
        assert store.blob_range(blob.digest, 5, 0) == b""

    @pytest.mark.parametrize("offset", [95, 100, 1000])
    def test_a_range_past_the_end_is_an_integrity_error_not_a_short_answer(self, store, offset):
        blob = push(store, bytes(100))

        with pytest.raises(IntegrityError):
            store.blob_range(blob.digest, offset, 10)

    def test_what_is_not_there_is_not_found(self, store):
        absent = descriptor_of(b"never pushed")

        assert not store.has_blob(absent.digest)
        with pytest.raises(FileNotFoundError):
            store.blob_range(absent.digest, 0, 1)
        with pytest.raises(FileNotFoundError):
            list(store.blob_chunks(absent))
        for name in ("no-such-tag", absent.digest):
            with pytest.raises(FileNotFoundError):
                store.manifest(name)

    def test_a_blob_of_another_size_than_its_descriptor_says_is_refused_at_the_end(self, store):
        blob = push(store, b"0123456789")

        for size in (9, 11):
            with pytest.raises(IntegrityError):
                list(store.blob_chunks(blob.model_copy(update={"size": size})))

    def test_a_blob_is_pushed_once_and_again_without_harm(self, store):
        first, again = push(store, b"same"), push(store, b"same")

        assert first == again
        assert store.has_blob(first.digest)

    def test_a_blob_that_is_not_what_its_descriptor_says_is_not_stored(self, store):
        blob = descriptor_of(b"promised")

        with pytest.raises(IntegrityError):
            store.push_blob(blob, lambda: io.BytesIO(b"different"))

        assert not store.has_blob(blob.digest)

    def test_a_manifest_is_found_by_tag_and_by_digest(self, store):
        data = a_manifest(store)

        digest = store.push_manifest(data, MANIFEST_TYPE, "v1")

        assert digest == digest_of(data)
        assert store.manifest("v1") == store.manifest(digest)
        assert store.manifest("v1").data == data
        assert store.manifest("v1").media_type == MANIFEST_TYPE

    def test_a_tag_moves_and_the_old_manifest_stays(self, store):
        old = store.push_manifest(a_manifest(store, (b"old",)), MANIFEST_TYPE, "v")

        new = store.push_manifest(a_manifest(store, (b"new",)), MANIFEST_TYPE, "v")

        assert store.manifest("v").digest == new
        assert store.manifest(old).digest == old

    def test_an_index_is_stored_as_one(self, store):
        data = a_manifest(store)
        store.push_manifest(data, MANIFEST_TYPE, "v1")
        inner = descriptor_of(data, MANIFEST_TYPE).model_dump(by_alias=True, exclude_none=True)
        index = orjson.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [inner]})

        store.push_manifest(index, INDEX_TYPE, "many")

        assert store.manifest("many").data == index
        assert store.manifest("many").media_type == INDEX_TYPE
