"""A layout directory keeps the promises of an image store, and some of its own."""

import os
import threading

import orjson
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from snapshot.oci.image import open_store
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import MANIFEST_TYPE
from tests.support.snapshot.registries.contract import ImageStoreContract, a_manifest, push


@pytest.fixture
def store(tmp_path):
    return OciLayout.create(tmp_path / "layout")


class TestOciLayout(ImageStoreContract):
    pass


def test_a_blob_altered_on_disk_is_refused_whole_though_its_range_cannot_tell(store, tmp_path):
    blob = push(store, b"0123456789")
    path = tmp_path / "layout/blobs" / blob.digest.replace(":", "/")
    path.write_bytes(b"0123x56789")

    with pytest.raises(IntegrityError, match="has altered it"):
        list(store.blob_chunks(blob))

    assert store.blob_range(blob.digest, 0, 10) == b"0123x56789"


def test_a_manifest_altered_on_disk_is_refused(store, tmp_path):
    digest = store.push_manifest(a_manifest(store), MANIFEST_TYPE, "v")
    path = tmp_path / "layout/blobs" / digest.replace(":", "/")
    path.write_bytes(path.read_bytes().replace(b"layer", b"l4yer"))

    with pytest.raises(IntegrityError, match="have digest"):
        store.manifest("v")


def test_a_folder_that_is_no_layout_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(ConfigError, match="no OCI layout"):
        OciLayout.create(tmp_path)


def test_a_layout_of_another_version_is_refused(store, tmp_path):
    (tmp_path / "layout/oci-layout").write_text('{"imageLayoutVersion": "9.0"}')

    with pytest.raises(ConfigError, match=r"version '9.0'"):
        OciLayout(tmp_path / "layout")


def test_a_digest_cannot_leave_the_layout(store):
    with pytest.raises(ValueError, match="digest"):
        store.blob_range("sha256:../../../etc/passwd", 0, 1)


def test_writers_at_once_lose_no_tag(store, tmp_path):
    data = a_manifest(store)
    writers = [
        threading.Thread(
            target=OciLayout(tmp_path / "layout").push_manifest, args=(data, MANIFEST_TYPE, f"v{i}")
        )
        for i in range(16)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert sorted(store.tags()) == sorted(f"v{i}" for i in range(16))


def test_a_layout_is_opened_by_its_only_tag_or_by_a_named_one(store, tmp_path):
    where = f"oci:{tmp_path / 'layout'}"
    store.push_manifest(a_manifest(store), MANIFEST_TYPE, "one")

    assert open_store(where)[1] == "one"

    store.push_manifest(a_manifest(store), MANIFEST_TYPE, "two")
    assert open_store(f"{where}:two")[1] == "two"
    with pytest.raises(ConfigError, match="name one as"):
        open_store(where)


def test_the_layout_written_is_what_the_specification_says(store, tmp_path):
    store.push_manifest(a_manifest(store), MANIFEST_TYPE, "v")

    index = orjson.loads((tmp_path / "layout/index.json").read_bytes())

    assert index["schemaVersion"] == 2
    assert index["manifests"][0]["annotations"] == {"org.opencontainers.image.ref.name": "v"}
    assert index["manifests"][0]["mediaType"] == MANIFEST_TYPE


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_is_told_and_not_waited_for(store, tmp_path, make):
    digest = store.push_manifest(a_manifest(store), MANIFEST_TYPE, "v")
    root = tmp_path / "layout"
    blob = root / "blobs" / digest.replace(":", "/")

    def replaced(path):
        path.unlink()
        make(path)

    replaced(blob)
    for call in (lambda: store.manifest("v"), lambda: store.blob_range(digest, 0, 1)):
        with pytest.raises(IntegrityError, match=f"blob {digest} is a"):
            call()
    replaced(root / "index.json")
    with pytest.raises(IntegrityError, match=r"not an index\.json of a layout"):
        store.manifest("v")
    replaced(root / "oci-layout")
    with pytest.raises(ConfigError, match=r"no OCI layout: .* is a"):
        OciLayout(root)


def test_an_index_of_absurd_size_is_refused_before_it_is_held(store, tmp_path):
    os.truncate(tmp_path / "layout/index.json", 3 << 30)

    with pytest.raises(IntegrityError, match="holds 3221225472 bytes"):
        store.manifest("v")
