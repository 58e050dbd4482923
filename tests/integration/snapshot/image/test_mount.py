"""An image mounted from a real registry: the same tree as unpacked, few bytes moved, right bytes or an error."""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.commands.image import command
from snapshot.image.trace.trace import decode_trace
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.gzip_writers import WRITERS, mixed_files, mixed_tar
from tests.support.snapshot.image_builders import a_layer, an_image
from tests.support.snapshot.registries.registry import needs, running_registry

pytestmark = pytest.mark.fuse


def run(*words):
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True)


def omniload(*words):
    done = CliRunner().invoke(command, [str(w) for w in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A registry with an image, gzip as ``plain`` and zstd:chunked as ``lazy``, and the image unpacked."""
    needs("umoci", "skopeo", "docker-registry")
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("images")
    tree = folder / "tree"
    (tree / "data").mkdir(parents=True)
    run("cp", "-r", Path(json.__file__).parent, tree / "json")
    for number in range(4):
        (tree / f"data/random{number}").write_bytes(os.urandom(3_000_000))
    (tree / "link").symlink_to("json/decoder.py")
    os.link(tree / "json/decoder.py", tree / "data/hard")
    os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
    os.setxattr(tree / "json/decoder.py", "user.note", b"\x00\xff")
    layout = folder / "layout"
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", f"{layout}:v")
    run("umoci", "insert", "--image", f"{layout}:v", tree, "/")
    run("umoci", "insert", "--image", f"{layout}:v", "--whiteout", "/data/random3")
    run("umoci", "unpack", "--image", f"{layout}:v", folder / "bundle")
    with running_registry(folder) as address:
        copy = ("skopeo", "copy", "-q", "--dest-tls-verify=false")
        run(*copy, f"oci:{layout}:v", f"docker://{address}/a/plain:v")
        omniload("convert", f"{address}/a/plain:v", f"{address}/a/lazy:v")
        yield folder, address


class Mounted:
    """An image mounted for the time of a ``with``."""

    def __init__(self, image, folder, **options):
        self.image, self.log, self.root = image, folder / "log", folder / "mnt"
        self.root.mkdir(exist_ok=True)
        self.options = {"cache": folder / "cache"} | options

    def __enter__(self):
        words = [word for key, value in self.options.items() for word in ("-o", f"{key}={value}")]
        shown = omniload("mount", self.image, self.root, *words, "--log", self.log)
        self.process = int(re.search(r"process (\d+)", shown)[1])
        return self.root

    def __exit__(self, *_):
        omniload("umount", self.root)
        os.waitpid(self.process, 0)  # our child: it has written what it recorded

    def moved(self):
        return json.loads(
            re.findall(r"bytes by tier: (\{.*\})", self.log.read_text())[-1].replace("'", '"')
        )


def described(root):
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            s = path.lstat()
            kept = (s.st_mode, s.st_uid, s.st_gid, s.st_rdev)
            one = (s.st_nlink, s.st_size, int(s.st_mtime)) if path.is_file() else ()
            target = str(path.readlink()) if path.is_symlink() else ""
            attributes = [(n, os.getxattr(path, n)) for n in os.listxattr(path)] if one else []
            data = hashlib.sha256(path.read_bytes()).hexdigest() if one else ""
            found[str(path.relative_to(root))] = (kept, one, target, attributes, data)
    return found


@pytest.mark.parametrize("form", ["plain", "lazy"])
def test_a_mounted_image_is_what_umoci_unpacks(place, tmp_path, form):
    folder, address = place

    with Mounted(f"{address}/a/{form}:v", tmp_path) as root:
        mounted = described(root)

    assert mounted == described(folder / "bundle/rootfs")
    assert "data/hard" in mounted
    assert "data/random3" not in mounted


@pytest.mark.parametrize(
    "writer", ["zlib 6", "gzip -1", "gzip -9", "pigz -6", "compress/gzip of Go", "members"]
)
def test_a_layer_of_any_gzip_is_mounted_and_every_file_is_right(tmp_path, writer):
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    store = OciLayout.create(tmp_path / "layout")
    tar = mixed_tar()
    an_image(store, [(a_layer(store, WRITERS[writer](tar)), tar)])

    with Mounted(f"oci:{tmp_path / 'layout'}:v", tmp_path) as root:
        found = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir()
        }

    assert found == {name: hashlib.sha256(data).hexdigest() for name, data in mixed_files().items()}


def test_a_program_runs_from_a_mount_and_little_more_is_moved_than_it_touches(place, tmp_path):
    _, address = place
    mount = Mounted(f"{address}/a/lazy:v", tmp_path, record=tmp_path / "trace")

    with mount as root:
        code = f"import sys; sys.path.insert(0, {str(root)!r}); import json; print(json.__file__)"
        shown = run(sys.executable, "-B", "-c", code).stdout

    trace = decode_trace((tmp_path / "trace").read_bytes(), name="it")
    touched = sum(touch.size_bytes for touch in trace.touches)
    assert shown.startswith(str(root))
    assert any(touch.path.startswith("json/") for touch in trace.touches)
    assert 0 < mount.moved()["registry"] <= 1.3 * touched


def test_a_second_start_prefetches_the_hot_blocks_and_finds_them_on_disk_later(place, tmp_path):
    folder, address = place
    image, trace = f"{address}/a/lazy:v", tmp_path / "trace"
    wanted = (folder / "bundle/rootfs/data/random1").read_bytes()
    trace.write_text('{"omniload_trace": a broken one costs nothing')
    with Mounted(image, tmp_path, record=trace) as root:
        assert (root / "data/random1").read_bytes() == wanted
    assert decode_trace(trace.read_bytes(), name="it").runs == 1
    (tmp_path / "other").mkdir()

    hot = Mounted(image, tmp_path / "other", trace=trace)
    with hot as root:
        assert (root / "data/random1").read_bytes() == wanted
    assert 2_900_000 < hot.moved()["registry"] < 3_100_000
    kept = Mounted(image, tmp_path / "other")
    with kept as root:
        assert (root / "data/random1").read_bytes() == wanted

    assert kept.moved()["registry"] == 0
    assert kept.moved()["disk"] >= 3_000_000


def test_a_block_altered_in_the_cache_is_fetched_again(place, tmp_path):
    folder, address = place
    image = f"{address}/a/lazy:v"
    wanted = (folder / "bundle/rootfs/data/random2").read_bytes()
    with Mounted(image, tmp_path) as root:
        assert (root / "data/random2").read_bytes() == wanted
    for path in (tmp_path / "cache/blocks").glob("??/*"):
        block = path.read_bytes()
        path.write_bytes(bytes([block[0] ^ 1]) + block[1:])

    again = Mounted(image, tmp_path)
    with again as root:
        assert (root / "data/random2").read_bytes() == wanted

    assert again.moved()["registry"] > 2_900_000


def test_a_blob_altered_in_the_registry_is_an_error_and_never_wrong_bytes(place, tmp_path):
    folder, address = place
    with Mounted(f"{address}/a/lazy:v", tmp_path, memory="1MiB", disk="1MiB") as root:
        size = (root / "data/random0").stat().st_size
        blobs = (folder / "registry/docker/registry/v2/blobs/sha256").glob("*/*/data")
        large = max(
            blobs, key=lambda path: path.stat().st_mtime_ns if path.stat().st_size > 8e6 else 0
        )
        good = large.read_bytes()
        place_of = good.index((folder / "tree/data/random0").read_bytes()[1_500_000:1_500_100])
        large.write_bytes(good[:place_of] + b"?" * 100 + good[place_of + 100 :])
        try:
            with pytest.raises(OSError, match="error") as caught:
                (root / "data/random0").read_bytes()
        finally:
            large.write_bytes(good)
        assert caught.value.errno == errno.EIO
        assert len((root / "data/random0").read_bytes()) == size


def test_an_image_cannot_be_written(place, tmp_path):
    _, address = place
    with Mounted(f"{address}/a/lazy:v", tmp_path) as root:
        for write in (
            lambda: (root / "new").write_text("x"),
            (root / "link").unlink,
            lambda: (root / "data/hard").write_bytes(b""),
        ):
            with pytest.raises(OSError, match="Read-only") as caught:
                write()
            assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        ("{address}/a/none:v", (), "no such image"),
        ("{address}/a/lazy:v", ("-o", "speed=9"), "there is no such option"),
        ("{address}/a/lazy:v", ("-o", "trace=/nowhere"), "no such file"),
    ],
)
def test_a_mount_that_cannot_be_says_why(place, tmp_path, image, options, message):
    _, address = place
    (tmp_path / "mnt").mkdir()
    words = ["mount", image.format(address=address), tmp_path / "mnt", *options]

    with pytest.raises(ConfigError, match=message):
        omniload(*words, "-o", f"cache={tmp_path / 'cache'}", "--log", tmp_path / "log")
