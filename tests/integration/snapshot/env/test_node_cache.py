"""Trees of a node: whole or not there, and looked at before they are relied on."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.commands.env import command
from snapshot.env.format.entries import Kind
from snapshot.env.node.cache import (
    CACHE_VARIABLE,
    SHARED,
    NodeCache,
    default_cache,
    exclusively,
    prune_cache,
)
from snapshot.env.node.tree import Tree, TreeHead, boot_id, discard
from tests.support.snapshot.env_builders import a_restorer, contents, remake, saved


@pytest.fixture
def made(tmp_path):
    """A node cache with one tree."""
    environment, manifest, _ = saved(tmp_path)
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    return NodeCache(tmp_path / "cache"), manifest


def test_the_cache_lies_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache() == Path("/x/omniload/env")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "omniload" / "env"


def test_an_empty_cache_has_no_trees(tmp_path):
    assert NodeCache(tmp_path).tree("0" * 64) is None
    assert NodeCache(tmp_path).free_bytes() > 0


def test_a_tree_knows_its_head_without_its_tables(made):
    cache, manifest = made

    tree = cache.tree(manifest.head.key)

    assert tree.head == TreeHead.of(manifest)
    assert tree.head.used == [0, 1]
    assert tree.head.raw_bytes == manifest.raw_bytes
    assert tree.manifest == manifest
    assert tree.boot == boot_id()


def test_a_partial_tree_is_not_there_until_it_is_complete(made):
    cache, manifest = made
    data = (cache.tree(manifest.head.key).folder / "manifest").read_bytes()

    tree = cache.partial("1" * 64)
    assert cache.tree("1" * 64) is None
    (tree.folder / "manifest").write_bytes(data)
    tree = cache.complete("1" * 64, tree, manifest, data)

    assert cache.tree("1" * 64).folder == tree.folder
    assert not list((cache.folder / "partial").iterdir())


def test_what_a_dead_process_left_is_emptied_before_it_is_filled(tmp_path):
    cache = NodeCache(tmp_path)
    (cache.partial("k").folder / "left").write_text("x")

    assert list(cache.partial("k").folder.iterdir()) == []


def test_a_dropped_tree_is_gone_and_may_be_dropped_again(made):
    cache, manifest = made

    cache.drop(manifest.head.key)
    cache.drop(manifest.head.key)

    assert cache.tree(manifest.head.key) is None
    assert not list((cache.folder / "trees").iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("other"),
        lambda path: path.chmod(0o600) or os.utime(path, ns=(1, 1)),
    ],
    ids=["gone", "other bytes", "other time"],
)
def test_a_linked_tree_is_looked_at_and_an_unlinked_one_is_not(made, damage):
    cache, manifest = made
    tree = cache.tree(manifest.head.key)
    damage(tree.layer(1) / "base.py")

    assert tree.changed_files(digests=False) == ["base.py"]
    assert cache.tree(manifest.head.key) is not None
    tree.mark_linked()
    assert cache.tree(manifest.head.key) is None


def test_other_bytes_of_the_same_size_and_time_need_the_digests(made):
    cache, manifest = made
    tree = cache.tree(manifest.head.key)
    path = tree.layer(1) / "base.py"
    seen = path.stat()
    path.write_bytes(b"!" * seen.st_size)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    assert tree.changed_files(digests=False) == []
    assert tree.changed_files(digests=True) == ["base.py"]


@pytest.mark.parametrize("damage", [discard, lambda folder: folder.chmod(0o500)])
def test_a_tree_whose_target_itself_is_not_as_it_was_is_damaged(made, damage):
    cache, manifest = made
    damage(cache.tree(manifest.head.key).layer(1))

    (found,) = prune_cache(cache, unused_s=60.0, now_ns=time.time_ns(), verify=True)

    assert (found.outcome, found.fault) == ("damaged", "the folder of a target")
    assert cache.tree(manifest.head.key) is None


def test_a_damaged_manifest_of_a_tree_drops_it_when_it_is_needed(made):
    cache, manifest = made
    tree = cache.tree(manifest.head.key)
    (tree.folder / "manifest").write_bytes(b"damaged")
    tree.mark_linked()

    assert cache.tree(manifest.head.key) is None


def test_a_cache_that_anybody_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)

    with pytest.raises(ConfigError, match="may be written by"):
        NodeCache(tmp_path)


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_else_writes_into_a_cache_whatever_the_umask(tmp_path, shared):
    environment, manifest, _ = saved(tmp_path)
    before = os.umask(0)
    try:
        cache = NodeCache(tmp_path / "cache")
        if shared:
            (cache.folder / SHARED).touch(mode=0o644)
            for name in ("trees", "partial", "locks"):
                (cache.folder / name).rmdir()
        for form in ("copy", "link"):
            a_restorer(environment, tmp_path).restore(manifest.head.key, form)
    finally:
        os.umask(before)

    paths = [cache.folder, *cache.folder.rglob("*")]
    assert len(paths) > 10
    locks = cache.folder / "locks"
    open_to_others = {p for p in paths if not p.is_symlink() and p.stat().st_mode & 0o022}
    assert {path for path in open_to_others if path.parent != locks} == set()


def test_one_holder_at_a_time(tmp_path):
    order, entered, leave = [], threading.Event(), threading.Event()

    def first():
        with exclusively(tmp_path / "lock"):
            entered.set()
            leave.wait(30)
            order.append("first")

    def second():
        with exclusively(tmp_path / "lock"):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()

    assert order == ["first", "second"]


def test_a_lock_makes_the_folders_above_it(tmp_path):
    with exclusively(tmp_path / "a" / "b" / "lock"):
        assert (tmp_path / "a" / "b" / "lock").exists()


def test_layers_and_whiteouts_lie_beside_each_other():
    tree = Tree(Path("/c/trees/k"))

    assert str(tree.layer(1)) == "/c/trees/k/layers/1"
    assert str(tree.whiteouts(1)) == "/c/trees/k/whiteouts/1"


def rot(path):
    """Change a byte as a disk does: size and time stay."""
    seen, data = path.stat(), bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def a_rotted_file(restorer, key):
    tree = restorer.cache.tree(key)
    entry = next(e for e in tree.manifest.entries if e.kind is Kind.FILE and e.size_bytes)
    path = tree.layer(entry.target) / entry.path
    rot(path)
    return path


def test_a_damaged_head_is_made_again_from_the_manifest(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    restorer.restore(manifest.head.key, "copy")
    tree = restorer.cache.tree(manifest.head.key)
    head = tree.head
    (tree.folder / "head.json").write_text('{"key": 1, "used": [99]}')

    assert Tree(tree.folder).head == head


def test_all_trees_of_a_node_are_compared_and_the_damaged_removed(tmp_path, monkeypatch):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    key = manifest.head.key
    restorer.restore(key, "link")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    words = ["prune", "--verify"]
    sound = CliRunner().invoke(command, words)
    path = a_rotted_file(restorer, key)

    found = CliRunner().invoke(command, words)

    assert (sound.exit_code, "used" in sound.output) == (0, True)
    assert isinstance(found.exception, IntegrityError)
    assert "1 of 1 trees are damaged and removed; restore " in str(found.exception)
    assert path.name in found.output
    assert restorer.cache.tree(key) is None
    remake(environment, tmp_path)
    restorer.restore(key, "link")
    assert contents(environment) == held


@pytest.fixture
def every_file(monkeypatch):
    """A sample of all files: a busy machine reads only some of them in the usual time."""
    monkeypatch.setattr("snapshot.env.flow.restore._SAMPLE_S", 60.0)


def test_auto_samples_what_it_links_where_a_mount_cannot_be_had(tmp_path, monkeypatch, every_file):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    key = manifest.head.key
    restorer.restore(key, "link")
    remake(environment, tmp_path)
    a_rotted_file(restorer, key)
    monkeypatch.setattr("snapshot.env.flow.restore.os.geteuid", lambda: 0)

    def refused(*_):
        raise UnavailableError("no overlay")

    monkeypatch.setattr("snapshot.env.flow.restore.mount_overlay", refused)

    restored = restorer.restore(key, "auto")

    assert (restored.form, restored.stored_bytes > 0) == ("link", True)
    assert contents(environment) == held


@pytest.mark.parametrize("form", ["link", "copy"])
def test_a_rotted_file_is_not_given_out_but_fetched_again(tmp_path, form, caplog, every_file):
    environment, manifest, held = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    key = manifest.head.key
    restorer.restore(key, form)
    remake(environment, tmp_path)
    path = a_rotted_file(restorer, key)

    restored = restorer.restore(key, form)

    assert restored.stored_bytes > 0
    assert contents(environment) == held
    assert restorer.cache.tree(key).changed_files(digests=True) == []
    assert f"{path.name} in " in caplog.text
    assert "holds other bytes than were extracted" in caplog.text


def test_a_rotted_file_without_its_store_is_an_error_and_no_environment(tmp_path, every_file):
    environment, manifest, _ = saved(tmp_path)
    restorer = a_restorer(environment, tmp_path)
    key = manifest.head.key
    restorer.restore(key, "link")
    remake(environment, tmp_path)
    before = contents(environment)
    a_rotted_file(restorer, key)

    def away():
        raise UnavailableError("no answer")

    with pytest.raises(UnavailableError, match="no answer"):
        replace(restorer, opened=away).restore(key, "link")
    assert contents(environment) == before
