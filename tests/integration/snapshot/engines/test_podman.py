"""Podman starts real containers from a layer store: it pulls names, and reads what it touches."""

import base64
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sysconfig
from pathlib import Path

import pytest

from benchmarks.startup.place import Relay
from snapshot.image.trace.store import TraceStore
from snapshot.oci.image import open_store
from tests.support.snapshot.engine_images import push_config, push_python_image
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image
from tests.support.snapshot.podman import MountedStore, Podman
from tests.support.snapshot.registries.registry import needs, running_registry

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
NUMPY = ("python", "-c", "import numpy; print(numpy.arange(5).sum())")


class Place:
    """A registry behind a link that counts, and an image in it."""

    def __init__(self, address, relay, relayed):
        self.relay, self.address = relay, f"127.0.0.1:{relayed}"
        self.reference = f"{self.address}/a/python:v"
        self.store, _ = open_store(f"{address}/a/python:v")
        self.image = push_python_image(self.store, "v")
        self.layers = list(zip(self.image.layers, self.image.config.rootfs.diff_ids, strict=True))
        self.size_bytes = sum(layer.size for layer in self.image.layers)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    needs("podman", "runc", "docker-registry")
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    with running_registry(tmp_path_factory.mktemp("registry")) as address:
        relay = Relay(int(address.rpartition(":")[2]), 1e12, 0.0)
        with relay.running() as relayed:
            place = Place(address, relay, relayed)
            yield place
            place.store.close()


@pytest.fixture
def engines():
    """Make engines; each is emptied at the end, while what it reads from is still mounted."""
    made = []

    def make(store=None):
        made.append(Podman(store))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def counted(place, call):
    """Return what a call returns, and the bytes the registry sent meanwhile."""
    before = place.relay.bytes_back
    result = call()
    return result, place.relay.bytes_back - before


def waits_of(store):
    return int(re.findall(r"(\d+) waits", store.logged())[-1])


def test_a_pull_brings_names_and_a_container_what_it_touches(place, engines, tmp_path):
    with MountedStore(tmp_path, tmp_path / "cache") as store:
        podman = engines(store.root)

        _, pulled = counted(place, lambda: podman.pull(place.reference))
        said, run = counted(place, lambda: podman.run(place.reference, *NUMPY))
        again, more = counted(place, lambda: podman.run(place.reference, *NUMPY))
        script = (
            "cat kept old/*; ls -d /tmp/.keep gone old/hidden; echo $GREETING >/data/made; cat made"
        )
        told = podman.run(place.reference, "sh", "-c", script, check=False)
        _, plain = counted(place, lambda: engines().pull(place.reference))

        assert (said, again) == ("10\n", "10\n")
        assert told.split() == ["lower", "upper", "hello"], podman.errors
        assert plain > place.size_bytes
        # Manifest, configuration and the tables of contents of two layers.
        assert pulled < plain / 50
        assert run < plain / 2
        assert more < run / 10
        assert "layer store" not in podman.errors.lower()
        podman("rmi", "-f", place.reference)
        assert not list((tmp_path / "cache/layer-uses").rglob("*.json"))
    assert "defect" not in store.logged()


@pytest.mark.soak  # 10 s of a processor: test_containerd has what a first start touched come first too
def test_what_the_first_start_touched_comes_first_on_another_node(place, engines, tmp_path):
    with MountedStore(tmp_path / "first", tmp_path / "cache") as first:
        podman = engines(first.root)
        podman.pull(place.reference)
        podman.run(place.reference, *NUMPY)
        podman.close()
    trace = TraceStore(tmp_path / "cache/traces").get(place.image.digest, ("/bin/sh",))
    shutil.copytree(tmp_path / "cache/traces", tmp_path / "other/traces")

    with MountedStore(tmp_path / "second", tmp_path / "other") as second:
        podman = engines(second.root)
        podman.pull(place.reference)
        assert podman.run(place.reference, *NUMPY) == "10\n"
        podman.close()

    paths = {touch.path for touch in trace.touches}
    assert any(path.endswith(f"_multiarray_umath{SUFFIX}") for path in paths)
    assert "data/cold" not in paths
    hot = re.search(r"(\d+) of (\d+) hot blocks are on their way", second.logged())
    assert int(hot[1]) == int(hot[2]) > 50
    assert "hot blocks" not in first.logged()
    assert waits_of(second) < waits_of(first)


def test_an_image_in_use_outlives_the_process_that_shows_it_though_its_tag_has_moved(
    place, engines, tmp_path
):
    reference = f"{place.address}/a/python:moving"
    push_config(place.store, "moving", place.layers)
    with MountedStore(tmp_path, tmp_path / "cache", "window=0") as store:
        podman = engines(store.root)
        podman.pull(reference)
        assert podman.run(reference, "cat", "/data/kept") == "lower\n"
        tar = a_tar(a_member("other", b"new"))
        an_image(place.store, [(a_layer(place.store, tar, "tar"), tar)], "moving")

        store.killed_and_mounted_anew()

        assert podman.run(reference, "cat", "/data/kept", "/data/old/new") == "lower\nupper\n"
        podman.close()


def test_what_cannot_be_read_in_parts_the_engine_pulls_by_itself(place, engines, tmp_path):
    """The lower layer is ours, the upper one plain: the engine lays one over the other."""
    tar = a_tar(a_member("data/kept", b"plain\n"), a_member("data/.wh.old"))
    layers = [*place.layers, (a_layer(place.store, tar, "tar"), place.image.digest)]
    layers[-1] = (layers[-1][0], layers[-1][0].digest)
    push_config(place.store, "mixed", layers)
    reference = f"{place.address}/a/python:mixed"

    with MountedStore(tmp_path, tmp_path / "cache") as store:
        podman = engines(store.root)
        _, pulled = counted(place, lambda: podman.pull(reference))
        told = podman.run(reference, "sh", "-c", "cat kept; echo *", check=False)
        podman.close()

    assert told == "plain\ncold kept\n", podman.errors
    assert pulled < place.size_bytes / 50
    assert "left to the engine" in store.logged()


def test_only_references_are_asked_for_and_only_of_registries_that_are_allowed(
    place, engines, tmp_path
):
    encoded = base64.b64encode(place.reference.encode())
    layer = place.image.layers[0].digest
    with MountedStore(tmp_path, tmp_path / "cache", "registry=other.example:5000") as store:
        names = [encoded, base64.b64encode(b"../../etc:v"), encoded + b"\n", b"%2e%2e", b"use"]
        for name in names:
            with pytest.raises(FileNotFoundError):
                os.stat(os.fsencode(store.root) + b"/" + name)  # noqa: PTH116 -- any bytes
        with pytest.raises(OSError, match=r"Read-only|not permitted"):
            (store.root / "made").mkdir()
        podman = engines(store.root)

        _, pulled = counted(place, lambda: podman.pull(place.reference))

        assert pulled > place.size_bytes  # by the engine alone
        assert podman.run(place.reference, *NUMPY) == "10\n"
        podman.close()
    with MountedStore(tmp_path, tmp_path / "cache") as store:
        with (store.root / encoded.decode() / layer / "blob").open("rb") as blob:
            assert f"sha256:{hashlib.file_digest(blob, 'sha256').hexdigest()}" == layer
        words = ["ls", f"{os.fsdecode(store.root)}/{encoded.decode()}/{layer}/diff"]
        done, asked = counted(
            place, lambda: subprocess.run(words, capture_output=True, user=65534, check=False)
        )
        assert done.returncode != 0
        assert asked == 0
        assert stat.S_IMODE(store.root.stat().st_mode) == 0o500
