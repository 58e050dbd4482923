"""Images that the kernel shows by itself: filled while they are read, and alone once they are whole."""

import hashlib
import mmap
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.image.mounting import mount
from snapshot.image.precontent_kernel import unmount
from snapshot.image.trace import Touch, encode_trace, trace_of
from snapshot.oci.opening import open_store, resolve
from tests.support.erofs_builders import a_stream
from tests.support.erofs_mounts import LazyMount, drop_caches, needs_erofs, pushed, until
from tests.support.image_builders import a_member, zran_friendly

pytestmark = pytest.mark.fuse

BIG, OTHER = a_stream(5_000_000, seed=2), a_stream(3_000_000, seed=3)
TEXT = zran_friendly(2_000_000)
ECHO = Path("/bin/echo").read_bytes()


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("erofs-image")
    needs_erofs(folder)
    return pushed(
        folder,
        [
            a_member("big", BIG, mtime=1_600_000_000),
            a_member("bin/echo", ECHO, mode=0o755),
            a_member("hard", kind=tarfile.LNKTYPE, linkname="big"),
            a_member("gone", OTHER),
            a_member("link", kind=tarfile.SYMTYPE, linkname="text"),
        ],
        [a_member("text", TEXT, xattrs={"user.note": b"n"}), a_member(".wh.gone")],
    )


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def described(root):
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            s = path.lstat()
            regular = (s.st_nlink, s.st_size, s.st_mtime, digest(path)) if path.is_file() else ()
            found[str(path.relative_to(root))] = (s.st_mode, s.st_uid, s.st_gid, regular)
    return found


def test_a_lazy_mount_shows_what_fuse_shows(image, tmp_path):
    (tmp_path / "fuse").mkdir()
    with LazyMount(image, tmp_path / "fuse", through="fuse") as by_fuse:
        assert by_fuse.kind.startswith("fuse")
        expected = described(by_fuse.root)

    with LazyMount(image, tmp_path) as by_kernel:
        assert by_kernel.kind == "erofs"
        assert described(by_kernel.root) == expected
        assert os.getxattr(by_kernel.root / "text", "user.note") == b"n"

    assert "gone" not in expected
    assert expected["hard"] == expected["big"]


