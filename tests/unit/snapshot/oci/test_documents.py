"""References, digests, manifests, configurations, challenges: what is read, and what is refused."""

import io
import os

import orjson
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from snapshot.image.layer.convert import convert_image
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_image
from snapshot.oci.auth import Credentials, credentials_of, parse_challenges, token_url
from snapshot.oci.digest import check_digest, digest_of, verified
from snapshot.oci.image import resolve
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Index,
    Manifest,
    Platform,
    compression_of,
    encode,
    parse_config,
    parse_manifest,
)
from snapshot.oci.reference import Reference
from tests.support.snapshot.image_builders import a_layer, a_member, a_tar, an_image
from tests.support.snapshot.registries.contract import a_manifest

DIGEST = "sha256:" + "ab" * 32


def a_descriptor(**changes):
    return {"mediaType": "application/x", "digest": DIGEST, "size": 3, **changes}


def document(**changes):
    value = {"schemaVersion": 2, "config": a_descriptor(), "layers": [a_descriptor()]}
    return orjson.dumps(value | changes)


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("host.example/a/b:v1", "host.example", "a/b", "v1", None),
        ("localhost/a", "localhost", "a", "latest", None),
        ("127.0.0.1:5000/a_b.c--d", "127.0.0.1:5000", "a_b.c--d", "latest", None),
        (f"h.example/a@{DIGEST}", "h.example", "a", None, DIGEST),
        (f"h.example/a:t@{DIGEST}", "h.example", "a", "t", DIGEST),
        ("[::1]:5000/a", "[::1]:5000", "a", "latest", None),
    ],
)
def test_a_reference_is_read(text, registry, repository, tag, digest):
    found = Reference.parse(text)

    assert (found.registry, found.repository) == (registry, repository)
    assert (found.tag, found.digest) == (tag, digest)
    assert found.name == (digest or tag)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ubuntu",
        "library/ubuntu:22.04",
        "h.example/",
        "h.example/A",
        "h.example/a:",
        "h.example/a:b:c",
        "h.example/a/../b",
        "h.example/a//b",
        "h.example/a@sha256:abc",
        "h.example/a@",
        "h.example/a@md5:00",
        "h.example/" + "a" * 256,
        "h.example/a:" + "t" * 129,
        "h.example/a:-t",
        "h.ex\nample/a",
        "h.example/a:t\n",
        "-h.example/a",
    ],
)
def test_what_is_no_reference_is_refused_with_the_form_to_write(text):
    with pytest.raises(ConfigError, match="write REGISTRY/REPOSITORY:TAG"):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["sha256:" + "A" * 64, "sha256:" + "0" * 63, "md5:0", "", "../x"])
def test_a_weak_or_malformed_digest_is_refused(text):
    with pytest.raises(ValueError, match="digest"):
        check_digest(text)


def test_bytes_are_compared_with_either_kind_of_digest():
    long = "sha512:" + __import__("hashlib").sha512(b"x").hexdigest()

    assert verified(b"x", digest_of(b"x"), name="it") == b"x"
    assert verified(b"x", long, name="it") == b"x"
    with pytest.raises(IntegrityError, match="it: 1 bytes have digest"):
        verified(b"y", long, name="it")


def test_a_manifest_is_read_and_unknown_keys_are_ignored():
    found = parse_manifest(document(future={"a": 1}), MANIFEST_TYPE, name="it")

    assert isinstance(found, Manifest)
    assert found.layers[0].digest == DIGEST


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemaVersion": 1}, "schemaVersion"),
        ({"layers": [a_descriptor(size=-1)]}, "size"),
        ({"layers": [a_descriptor(size=1 << 41)]}, "size"),
        ({"layers": [a_descriptor(digest="sha256:../x")]}, "digest"),
        ({"layers": [a_descriptor()] * 513}, "layers"),
        ({"config": None}, "config"),
        ({"manifests": []}, "both a manifest and an index"),
    ],
)
def test_a_manifest_that_breaks_the_format_is_an_integrity_error(changes, message):
    with pytest.raises(IntegrityError, match=message):
        parse_manifest(document(**changes), MANIFEST_TYPE, name="it")


