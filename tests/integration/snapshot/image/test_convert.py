"""Conversion: the same image for everybody, and readable in parts."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile

import pytest
import zstandard
from click.testing import CliRunner

from omniload.base.errors import ConfigError, IntegrityError
from snapshot.commands.image import command
from snapshot.image.layer.convert import CHUNK_BYTES, convert_image, uncompressed
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.image.tree.merge import merge
from snapshot.oci.image import open_store, resolve
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import (
    BlobSource,
    a_layer,
    a_member,
    a_tar,
    an_image,
    read_stream,
    zran_friendly,
)
from tests.support.snapshot.registries.registry import needs, running_registry

BIG = zran_friendly(2_500_000)
TAR = a_tar(
    a_member("./", kind=tarfile.DIRTYPE, mode=0o750),
    a_member("d/", kind=tarfile.DIRTYPE, mode=0o1777, mtime=1_600_000_000),
    a_member("d/big", BIG, uid=7, gid=8, xattrs={"user.x": b"\x00\xff"}),
    a_member("d/empty"),
    a_member("d/hard", kind=tarfile.LNKTYPE, linkname="d/big"),
    a_member("d/link", kind=tarfile.SYMTYPE, linkname="big"),
    a_member("d/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
    a_member("é", b"x" * CHUNK_BYTES),
    a_member("z", b"last"),
)
UPPER = a_tar(a_member("d/.wh.empty"), a_member("z", b"later"))


@pytest.fixture
def store(tmp_path):
    return OciLayout.create(tmp_path / "layout")


@pytest.fixture
def image(store):
    layers = [(a_layer(store, gzip.compress(TAR)), TAR), (a_layer(store, UPPER, "tar"), UPPER)]
    return an_image(store, layers)


def tree_of(store, image, folder):
    indexes = index_image(store, image, IndexCache(folder))
    tree, source = merge([index.entries for index in indexes]), BlobSource(store)
    found = {}
    for path, node in tree.walk():
        data = bytearray(node.entry.size_bytes if node.entry.kind == "file" else 0)
        for extent in node.entry.extents:
            part = read_stream(indexes[node.layer], source, extent.stream_offset, extent.size_bytes)
            data[extent.file_offset : extent.file_offset + len(part)] = part
        named = (
            node.number,
            node.entry.kind,
            node.entry.mode,
            node.entry.uid,
            node.entry.gid,
            node.entry.mtime_ns,
        )
        found[path] = (*named, node.entry.device, node.entry.target, node.entry.xattrs, bytes(data))
    return found


def test_a_converted_image_has_the_same_tree_and_the_same_configuration(store, image, tmp_path):
    made = convert_image(store, image, store, "lazy")

    converted = resolve(store, "lazy")
    assert converted.digest == made.digest
    assert converted.config == image.config
    assert tree_of(store, converted, tmp_path / "a") == tree_of(store, image, tmp_path / "b")
    assert made.kept == ()


def test_a_converted_layer_uncompresses_to_the_very_same_tar(store, image):
    made = convert_image(store, image, store, "lazy")

    for layer, diff_id in zip(made.layers, image.config.rootfs.diff_ids, strict=True):
        blob = b"".join(store.blob_chunks(layer))
        tar = zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True).read()
        assert f"sha256:{hashlib.sha256(tar).hexdigest()}" == diff_id


def test_a_read_from_a_converted_layer_fetches_one_chunk(store, image, tmp_path):
    convert_image(store, image, store, "lazy")
    lower, _ = index_image(store, resolve(store, "lazy"), IndexCache(tmp_path / "i"))
    (extent, *_) = next(e for e in lower.entries if e.path == "d/big").extents
    source = BlobSource(store)

    assert read_stream(lower, source, extent.stream_offset + 5, 10) == BIG[5:15]

    ((_, size),) = source.fetched
    assert size < CHUNK_BYTES
    assert lower.format == "zstd:chunked"


def test_converting_again_keeps_what_is_converted_and_gives_the_same_image(store, image):
    first = convert_image(store, image, store, "lazy")

    again = convert_image(store, resolve(store, "lazy"), store, "again")

    assert again.digest == first.digest
    assert set(again.kept) == {layer.digest for layer in first.layers}


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (a_member(b"caf\xe9".decode("utf-8", "surrogateescape"), b"x"), "is no UTF-8"),
        (a_member("old", b"x", mtime=-5), "before 1970"),
    ],
)
def test_a_layer_that_a_table_cannot_hold_is_kept_as_it_is(store, member, reason, tmp_path, caplog):
    tar = a_tar(member, tar_format=tarfile.GNU_FORMAT)
    layer = a_layer(store, gzip.compress(tar))
    image = an_image(store, [(layer, tar)])

    with caplog.at_level("INFO", "omniload"):
        made = convert_image(store, image, store, "lazy")

    assert made.kept == (layer.digest,)
    assert reason in caplog.text
    assert tree_of(store, resolve(store, "lazy"), tmp_path / "i")


def test_a_layer_that_unpacks_to_something_else_is_not_converted(store):
    image = an_image(store, [(a_layer(store, gzip.compress(TAR)), b"another")])

    with pytest.raises(IntegrityError, match="the configuration says"):
        convert_image(store, image, store, "lazy")


@pytest.mark.parametrize(
    "blob", [b"no gzip", gzip.compress(TAR)[:-9]], ids=["no gzip", "cut short"]
)
def test_a_layer_that_does_not_decode_is_not_converted(store, blob):
    image = an_image(store, [(a_layer(store, blob), TAR)])

    with pytest.raises(IntegrityError, match="does not decode"):
        convert_image(store, image, store, "lazy")


def test_an_empty_layer_converts(store, tmp_path):
    tar = bytes(1024)
    image = an_image(store, [(a_layer(store, gzip.compress(tar)), tar)])

    convert_image(store, image, store, "lazy")

    assert list(tree_of(store, resolve(store, "lazy"), tmp_path / "i")) == [""]


def test_zstd_of_other_tools_is_read_whole():
    blob = zstandard.compress(TAR[:1000]) + zstandard.compress(TAR[1000:])

    assert uncompressed(io.BytesIO(blob), "zstd").read(len(TAR)) == TAR


def test_another_tool_reads_what_was_converted_and_pushed(image, store, tmp_path):
    """The whole way by the command line: layout, registry, skopeo."""
    needs("skopeo", "docker-registry")
    runner = CliRunner()
    with running_registry(tmp_path) as address:
        done = runner.invoke(
            command,
            ["convert", f"oci:{tmp_path / 'layout'}:v", f"{address}/a/lazy:v", "--json"],
            catch_exceptions=False,
        )
        numbers = json.loads(done.stdout)
        shown = runner.invoke(
            command,
            ["show", f"{address}/a/lazy:v", "--json"],
            catch_exceptions=False,
        )
        lazy, name = open_store(f"{address}/a/lazy:v")
        indexes = index_image(lazy, resolve(lazy, name), IndexCache(tmp_path / "c"))
        paths = {path for path, _ in merge([index.entries for index in indexes]).walk()}
        lazy.close()
        pulled = ("--src-tls-verify=false", "--dest-decompress", f"docker://{address}/a/lazy:v")
        copied = f"dir:{tmp_path / 'copied'}"
        subprocess.run(["skopeo", "copy", "-q", *pulled, copied], check=True)

    found = {path.name for path in (tmp_path / "copied").iterdir()}
    assert {diff_id.partition(":")[2] for diff_id in image.config.rootfs.diff_ids} < found
    described = json.loads(shown.stdout)
    assert described["digest"] == numbers["digest"]
    assert [layer["format"] for layer in described["layers"]] == ["zstd:chunked"] * 2
    assert described["command"] == ["/bin/true"]
    assert paths >= {"d/big", "d/hard", "z", "é"}
    assert "d/empty" not in paths


def test_the_lines_for_people_tell_layers(image, tmp_path):
    done = CliRunner().invoke(
        command, ["show", f"oci:{tmp_path / 'layout'}"], catch_exceptions=False
    )

    assert done.stdout.splitlines()[0] == f"{image.digest}  /bin/true"
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:]] == ["gzip", "tar"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "oci:none"], "no OCI layout"),
        (["show", "short:name"], "names no registry"),
        (["show", "LAYOUT", "--platform", "linux"], "is not OS/ARCHITECTURE"),
        (["show", "LAYOUT:gone"], "no such image"),
        (["convert", "LAYOUT", "r.example/a@sha256:" + "0" * 64], "name the new image by a tag"),
    ],
)
def test_what_cannot_be_shown_or_converted_is_a_configuration_error(
    image, tmp_path, arguments, message
):
    here = [word.replace("LAYOUT", f"oci:{tmp_path / 'layout'}") for word in arguments]

    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(command, here, catch_exceptions=False)


@pytest.mark.parametrize("plain", ["", "http://"])
def test_a_password_ahead_of_a_registry_is_refused_and_not_shown(plain):
    named = f"{plain}me:canary-{len(plain)}@host:5000/a"

    for given in ((named,), ("registry.example/a:v", (named.removesuffix("/a"),))):
        with pytest.raises(ConfigError, match=r"\*\*\*host:5000") as raised:
            open_store(given[0], mirrors=given[1] if given[1:] else ())
        assert "canary" not in str(raised.value)


def test_http_before_a_registry_means_without_tls():
    store, _ = open_store("http://registry.example/a:v", mirrors=("mirror.example",))
    other, _ = open_store("registry.example/a:v")

    assert store.location == "http://registry.example/a"
    assert other.location == "https://registry.example/a"
    with pytest.raises(ConfigError, match="reference"):
        open_store("registry.example/a:v", mirrors=("user@mirror/path",))
