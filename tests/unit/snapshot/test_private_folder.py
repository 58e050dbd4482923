"""What a node keeps is for its user alone: blocks, indexes, traces, environments."""

import os
import stat

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from snapshot.engines.podman.uses import LayerUses
from snapshot.env.node.cache import SHARED, NodeCache
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BLOCK, Entry, LayerIndex
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.mount.daemon import mount_settings
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import Touch, trace_of
from snapshot.oci.digest import digest_of
from snapshot.oci.reference import Reference
from snapshot.private_folder import is_own_folder, private_folder

NOBODY = 65534
INDEX = LayerIndex(
    blob_digest=digest_of(b"stream"),
    blob_bytes=6,
    format="tar",
    stream_bytes=6,
    diff_id=digest_of(b"stream"),
    blocks_B=np.array(
        [(0, 6, 6, 0, -1, 0, b"", bytes.fromhex(digest_of(b"stream").removeprefix("sha256:")))],
        BLOCK,
    ),
    entries=(Entry(path="", kind="directory", mode=0o755),),
)
TRACE = trace_of(digest_of(b"image"), ("sh",), [Touch(1, "f", 0, 10)])


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


KEPT = {
    "blocks": lambda folder: BlockStore(folder / "blocks", 1 << 20).put_all(
        {digest_of(b"x"): b"x"}
    ),
    "indexes": lambda folder: IndexCache(folder / "indexes").put(INDEX),
    "traces": lambda folder: TraceStore(folder / "traces").add(TRACE),
    "layer-uses": lambda folder: LayerUses(folder / "layer-uses", "/m").add(
        Reference.parse("r.example/a:v"), digest_of(b"l"), digest_of(b"i")
    ),
    "environments": NodeCache,
}


@pytest.mark.parametrize("kept", KEPT)
def test_others_reach_no_file_that_a_node_keeps(tmp_path, kept):
    tmp_path.chmod(0o755)
    umask = os.umask(0o022)
    try:
        KEPT[kept](tmp_path)
    finally:
        os.umask(umask)

    def is_closed(path):
        inside = (path, *path.parents)
        return any(mode(each) == 0o700 for each in inside[: inside.index(tmp_path)])

    kept_there = list(tmp_path.rglob("*"))
    assert any(is_closed(path) for path in kept_there)
    assert [path for path in kept_there if not path.is_dir() and not is_closed(path)] == []


def test_a_folder_that_was_open_is_closed_and_that_is_said(tmp_path, caplog):
    (tmp_path / "it").mkdir(mode=0o755)
    (tmp_path / "it").chmod(0o755)

    private_folder(tmp_path / "it")
    private_folder(tmp_path / "it")

    assert mode(tmp_path / "it") == 0o700
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path / 'it'} was open to others (055); it is 0700 now"
    ]


def test_folders_above_are_left_as_they_are(tmp_path):
    tmp_path.chmod(0o755)

    private_folder(tmp_path / "a/b")

    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "a/b") == 0o700


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "it").write_text("")

    with pytest.raises(ConfigError, match="is no folder"):
        private_folder(tmp_path / "it")


def test_a_folder_of_another_user_is_refused_and_nothing_in_it_believed(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("OTHER USER NOT TESTED: nobody can be become; run as root")
    cache = IndexCache(tmp_path / "indexes")
    index = INDEX
    cache.put(index)
    assert cache.get(index.blob_digest) is not None
    os.chown(tmp_path / "indexes", NOBODY, NOBODY)

    assert not is_own_folder(tmp_path / "indexes")
    assert cache.get(index.blob_digest) is None
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, not to user 0"):
        cache.put(index)


def test_a_node_cache_is_shared_where_its_owner_says_so(tmp_path):
    (tmp_path / SHARED).touch()
    umask = os.umask(0o022)
    try:
        NodeCache(tmp_path)
    finally:
        os.umask(umask)

    assert {mode(tmp_path / name) for name in ("trees", "partial", "locks")} == {0o755}


def test_a_user_without_a_home_is_asked_to_name_a_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)

    with pytest.raises(
        ConfigError, match=r"user \d+ has no home .*; name one with -o cache=FOLDER"
    ):
        mount_settings("oci:folder", "/mnt", ())
    assert mount_settings("oci:folder", "/mnt", ("cache=/nvme",)).cache == "/nvme"
