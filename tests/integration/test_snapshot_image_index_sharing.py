"""A gzip image whose index one node has pushed: what another node moves of it, counted at the registry."""

import gzip
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.image.cli import command
from snapshot.image.index_file import IndexCache
from snapshot.image.index_sharing import SharedIndexes
from snapshot.image.layers import index_image
from snapshot.image.loader import BlockLoader, RegistryTier
from snapshot.oci.opening import open_store, resolve
from tests.support.containerd_builders import Link
from tests.support.image_builders import a_layer, a_member, a_tar, an_image, zran_friendly
from tests.support.registry import running_registry

KEY = b"a key of the cluster that is long enough"
BIG = zran_friendly(9_000_000)
TAR = a_tar(a_member("big", BIG), a_member("small", b"x"))


@pytest.fixture
def link(tmp_path):
    """A registry that holds a gzip image, behind a link that counts."""
    with running_registry(tmp_path) as address:
        store, _ = open_store(f"{address}/a/b:v")
        an_image(store, [(a_layer(store, gzip.compress(TAR)), TAR)], "v")
        store.close()
        link = Link(address)
        with link.running() as place:
            yield link, f"{place}/a/b:v"


def invoke(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def first_bytes_on(folder, place, key):
    """Read the first bytes of the big file on a node of its own."""
    store, name = open_store(place)
    image = resolve(store, name)
    shared = SharedIndexes(store=store, image=image.digest, key=key)
    (index,) = index_image(store, image, IndexCache(folder), shared)
    loader = BlockLoader({"registry": RegistryTier(store)})
    (extent,) = next(e for e in index.entries if e.path == "big").extents
    (part, *_) = index.ranges(extent.stream_offset, 100)
    data = loader.block(index, part.block)[part.offset : part.offset + 100]
    loader.close()
    store.close()
    return image, data


def test_the_second_node_moves_only_what_it_touches_and_the_index(link, tmp_path):
    counted, place = link
    (tmp_path / "key").write_bytes(KEY)
    done = invoke(
        *("convert", "--index-only", place, "--key", tmp_path / "key"),
        *("--cache", tmp_path / "first", "--json"),
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["signed"] is True
    assert len(told["indexes"]) == 1
    before = counted.bytes_back

    image, data = first_bytes_on(tmp_path / "second", place, KEY)

    moved = counted.bytes_back - before
    index_bytes = sum(path.stat().st_size for path in (tmp_path / "first").iterdir())
    assert data == BIG[:100]
    assert moved < index_bytes + image.layers[0].size / 4
    before = counted.bytes_back
    first_bytes_on(tmp_path / "third", place, b"another key of another cluster")
    assert counted.bytes_back - before > image.layers[0].size


def test_an_index_is_pushed_again_and_changes_nothing(link, tmp_path):
    _, place = link

    one, two = (invoke("convert", "--index-only", place, "--cache", tmp_path / "c") for _ in "12")

    assert one.exit_code == two.exit_code == 0, (one.output, two.output)
    assert one.stdout == two.stdout
    assert "1 of 1 layers indexed" in one.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "IMAGE"), "give TARGET, or --index-only"),
        (("convert", "--index-only", "IMAGE", "other"), "give no TARGET beside --index-only"),
    ],
)
def test_either_a_target_is_named_or_only_the_index_is_made(words, message):
    done = invoke(*words)

    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.fuse
def test_a_mount_believes_an_index_signed_with_its_key_and_reads_no_layer_whole(link, tmp_path):
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    counted, place = link
    (tmp_path / "key").write_bytes(KEY)
    invoke("convert", "--index-only", place, "--key", tmp_path / "key", "--cache", tmp_path / "c")
    (tmp_path / "at").mkdir()
    before = counted.bytes_back
    options = f"cache={tmp_path / 'node'},index_key_file={tmp_path / 'key'}"

    done = invoke("mount", place, tmp_path / "at", "-o", options, "--log", tmp_path / "log")
    try:
        assert done.exit_code == 0, done.output
        with (tmp_path / "at/big").open("rb") as file:
            assert file.read(100) == BIG[:100]
    finally:
        invoke("umount", tmp_path / "at")

    assert "read whole" not in (tmp_path / "log").read_text()
    assert counted.bytes_back - before < len(gzip.compress(TAR)) * 0.8
