"""Links that whoever writes into a local store puts there: nothing outside is read, made or removed."""

import errno
import os
from pathlib import Path

import fsspec
import pytest

from fusefs.mounts.lifecycle import mount
from fusefs.stores.local.store import LocalStore
from fusefs.stores.url import open_store
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.swapped_folder import Outside, may_fail

ROUNDS = 700


@pytest.fixture
def outside(tmp_path):
    return Outside(tmp_path)


def every_call(store, number):
    """Return calls of a store that reach into ``d``, with what each may find out about it."""

    def create():
        writer = store.create(f"d/object-{number}")
        writer.write(b"mine")
        writer.close()

    return (
        lambda: [entry.name for entry in store.listing("d")],
        lambda: store.read("d/f", 0, 6),
        lambda: bytes(store.read_large("d/f", 0, 6)),
        lambda: store.stat("d/victim").size_bytes,
        create,
        lambda: store.publish(f"d/file-{number}", b"mine"),
        lambda: store.make_directory(f"d/below/made-{number}"),
        lambda: store.rename(f"d/file-{number}", f"d/renamed-{number}"),
        lambda: store.rename("d/source", f"taken-{number}"),
        lambda: store.remove("d/victim"),
        lambda: store.remove_directory("d/below"),
    )


@pytest.mark.parametrize("walks", [False, True], ids=["openat2", "walk"])
def test_no_call_of_a_store_follows_a_folder_that_becomes_a_link(outside, walks):
    store, found = LocalStore(outside.store, walks=walks), []

    with outside.swapping() as swaps:
        for number in range(ROUNDS):
            for call in every_call(store, number):
                with may_fail():
                    found.append(call())

    assert swaps[0] > ROUNDS
    assert b"inside" in found
    assert b"SECRET" not in found
    assert not any("victim" in names for names in found if isinstance(names, list))
    assert outside.state() == outside.before


CALLS = {
    "list": os.listdir,
    "read": lambda folder: Path(folder, "f").read_bytes(),
    "stat": lambda folder: Path(folder, "victim").stat(),
    "create": lambda folder: Path(folder, "file").write_bytes(b"mine"),
    "mkdir": lambda folder: Path(folder, "made").mkdir(),
    "symlink": lambda folder: Path(folder, "link").symlink_to("f"),
    "chmod": lambda folder: Path(folder, "f").chmod(0o600),
    "rename": lambda folder: Path(folder, "source").rename(Path(folder, "taken")),
    "unlink": lambda folder: Path(folder, "victim").unlink(),
    "rmdir": lambda folder: Path(folder, "below").rmdir(),
}


@pytest.mark.fuse
@pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)
@pytest.mark.parametrize("bridge", ["device", "pyfuse3"])
def test_no_call_on_a_mount_follows_a_folder_that_became_a_link_since_the_kernel_saw_it(
    outside, tmp_path, bridge
):
    found, root = [], tmp_path / "mount"
    root.mkdir()
    for name in CALLS:
        (outside.store / name).mkdir()

    with mount(str(outside.store), root, {"bridge": bridge}):
        for name, call in CALLS.items():
            assert (root / name).is_dir()
            (outside.store / name).rmdir()
            outside.link(name)
            with may_fail():
                found.append(call(root / name))

    assert found == []
    assert outside.state() == outside.before


@pytest.mark.parametrize("scheme", ["", "file://", "fsspec+file://", "fsspec+local://"])
def test_a_link_in_a_store_is_neither_followed_nor_shown_nor_replaced(outside, scheme):
    outside.link("link")
    files = fsspec.filesystem("omnifs", store=f"{scheme}{outside.store}", skip_instance_cache=True)

    for call in (
        lambda: files.ls("link"),
        lambda: files.cat_file("link/f"),
        lambda: files.pipe_file("link/new", b"mine"),
        lambda: files.pipe_file("link", b"mine"),
        lambda: files.rm_file("link/victim"),
        lambda: files.rm_file("link"),
        lambda: files.mkdir("link/new"),
        lambda: files.mv("link/f", "taken"),
        lambda: files.mv("d/f", "link"),
    ):
        with pytest.raises(OSError, match="symbolic link of the store itself") as raised:
            call()
        assert raised.value.errno == errno.ELOOP
    assert files.ls("", detail=False) == ["d"]
    assert outside.state() == outside.before
    assert (outside.store / "link").is_symlink()


@pytest.mark.parametrize("name", [".omnifs", ".omnifs/new", ".omnifs/objects", ".omnifs/intents"])
def test_the_folders_of_fusefs_itself_may_not_be_links(outside, name):
    outside.link(name)
    files = StripedFiles(open_store(str(outside.store)))

    if name != ".omnifs/intents":  # of other stores
        with pytest.raises(OSError, match="symbolic link of the store itself"):
            files.write_file("big", bytes(3 << 20))
    else:
        files.write_file("big", bytes(3 << 20))
    files.close()

    assert outside.state() == outside.before


def test_a_pipe_in_a_store_is_refused_and_nobody_waits_for_it(outside):
    os.mkfifo(outside.store / "d/pipe")
    store = LocalStore(outside.store)

    assert [entry.name for entry in store.listing("d")] == ["f"]
    for call in (store.stat, lambda path: store.read(path, 0, 1)):
        with pytest.raises(PermissionError, match="neither file nor directory"):
            call("d/pipe")


def test_a_store_stays_the_directory_that_was_opened(outside, tmp_path):
    store = LocalStore(outside.store)
    outside.store.rename(tmp_path / "moved")
    outside.store.symlink_to(outside.folder)

    assert store.read("d/f", 0, 6) == b"inside"
    assert [entry.name for entry in store.listing("")] == ["d"]
