"""What other tools make is read as they read it: umoci, GNU tar, buildah."""

import base64
import hashlib
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.layer.tar import read_table
from snapshot.image.tree.merge import merge
from snapshot.oci.image import resolve
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import BlobSource, read_stream
from tests.support.snapshot.registries.registry import needs

RECORDED = Path(__file__).parents[3] / "support/zstd_chunked_by_buildah.json"
KIND_OF = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "character",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
}


def run(*command):
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def content(node, index, source):
    data = bytearray(node.entry.size_bytes)
    for extent in node.entry.extents:
        part = read_stream(index, source, extent.stream_offset, extent.size_bytes)
        data[extent.file_offset : extent.file_offset + extent.size_bytes] = part
    return bytes(data)


def as_read(store, image, cache):
    """Return every path of an image with all that can be compared."""
    indexes = index_image(store, image, cache)
    tree, source, found, first = merge([i.entries for i in indexes]), BlobSource(store), {}, {}
    for path, node in tree.walk():
        data = content(node, indexes[node.layer], source) if node.entry.kind == "file" else b""
        same_as = first.setdefault(node.number, path)
        found[path] = (
            node.entry.kind,
            node.entry.mode if node.entry.kind != "symlink" else 0,
            node.entry.uid,
            node.entry.gid,
            node.entry.mtime_ns // 10**9 if node.entry.kind == "file" else 0,
            node.entry.device,
            node.entry.target if node.entry.kind == "symlink" else "",
            node.entry.xattrs,
            hashlib.sha256(data).hexdigest(),
            node.links if node.entry.kind != "directory" else 0,
            same_as,
        )
    return found


def as_unpacked(root):
    found, first = {}, {}
    paths = [root, *sorted(Path(d) / n for d, ds, fs in os.walk(root) for n in (*ds, *fs))]
    for path in paths:
        name = "" if path == root else str(path.relative_to(root))
        s = path.lstat()
        kind = KIND_OF[stat.S_IFMT(s.st_mode)]
        device = (
            (os.major(s.st_rdev), os.minor(s.st_rdev)) if kind in {"character", "block"} else (0, 0)
        )
        attributes = {
            n: os.getxattr(path, n, follow_symlinks=False)
            for n in os.listxattr(path, follow_symlinks=False)
        }
        same_as = first.setdefault(s.st_ino, name)
        found[name] = (
            kind,
            stat.S_IMODE(s.st_mode) if kind != "symlink" else 0,
            s.st_uid,
            s.st_gid,
            int(s.st_mtime) if kind == "file" else 0,
            device,
            str(path.readlink()) if kind == "symlink" else "",
            tuple(sorted(attributes.items())),
            hashlib.sha256(path.read_bytes() if kind == "file" else b"").hexdigest(),
            s.st_nlink if kind != "directory" else 0,
            same_as,
        )
    return found


def first_names_aside(found):
    """Drop which name of a hard-linked file is the first: the walks differ in their order."""
    groups = {}
    for path, value in found.items():
        groups.setdefault(value[-1], []).append(path)
    return {path: (*value[:-1], tuple(sorted(groups[value[-1]]))) for path, value in found.items()}


def filled(folder, names, text):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"{text} {name}\n" * 50)
    return folder