def test_a_manifest_of_many_faults_tells_the_first_in_one_line():
    with pytest.raises(IntegrityError) as raised:
        parse_manifest(document(layers=[{}] * 500), MANIFEST_TYPE, name="it")

    assert str(raised.value).endswith("layers.0.mediaType: Field required, and 1,499 more faults")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"1", b" " * (5 << 20)])
def test_what_is_no_document_is_an_integrity_error(data):
    with pytest.raises(IntegrityError, match="it: "):
        parse_manifest(data, MANIFEST_TYPE, name="it")


def test_the_first_schema_of_docker_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="push the image again"):
        parse_manifest(b"{}", "application/vnd.docker.distribution.manifest.v1+json", name="it")


def an_index(*platforms):
    found = [
        a_descriptor(platform={"os": os, "architecture": arch, "variant": variant})
        for os, arch, variant in platforms
    ]
    data = orjson.dumps({"schemaVersion": 2, "manifests": found})
    return parse_manifest(data, INDEX_TYPE, name="it")


def test_the_first_manifest_of_the_platform_is_chosen():
    index = an_index(("linux", "arm", "v6"), ("linux", "arm", "v7"), ("linux", "amd64", None))

    for wanted, place in ((("amd64", None), 2), (("arm", "v7"), 1), (("arm", None), 0)):
        platform = Platform(os="linux", architecture=wanted[0], variant=wanted[1])
        assert index.manifest_for(platform) == index.manifests[place]


def test_a_platform_that_is_not_offered_is_a_configuration_error_that_lists_what_is():
    with pytest.raises(ConfigError, match=r"not made for linux/riscv64, only for .*linux/amd64"):
        an_index(("linux", "amd64", None)).manifest_for(
            Platform(os="linux", architecture="riscv64")
        )


@pytest.mark.parametrize(
    ("media_type", "compression"),
    [
        ("application/vnd.oci.image.layer.v1.tar", "tar"),
        ("application/vnd.oci.image.layer.v1.tar+gzip", "gzip"),
        ("application/vnd.oci.image.layer.v1.tar+zstd", "zstd"),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", "gzip"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "gzip"),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", "zstd"),
    ],
)
def test_a_layer_says_how_it_is_compressed(media_type, compression):
    assert compression_of(Descriptor(**a_descriptor(mediaType=media_type))) == compression


def test_an_artifact_is_no_layer():
    with pytest.raises(ConfigError, match="cannot be mounted"):
        compression_of(Descriptor(**a_descriptor()))


def test_a_configuration_tells_the_command_and_the_digests():
    value = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["a"], "Cmd": ["b"], "WorkingDir": "/w", "Env": None},
        "rootfs": {"type": "layers", "diff_ids": [DIGEST]},
    }

    found = parse_config(orjson.dumps(value), name="it")

    assert found.command == ("a", "b")
    assert found.config.working_dir == "/w"
    assert found.rootfs.diff_ids == (DIGEST,)
    with pytest.raises(IntegrityError, match="rootfs"):
        parse_config(b"{}", name="it")


def test_what_is_written_reads_back():
    index = Index(schema_version=2, manifests=(Descriptor(**a_descriptor(annotations={"a": "b"})),))

    assert parse_manifest(encode(index), INDEX_TYPE, name="it") == index


def test_an_image_whose_configuration_tells_of_other_layers_is_refused(tmp_path):
    store = OciLayout.create(tmp_path)
    store.push_manifest(a_manifest(store), MANIFEST_TYPE, "v")

    with pytest.raises(IntegrityError, match="1 layer, but the configuration has 0"):
        resolve(store, "v")