def test_only_what_is_read_is_fetched(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        assert len(list(mounted.root.iterdir())) == 5
        with (mounted.root / "big").open("rb") as file:
            file.seek(3_000_000)
            assert file.read(10) == BIG[3_000_000:3_000_010]

    assert "'registry': 0" not in mounted.log.read_text()
    moved = int(mounted.log.read_text().rpartition("'registry': ")[2].partition("}")[0])
    assert 0 < moved < len(BIG) / 2


def test_mapped_pages_and_programs_are_filled(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        with (mounted.root / "big").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            assert mapped[4_999_990:] == BIG[4_999_990:]
            assert mapped[1_234_567] == BIG[1_234_567]
            mapped.close()
        said = subprocess.run(
            [mounted.root / "bin/echo", "hello"], capture_output=True, text=True, check=True
        )
        assert said.stdout == "hello\n"


def test_many_readers_at_once_get_the_same_right_bytes(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        code = "import hashlib,sys;print(hashlib.sha256(open(sys.argv[1],'rb').read()).hexdigest())"
        words = [sys.executable, "-S", "-c", code, mounted.root / "big"]
        readers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        found = {reader.communicate(timeout=60)[0].strip() for reader in readers}

    assert found == {hashlib.sha256(BIG).hexdigest()}


def test_a_whole_image_needs_no_process_and_the_next_mount_none_at_all(image, tmp_path):
    with LazyMount(image, tmp_path, stream=True, bandwidth=0) as mounted:
        guard = mounted.guard()
        mounted.process.wait(60)
        assert not guard.is_running()
        assert mounted.kind == "erofs"
        drop_caches()
        assert digest(mounted.root / "big") == hashlib.sha256(BIG).hexdigest()
        assert len(mounted.blobs()) == 2
        assert mounted.blobs("filling") == []

    with LazyMount(image, tmp_path, through="auto") as again:
        assert again.process.wait(60) == 0
        assert again.kind == "erofs"
        assert digest(again.root / "text") == hashlib.sha256(TEXT).hexdigest()
        assert "'registry': 0" in again.log.read_text().splitlines()[-1]


def test_auto_is_fuse_while_anything_is_missing(image, tmp_path):
    with LazyMount(image, tmp_path, through="auto") as mounted:
        assert mounted.kind.startswith("fuse")
        assert digest(mounted.root / "text") == hashlib.sha256(TEXT).hexdigest()

    assert not (tmp_path / "cache/erofs").exists()
    assert "not whole here" in mounted.log.read_text()


def test_auto_shows_a_whole_image_to_nobody_whom_fuse_would_not_show_it(image, tmp_path):
    with LazyMount(image, tmp_path, stream=True, bandwidth=0) as mounted:
        mounted.process.wait(60)

    with LazyMount(image, tmp_path, through="auto", allow_other=False) as again:
        assert again.kind.startswith("fuse")
        refused = subprocess.run(
            ["ls", again.root], user=65534, capture_output=True, text=True, check=False
        )
        assert "Permission denied" in refused.stderr
        assert digest(again.root / "text") == hashlib.sha256(TEXT).hexdigest()
    assert "shown through FUSE: without 'allow_other' only its owner" in again.log.read_text()


def test_a_layer_that_was_removed_from_the_cache_is_filled_again(image, tmp_path):
    with LazyMount(image, tmp_path, stream=True, bandwidth=0) as mounted:
        mounted.process.wait(60)
    first, *rest = mounted.blobs()
    first.unlink()

    with LazyMount(image, tmp_path) as again:
        assert again.guard().is_running()
        assert digest(again.root / "big") == hashlib.sha256(BIG).hexdigest()
        assert digest(again.root / "text") == hashlib.sha256(TEXT).hexdigest()

    assert rest


def test_hot_ranges_of_a_trace_are_in_the_blob_before_they_are_read(image, tmp_path):
    trace = trace_of("sha256:" + "0" * 64, ("x",), [Touch(1, "big", 0, 2_500_000)])
    (tmp_path / "trace").write_bytes(encode_trace(trace))

    with LazyMount(image, tmp_path, trace=tmp_path / "trace") as mounted:
        blobs = mounted.blobs("filling")
        most = max(blobs, key=lambda blob: blob.stat().st_size)
        until(lambda: most.stat().st_blocks * 512 >= 2_400_000, "hot ranges are not filled")
        assert digest(mounted.root / "big") == hashlib.sha256(BIG).hexdigest()

    assert mounted.blobs("filling") == []


def test_two_mounts_of_one_image_fill_blobs_of_their_own(image, tmp_path):
    (tmp_path / "other").mkdir()
    with LazyMount(image, tmp_path) as one:
        with LazyMount(image, tmp_path / "other", cache=tmp_path / "cache") as other:
            assert len(one.blobs("filling")) == 4
            assert digest(other.root / "big") == hashlib.sha256(BIG).hexdigest()
        assert len(one.blobs("filling")) == 2
        assert digest(one.root / "big") == hashlib.sha256(BIG).hexdigest()


def test_a_mount_that_is_told_to_end_unmounts_itself(image, tmp_path):
    with LazyMount(image, tmp_path) as mounted:
        guard = mounted.guard()
        mounted.process.terminate()
        mounted.process.wait(30)

        assert not os.path.ismount(mounted.root)
        until(lambda: not guard.is_running(), "the guard stays without a reader")
    assert mounted.blobs("filling") == []


def test_a_copy_of_the_mount_elsewhere_is_served_until_it_is_gone(image, tmp_path):
    (tmp_path / "copy").mkdir()
    with LazyMount(image, tmp_path) as mounted:
        subprocess.run(["mount", "--bind", mounted.root, tmp_path / "copy"], check=True)
        unmount(str(mounted.root), lazily=False)

        assert digest(tmp_path / "copy/big") == hashlib.sha256(BIG).hexdigest()
        assert psutil.Process(mounted.process.pid).is_running()

        unmount(str(tmp_path / "copy"), lazily=False)
        assert mounted.process.wait(30) == 0


@pytest.mark.parametrize("options", [{"record": "trace"}, {"serve": "127.0.0.1:0"}])
def test_what_only_fuse_can_do_is_refused_and_auto_takes_fuse(image, tmp_path, options):
    told = {key: tmp_path / value if key == "record" else value for key, value in options.items()}
    if "serve" in told:
        pytest.importorskip("snapshot.image.peer_node")
        told["peers"] = "127.0.0.1:1"
        told["peer_name"] = "127.0.0.1:1"
    (wanted,) = options

    with pytest.raises(ConfigError, match=f"'{wanted}' needs FUSE; ask for fuse or auto"):
        mount(LazyMount(image, tmp_path, **told).settings)


def test_a_mount_point_that_is_not_there_leaves_nothing(image, tmp_path):
    mounted = LazyMount(image, tmp_path)
    mounted.root.rmdir()

    with pytest.raises((ConfigError, StateError), match="mnt"):
        mount(mounted.settings)

    assert not (tmp_path / "cache/erofs/v2/filling").exists() or not mounted.blobs("filling")


@pytest.mark.parametrize("through", ["erofs", "fuse"])
def test_a_place_where_an_image_is_shown_is_not_taken_again(image, tmp_path, through):
    spaced = tmp_path / "a place\twith\\all"
    spaced.mkdir()
    with LazyMount(image, spaced, through=through) as first:
        with pytest.raises(StateError, match="is a mount already; unmount it first"):
            mount(LazyMount(image, spaced, through="erofs").settings, log_path=str(first.log))

        assert digest(first.root / "text") == hashlib.sha256(TEXT).hexdigest()
        until(lambda: through == "fuse" or len(first.blobs("filling")) == 1, "text is whole")
        assert len(first.blobs("filling")) == (1 if through == "erofs" else 0), "text is whole"


def test_an_overlay_over_a_lazy_mount_is_a_root_that_can_be_written(image, tmp_path):
    for name in ("upper", "work", "root"):
        (tmp_path / name).mkdir()
    with LazyMount(image, tmp_path) as mounted:
        layers = f"lowerdir={mounted.root},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        subprocess.run(
            ["mount", "-t", "overlay", "-o", layers, "overlay", tmp_path / "root"], check=True
        )
        try:
            with (tmp_path / "root/big").open("r+b") as file:
                file.seek(1000)
                file.write(b"changed")
            changed = BIG[:1000] + b"changed" + BIG[1007:]
            assert (tmp_path / "root/big").read_bytes() == changed
            assert digest(mounted.root / "big") == hashlib.sha256(BIG).hexdigest()
        finally:
            unmount(str(tmp_path / "root"), lazily=False)


def test_the_kernel_reads_as_far_ahead_as_it_is_told(image, tmp_path):
    before = set(Path("/sys/class/bdi").glob("erofs-*"))

    with LazyMount(image, tmp_path, kernel_read_ahead="256KiB"):
        made = set(Path("/sys/class/bdi").glob("erofs-*")) - before
        assert {(one / "read_ahead_kb").read_text() for one in made} == {"256\n"}


def test_the_image_is_the_one_that_was_asked_for(image, tmp_path):
    store, tag = open_store(image)
    try:
        found = resolve(store, tag)
    finally:
        store.close()

    with LazyMount(image, tmp_path) as mounted:
        kept = {blob.name.partition(".")[0] for blob in mounted.blobs("filling")}

    assert kept == {layer.digest.removeprefix("sha256:") for layer in found.layers}
