"""A pull of gzip layers whose indexes lie beside their image: what a second node moves, counted at the registry."""

import gzip

import pytest
from click.testing import CliRunner

from snapshot.engines.snapshotter_chain import LayerWanted, chain_ids
from snapshot.engines.snapshotter_images import RegistryImages
from snapshot.image.cli import command
from snapshot.image.mounting import ImageMount, shared_indexes
from snapshot.oci.opening import open_store, resolve
from tests.support.containerd_builders import Link
from tests.support.image_builders import a_layer, a_member, a_tar, an_image, zran_friendly
from tests.support.registry import running_registry

KEY = b"a key of the cluster that is long enough"
TARS = [a_tar(a_member(name, zran_friendly(6_000_000))) for name in ("one", "two")]


@pytest.fixture
def place(tmp_path):
    """An image of two gzip layers, its indexes beside it, behind a link that counts."""
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "other").write_bytes(KEY[::-1])
    with running_registry(tmp_path) as address:
        store, _ = open_store(f"{address}/a/b:v")
        layers = [a_layer(store, gzip.compress(tar)) for tar in TARS]
        image = an_image(store, list(zip(layers, TARS, strict=True)), "v")
        store.close()
        words = ("--key", str(tmp_path / "key"), "--cache", str(tmp_path / "first"))
        done = CliRunner().invoke(command, ["convert", "--index-only", f"{address}/a/b:v", *words])
        assert done.exit_code == 0, done.output
        link = Link(address)
        with link.running() as there:
            yield link, f"{there}/a/b:v", image


def pulled(folder, reference, image, **options):
    """Ask for every layer, as containerd does; return how many are lazy then."""
    template = ImageMount(image="", mountpoint="", cache=str(folder), **options)
    images = RegistryImages(
        folder / "indexes", shared=lambda found, store: shared_indexes(template, found, store)
    )
    names = chain_ids(image.config.rootfs.diff_ids)
    for number, layer in enumerate(image.layers):
        wanted = LayerWanted(
            target=names[number], reference=reference, layer=layer.digest, manifest=image.digest
        )
        _, lazy = images.find(wanted, number)
    return lazy


def test_a_second_node_reads_indexes_and_no_layer(place, tmp_path):
    link, reference, image = place
    whole = sum(layer.size for layer in image.layers)
    before = link.bytes_back

    assert pulled(tmp_path / "second", reference, image, index_key_file=str(tmp_path / "key")) == 2

    indexes = sum(path.stat().st_size for path in (tmp_path / "first").iterdir())
    moved = link.bytes_back - before
    assert moved < indexes + 50_000
    assert moved < whole / 4


@pytest.mark.parametrize("key", [None, "other"])
def test_without_the_key_every_layer_is_read_whole_and_still_lazy(place, tmp_path, key):
    link, reference, image = place
    before = link.bytes_back
    options = {} if key is None else {"index_key_file": str(tmp_path / key)}

    assert pulled(tmp_path / "third", reference, image, **options) == 2

    assert link.bytes_back - before > sum(layer.size for layer in image.layers)


def test_what_was_read_once_is_kept_by_the_node(place, tmp_path):
    link, reference, image = place
    store, _ = open_store(reference)
    assert resolve(store, "v").digest == image.digest
    store.close()
    key = str(tmp_path / "key")
    pulled(tmp_path / "second", reference, image, index_key_file=key)
    before = link.bytes_back

    assert pulled(tmp_path / "second", reference, image, index_key_file=key) == 2

    assert link.bytes_back - before < 10_000, "manifest and configuration alone"