def test_an_image_whose_blob_is_missing_is_not_whole(tmp_path):
    layout = OciLayout.create(tmp_path / "layout")
    tar = a_tar(a_member("f", b"data"))
    made = an_image(layout, [(a_layer(layout, tar, "tar"), tar)])
    cache = IndexCache(tmp_path / "indexes")
    blobs = tmp_path / "layout/blobs/sha256"

    (blobs / made.layers[0].digest.partition(":")[2]).unlink()
    for call in (
        lambda: index_image(layout, made, cache),
        lambda: convert_image(layout, made, OciLayout.create(tmp_path / "other"), "t"),
    ):
        with pytest.raises(IntegrityError, match=r"has no blob sha256:.*; push the image again"):
            call()
    (blobs / made.manifest.config.digest.partition(":")[2]).unlink()
    with pytest.raises(IntegrityError, match=r"has no blob sha256:.*; push the image again"):
        resolve(layout, made.digest)


def test_indexes_without_end_are_refused(tmp_path):
    store = OciLayout.create(tmp_path)
    inner = a_manifest(store)
    media_type = MANIFEST_TYPE
    for _ in range(6):
        store.push_manifest(inner, media_type, "inner")
        entry = a_descriptor(digest=digest_of(inner), size=len(inner), mediaType=media_type)
        entry["platform"] = {"os": "linux", "architecture": "amd64"}
        media_type = INDEX_TYPE
        inner = orjson.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": [entry]})
    store.push_manifest(inner, INDEX_TYPE, "v")

    with pytest.raises(IntegrityError, match="more than 4 deep"):
        resolve(store, "v", Platform(os="linux", architecture="amd64"))


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ('Basic realm="a b"', [("basic", {"realm": "a b"})]),
        (
            'Bearer realm="https://t.example/t",service=s,scope="x:y:pull,push"',
            [
                (
                    "bearer",
                    {"realm": "https://t.example/t", "service": "s", "scope": "x:y:pull,push"},
                )
            ],
        ),
        (
            'Negotiate, Basic realm="q\\"q", Bearer realm=r',
            [("negotiate", {}), ("basic", {"realm": 'q"q'}), ("bearer", {"realm": "r"})],
        ),
        ("", []),
        ("=,=", []),
    ],
)
def test_challenges_are_read(header, found):
    assert [(c.scheme, c.parameters) for c in parse_challenges(header)] == found


def test_credentials_are_read_from_the_first_file_that_knows_the_registry(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text('{"auths": {"other.example": {"auth": "dTpw"}, "r.example": {}}}')
    second.write_text('{"auths": {"r.example": {"auth": "dXNlcjpwYXNz"}}}')

    found = credentials_of("r.example", (tmp_path / "none", first, second))

    assert found == Credentials("user", "pass")
    assert "pass" not in repr(found)
    assert credentials_of("r.example", (first,)) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"auths": []}',
        '{"auths": {"r.example": {"auth": "%"}}}',
        '{"auths": {"r.example": {"auth": 5}}}',
    ],
)
def test_a_broken_file_of_credentials_is_a_configuration_error(tmp_path, text):
    (tmp_path / "auth.json").write_text(text)

    with pytest.raises(ConfigError, match="log in anew"):
        credentials_of("r.example", (tmp_path / "auth.json",))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_credentials_are_read_from_files_alone(tmp_path, make):
    make(tmp_path / "auth.json")

    with pytest.raises(ConfigError, match="not a file of credentials"):
        credentials_of("r.example", (tmp_path / "auth.json",))


def test_a_realm_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="which is not https"):
        token_url({"realm": "http://[x"}, "scope", is_plain=True)


def test_the_usual_files_are_looked_at(tmp_path, monkeypatch):
    (tmp_path / "named.json").write_text('{"auths": {"r.example": {"auth": "dXNlcjpwYXNz"}}}')
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "named.json"))

    assert credentials_of("r.example").user == "user"


def test_a_push_reads_what_it_pushes_only_as_bytes(tmp_path):
    store = OciLayout.create(tmp_path)
    data = b"x" * 10
    blob = Descriptor(media_type="application/x", digest=digest_of(data), size=10)

    store.push_blob(blob, lambda: io.BytesIO(data))

    assert store.blob_range(blob.digest, 0, 10) == data


def test_a_user_without_a_home_has_logged_in_nowhere(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)

    assert credentials_of("r.example") is None
