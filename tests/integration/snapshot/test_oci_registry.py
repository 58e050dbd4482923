"""The client against Debian's registry, with images that Debian's tools made."""

import json
import subprocess
import uuid

import pytest

from omniload.base.errors import ConfigError, UnavailableError
from snapshot.oci.image import open_store, resolve
from snapshot.oci.layout import OciLayout
from snapshot.oci.registry import Registry
from snapshot.oci.store import MirroredStore, small_blob
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.snapshot.registries.contract import ImageStoreContract, push
from tests.support.snapshot.registries.registry import needs, running_registry


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def store(address):
    registry = Registry(Transport(address), f"contract/{uuid.uuid4().hex}")
    yield registry
    registry.close()


class TestRealRegistry(ImageStoreContract):
    pass


def test_a_registry_that_nobody_runs_is_told():
    nobody = Registry(Transport("127.0.0.1:9", RegistrySettings(attempts=1)), "a")
    with pytest.raises(UnavailableError, match="is the registry up"):
        nobody.manifest("v")


def test_an_image_that_skopeo_pushed_is_read_and_one_of_ours_is_read_by_skopeo(address, tmp_path):
    needs("skopeo", "umoci")
    rootfs = an_image(tmp_path / "made")
    target = f"{address}/skopeo/image"
    command = ["skopeo", "copy", "-q", "--dest-tls-verify=false", "--src-tls-verify=false"]
    subprocess.run([*command, f"oci:{rootfs}:v1", f"docker://{target}:v1"], check=True)

    store, name = open_store(f"{target}:v1")
    image = resolve(store, name)

    layout = OciLayout(rootfs)
    assert image.digest == resolve(layout, "v1").digest
    assert image.config.command == ("/bin/program", "--flag")
    for layer in image.layers:
        assert b"".join(store.blob_chunks(layer)) == b"".join(layout.blob_chunks(layer))

    copied = OciLayout.create(tmp_path / "copied")
    for blob in (image.manifest.config, *image.layers):
        data = small_blob(store, blob)
        push(copied, data, blob.media_type)
    stored = store.manifest(name)
    copied.push_manifest(stored.data, stored.media_type, "v1")
    found = subprocess.run(
        ["skopeo", "inspect", f"oci:{tmp_path / 'copied'}:v1"], capture_output=True, check=True
    )
    assert json.loads(found.stdout)["Digest"] == image.digest
    store.close()


def test_a_mirror_serves_blobs_and_the_origin_serves_when_the_mirror_does_not(address):
    origin = Registry(Transport(address), "mirrored/origin")
    near = Registry(Transport(address), "mirrored/near")
    gone = Registry(Transport("127.0.0.1:9", RegistrySettings(attempts=1)), "mirrored/gone")
    both, only = push(origin, b"on both"), push(origin, b"only at the origin")
    push(near, b"on both")
    mirrored = MirroredStore(origin, [gone, near])

    assert mirrored.blob_range(both.digest, 3, 4) == b"both"
    assert mirrored.blob_range(only.digest, 0, 4) == b"only"
    assert b"".join(mirrored.blob_chunks(only)) == b"only at the origin"
    with pytest.raises(FileNotFoundError):
        mirrored.manifest("no-such-tag")
    mirrored.close()


def test_an_unknown_image_is_a_configuration_error_that_names_it(address):
    store, name = open_store(f"{address}/no/such:tag")

    with pytest.raises(ConfigError, match=r"no/such: tag: no such image"):
        resolve(store, name)
    store.close()


def an_image(folder):
    """Make a layout with an image of one layer by umoci."""
    tree = folder.parent / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/program").write_text("#!/bin/sh\n")
    for command in (
        ["umoci", "init", "--layout", folder],
        ["umoci", "new", "--image", f"{folder}:v1"],
        ["umoci", "insert", "--rootless", "--image", f"{folder}:v1", tree, "/"],
        ["umoci", "config", "--image", f"{folder}:v1", "--config.cmd", "--flag"],
        ["umoci", "config", "--image", f"{folder}:v1", "--config.entrypoint", "/bin/program"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return folder
