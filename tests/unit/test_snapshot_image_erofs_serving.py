"""Which way an image is shown: what was asked for, what the node can, what is whole."""

import logging
import os
from types import SimpleNamespace

import pytest

from omniload.base.errors import ConfigError
from snapshot.image import erofs_probe, erofs_serving
from snapshot.image.entries import Entry
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_cache import BlobCache
from snapshot.image.erofs_probe import why_no_erofs, why_no_filling
from snapshot.image.erofs_serving import chosen
from snapshot.image.tree import merge
from tests.support.erofs_builders import a_file, a_stream, an_index, filled

STREAM = a_stream(20_000)
FILES = (a_file("a", 9000, at=512),)
INDEX = an_index(FILES, STREAM)
TREE = merge([FILES])


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """A node that can do everything, unless a test says otherwise."""
    can = SimpleNamespace(erofs=None, filling=None, asked=[])

    def erofs(_):
        can.asked.append("erofs")
        return can.erofs

    def filling(_):
        can.asked.append("filling")
        return can.filling

    monkeypatch.setattr(erofs_serving, "why_no_erofs", erofs)
    monkeypatch.setattr(erofs_serving, "why_no_filling", filling)
    return can


def choose(through, cache, *, in_the_way=None, tree=TREE, index=INDEX):
    return chosen(through, tree, [index], cache, in_the_way=in_the_way)


def make_whole(cache):
    kept, layout = BlobCache(cache), blob_layout(FILES)
    filling = kept.begin(INDEX, layout)
    os.pwrite(filling.descriptor, filled(layout, STREAM), 0)
    kept.keep(filling)
    os.close(filling.descriptor)


def test_fuse_is_fuse_whatever_is_here_and_asks_nothing(tmp_path, node):
    make_whole(tmp_path)

    assert choose("fuse", tmp_path) is None
    assert node.asked == []


def test_auto_takes_the_kernel_for_what_is_whole(tmp_path, node):
    make_whole(tmp_path)

    image = choose("auto", tmp_path)

    assert image is not None
    assert image.is_complete
    assert node.asked == ["erofs"]


def test_auto_is_fuse_and_makes_no_folder_where_a_layer_is_missing(tmp_path, node, caplog):
    with caplog.at_level(logging.INFO):
        assert choose("auto", tmp_path) is None

    assert "not whole here" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert node.asked == []


def test_auto_is_fuse_where_the_kernel_cannot_and_says_why(tmp_path, node, caplog):
    make_whole(tmp_path)
    node.erofs = "kernel 5.10 has no EROFS"

    with caplog.at_level(logging.INFO):
        assert choose("auto", tmp_path) is None

    assert "kernel 5.10 has no EROFS" in caplog.text


def test_auto_is_fuse_where_the_disk_takes_no_metadata_and_says_why(
    tmp_path, node, caplog, monkeypatch
):
    make_whole(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlobCache, "metadata", full)
    with caplog.at_level(logging.INFO):
        assert choose("auto", tmp_path) is None

    assert "shown through FUSE: [Errno 28] No space left on device" in caplog.text
    with pytest.raises(ConfigError, match="No space left on device; ask for fuse or auto"):
        choose("erofs", tmp_path)


def test_auto_never_fills(tmp_path, node):
    make_whole(tmp_path)
    (blob,) = (tmp_path / "erofs/v2/layers").iterdir()
    blob.chmod(0o600)
    os.truncate(blob, 4096)

    assert choose("auto", tmp_path) is None
    assert "filling" not in node.asked


def test_erofs_is_what_is_not_whole_too(tmp_path, node):
    image = choose("erofs", tmp_path)

    assert image is not None
    assert not image.is_complete
    assert node.asked == ["erofs", "filling"]


@pytest.mark.parametrize("what", ["erofs", "filling"])
def test_erofs_is_refused_where_the_node_cannot_and_says_why(tmp_path, node, what):
    setattr(node, what, "the moon is wrong")

    with pytest.raises(ConfigError, match="by EROFS: the moon is wrong; ask for fuse or auto"):
        choose("erofs", tmp_path)


def test_a_whole_image_needs_no_filling(tmp_path, node):
    make_whole(tmp_path)
    node.filling = "no pre-content events"

    assert choose("erofs", tmp_path) is not None
    assert node.asked == ["erofs"]


@pytest.mark.parametrize("through", ["erofs", "auto"])
def test_what_only_fuse_can_do_decides(tmp_path, node, through):
    make_whole(tmp_path)

    if through == "auto":
        assert choose(through, tmp_path, in_the_way="'record' needs FUSE") is None
    else:
        with pytest.raises(ConfigError, match="'record' needs FUSE"):
            choose(through, tmp_path, in_the_way="'record' needs FUSE")
    assert node.asked == []


def test_an_image_that_erofs_cannot_hold_is_refused_or_shown_by_fuse(tmp_path):
    entries = (Entry(path="n", kind="block", device=(5000, 1)),)
    tree, index = merge([entries]), an_index(entries, STREAM)

    assert choose("auto", tmp_path, tree=tree, index=index) is None
    with pytest.raises(ConfigError, match="5000:1"):
        choose("erofs", tmp_path, tree=tree, index=index)


def test_who_is_not_root_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(erofs_probe.os, "geteuid", lambda: 1000)

    for why in (why_no_erofs(tmp_path), why_no_filling(tmp_path)):
        assert why == "user 1000 is not root, and only root mounts EROFS"


def test_a_kernel_without_erofs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(erofs_probe.os, "geteuid", lambda: 0)
    monkeypatch.setattr(erofs_probe.Path, "read_text", lambda *_, **__: "nodev\ttmpfs\n\text4\n")

    assert why_no_erofs(tmp_path) == f"kernel {os.uname().release} has no EROFS"


def test_a_process_namespace_of_its_own_does_not_fill(tmp_path, monkeypatch):
    monkeypatch.setattr(erofs_probe, "why_no_erofs", lambda _: None)
    monkeypatch.setattr(erofs_probe.os, "readlink", lambda _: "pid:[4026532000]")

    assert "process namespace of its own (pid:[4026532000])" in why_no_filling(tmp_path)


def test_a_kernel_without_the_events_is_named(tmp_path, monkeypatch):
    def too_old():
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(erofs_probe, "why_no_erofs", lambda _: None)
    monkeypatch.setattr(erofs_probe.os, "readlink", lambda _: "pid:[4026531836]")
    monkeypatch.setattr(erofs_probe, "PreContent", too_old)

    assert "gives no pre-content events (6.14 can)" in why_no_filling(tmp_path)


def test_a_file_system_without_the_events_is_named(tmp_path, monkeypatch):
    class Group:
        closed = False

        def mark(self, _):
            raise OSError(95, "Operation not supported")

        def close(self):
            Group.closed = True

    monkeypatch.setattr(erofs_probe, "why_no_erofs", lambda _: None)
    monkeypatch.setattr(erofs_probe.os, "readlink", lambda _: "pid:[4026531836]")
    monkeypatch.setattr(erofs_probe, "PreContent", Group)

    why = why_no_filling(tmp_path)

    assert f"the file system of {str(tmp_path)!r} gives no pre-content events" in why
    assert Group.closed
    assert list(tmp_path.iterdir()) == []
