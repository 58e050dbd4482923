"""Names that an engine asks a layer store for: one form each, everything else is not there."""

import base64
import json

import pytest

from snapshot.engines.podman.images import digest_of_name, info_of, reference_of
from snapshot.oci.manifest import Descriptor
from snapshot.oci.reference import Reference

DIGEST = "sha256:" + "ab" * 32


def encoded(text):
    return base64.b64encode(text.encode())


def test_a_reference_is_read_from_its_base64():
    found = reference_of(encoded("r.example:5000/team/torch:2.13"))

    assert found == Reference(registry="r.example:5000", repository="team/torch", tag="2.13")


def test_a_reference_may_name_a_digest():
    found = reference_of(encoded(f"r.example/a@{DIGEST}"))

    assert (found.tag, found.digest) == (None, DIGEST)


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"....",
        b"plain",
        encoded("r.example/a:v").rstrip(b"=") + b"\n",
        encoded("r.example/a:v")[:-1],
        encoded("http://r.example/a:v"),
        encoded("../../etc:v"),
        encoded("oci:/etc:v"),
        encoded("user@r.example/a:v"),
        encoded("r.example/A:v"),
        encoded("a/b:v"),
        encoded("r.example/a"),
        encoded("r.example/a:v\n"),
        encoded("r.example/a:v "),
        base64.b64encode("r.example/ä:v".encode()),
        base64.b64encode(b"r.example/a:v\0"),
        base64.b64encode(b"\xff\xfe/a:v"),
        base64.urlsafe_b64encode(b"r.example/a:v??>"),
    ],
)
def test_what_is_no_reference_is_not_there(name):
    assert reference_of(name) is None


def test_stray_bits_are_no_second_name_of_a_reference():
    name = encoded("r.example/a:v")
    assert name.endswith(b"==")
    second = name[:-3] + bytes([name[-3] + 1]) + b"=="
    assert base64.b64decode(second) == base64.b64decode(name)

    assert reference_of(name) is not None
    assert reference_of(second) is None


def test_only_registries_that_are_allowed_are_asked():
    allowed = ("r.example:5000", "localhost")

    assert reference_of(encoded("r.example:5000/a:v"), allowed) is not None
    assert reference_of(encoded("localhost/a:v"), allowed) is not None
    assert reference_of(encoded("r.example/a:v"), allowed) is None
    assert reference_of(encoded("r.example:5000.evil.example/a:v"), allowed) is None


def test_a_layer_is_named_by_a_digest_alone():
    assert digest_of_name(DIGEST.encode()) == DIGEST
    for name in (
        b"",
        b"sha256:ab",
        DIGEST.upper().encode(),
        f"{DIGEST}\n".encode(),
        b"\xff",
        b"md5:aa",
    ):
        assert digest_of_name(name) is None


@pytest.mark.parametrize(("suffix", "number"), [("", 0), ("+gzip", 2), ("+zstd", 4)])
def test_an_engine_is_told_digests_sizes_and_compression_of_a_layer(suffix, number):
    media_type = f"application/vnd.oci.image.layer.v1.tar{suffix}"
    layer = Descriptor(media_type=media_type, digest=DIGEST, size=70)

    told = json.loads(info_of(layer, "sha256:" + "cd" * 32, 99))

    assert told == {
        "compressed-diff-digest": DIGEST,
        "compressed-size": 70,
        "diff-digest": "sha256:" + "cd" * 32,
        "diff-size": 99,
        "compression": number,
    }