def test_layers_merge_as_umoci_unpacks_them(tmp_path):
    needs("umoci")
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs root, to unpack owners and device nodes")
    base = filled(tmp_path / "base", ["kept", "replaced", "removed"], "base")
    filled(base / "dir", ["one", "two"], "base")
    filled(base / "opaque", ["hidden", "hidden too"], "base")
    os.link(base / "kept", base / "dir/linked")
    (base / "link").symlink_to("dir/one")
    (base / "café").mkdir(mode=0o700)
    (base / "café" / ("n" * 200)).write_bytes(os.urandom(200_000))
    os.mkfifo(base / "pipe")
    os.mknod(base / "null", 0o20666, os.makedev(1, 3))
    os.setxattr(base / "kept", "user.raw", b"\x00\xff\n=")
    os.chown(base / "replaced", 1000, 2000)
    (base / "dir/two").chmod(0o4711)
    upper = filled(tmp_path / "upper", ["replaced"], "upper")
    layout, image = tmp_path / "layout", f"{tmp_path / 'layout'}:v"
    insert = ("umoci", "insert", "--image", image)
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", image)
    run(*insert, base, "/")
    run(*insert, upper / "replaced", "/replaced")
    run(*insert, "--whiteout", "/removed")
    run(*insert, "--opaque", filled(tmp_path / "fresh", ["shown"], "fresh"), "/opaque")
    run(*insert, filled(tmp_path / "became", ["a file"], "x") / "a file", "/pipe")
    run("umoci", "unpack", "--image", image, tmp_path / "bundle")

    store = OciLayout(layout)
    read = as_read(store, resolve(store, "v"), IndexCache(tmp_path / "indexes"))

    unpacked = as_unpacked(tmp_path / "bundle/rootfs")
    assert first_names_aside(read) == first_names_aside(unpacked)
    assert {"opaque/shown", "café", "dir/linked", "null"} < set(read)
    assert not {"removed", "opaque/hidden"} & set(read)


@pytest.mark.parametrize("sparse", ["0.0", "0.1", "1.0", "gnu"])
def test_every_kind_of_sparse_file_that_gnu_tar_writes_is_read(tmp_path, sparse):
    with (tmp_path / "holes").open("wb") as file:
        for offset in (70_000, 300_000, 900_000):
            file.seek(offset)
            file.write(b"data at %d" % offset)
        file.truncate(2_000_000)
    (tmp_path / "after").write_text("after")
    form = ["--format=gnu"] if sparse == "gnu" else ["--format=pax", f"--sparse-version={sparse}"]
    run("tar", "-S", *form, "-C", tmp_path, "-cf", tmp_path / "it.tar", "holes", "after")

    with (tmp_path / "it.tar").open("rb") as file:
        holes, after = read_table(file, layer="it")

    raw = (tmp_path / "it.tar").read_bytes()
    assert len(raw) < 200_000
    data = bytearray(holes.size_bytes)
    for extent in holes.extents:
        part = raw[extent.stream_offset :][: extent.size_bytes]
        data[extent.file_offset : extent.file_offset + len(part)] = part
    assert (holes.path, bytes(data)) == ("holes", (tmp_path / "holes").read_bytes())
    assert raw[after.extents[0].stream_offset :][:5] == b"after"


def test_a_zstd_chunked_layer_that_buildah_wrote_is_read_through_its_table(tmp_path):
    recorded = json.loads(RECORDED.read_text())
    store = OciLayout.create(tmp_path / "layout")
    for digest, text in recorded["blobs"].items():
        path = tmp_path / "layout/blobs" / digest.replace(":", "/")
        path.write_bytes(base64.b64decode(text))
    image = resolve(store, recorded["manifest"])

    found = as_read(store, image, IndexCache(tmp_path / "indexes"))

    text = "".join(f"line {i % 3000} of a file that is cut into chunks\n" for i in range(9000))
    holes = b"start".ljust(50000, b"\0") + b"end"
    assert found["a/text"][8] == hashlib.sha256(text.encode()).hexdigest()
    assert found["a/holes"][8] == hashlib.sha256(holes).hexdigest()
    assert found["a/f"][7] == (("user.x", b"yy\xff"),)
    assert (found["a/h"][9], found["a/h"][10]) == (2, "a/f")
    assert found["a/dev"][5] == (1, 3)
    assert found["a/b"][1] == 0o1777
    assert found["a/s"][6] == "f"
    (index,) = index_image(store, image, IndexCache(tmp_path / "indexes"))
    assert index.format == "zstd:chunked"
    assert len(index.blocks_B) > 3


def test_a_tar_of_the_machines_own_python_reads_as_the_library_reads_it(tmp_path):
    folder = Path(json.__file__).parent
    run("tar", "--format=pax", "-C", folder.parent, "-cf", tmp_path / "it.tar", folder.name)

    with (tmp_path / "it.tar").open("rb") as file:
        found = {entry.path: entry for entry in read_table(file, layer="it")}

    with tarfile.open(tmp_path / "it.tar") as archive:
        members = {member.name: member for member in archive}
    assert set(found) == set(members)
    assert all(found[name].size_bytes == member.size for name, member in members.items())
