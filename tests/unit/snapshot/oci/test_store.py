"""Mirrors: who is asked first, who is asked next, and who is never written to."""

import io

import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import MANIFEST_TYPE
from snapshot.oci.store import MirroredStore
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.snapshot.registries.contract import a_manifest, descriptor_of, push


class Broken:
    """A store that answers everything with one error."""

    location = "broken"

    def __init__(self, error):
        self.error, self.asked, self.closed = error, 0, False

    def __getattr__(self, name):
        def refuse(*_args):
            self.asked += 1
            raise self.error

        return refuse

    def close(self):
        self.closed = True


ERRORS = [FileNotFoundError("gone"), UnavailableError("down"), IntegrityError("forged")]


@pytest.fixture
def origin(tmp_path):
    return OciLayout.create(tmp_path / "origin")


@pytest.fixture
def near(tmp_path):
    return OciLayout.create(tmp_path / "near")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_mirror_that_cannot_serve_is_passed_over(origin, error):
    broken = Broken(error)
    blob = push(origin, b"layer")
    digest = origin.push_manifest(a_manifest(origin), MANIFEST_TYPE, "v")
    store = MirroredStore(origin, [broken])

    assert store.blob_range(blob.digest, 1, 3) == b"aye"
    assert store.manifest(digest).digest == digest
    # Who did not answer is left alone for a while; who lacked one thing may have another.
    assert broken.asked == (1 if isinstance(error, UnavailableError) else 2)


def test_a_mirror_that_refuses_our_credentials_is_a_fault_to_be_told(origin):
    blob = push(origin, b"layer")

    with pytest.raises(ConfigError, match="refused"):
        MirroredStore(origin, [Broken(ConfigError("refused"))]).blob_range(blob.digest, 0, 1)


def test_the_error_of_the_last_store_is_the_one_that_is_told(origin):
    with pytest.raises(FileNotFoundError, match="origin"):
        MirroredStore(origin, [Broken(UnavailableError("down"))]).blob_range(
            descriptor_of(b"absent").digest, 0, 1
        )


def test_a_tag_is_what_the_origin_says_and_a_mirrors_only_while_that_is_down(origin, near):
    new = origin.push_manifest(a_manifest(origin, (b"new",)), MANIFEST_TYPE, "v")
    old = near.push_manifest(a_manifest(near, (b"old",)), MANIFEST_TYPE, "v")

    assert MirroredStore(origin, [near]).manifest("v").digest == new
    down = Broken(UnavailableError("down"))
    assert MirroredStore(down, [near]).manifest("v").digest == old


def test_a_tag_that_the_origin_does_not_have_is_not_looked_for_at_a_mirror(origin, near):
    near.push_manifest(a_manifest(near), MANIFEST_TYPE, "removed")

    with pytest.raises(FileNotFoundError):
        MirroredStore(origin, [near]).manifest("removed")


def test_whole_blobs_come_from_the_first_that_has_them(origin, near):
    both, only = push(origin, b"both"), push(origin, b"only")
    push(near, b"both")
    store = MirroredStore(origin, [Broken(UnavailableError("down")), near])

    assert b"".join(store.blob_chunks(both)) == b"both"
    assert b"".join(store.blob_chunks(only)) == b"only"


def test_writes_go_to_the_origin_alone(origin, near):
    store = MirroredStore(origin, [near])
    blob = descriptor_of(b"pushed")

    store.push_blob(blob, lambda: io.BytesIO(b"pushed"))
    store.push_manifest(a_manifest(origin), MANIFEST_TYPE, "v")

    assert (origin.has_blob(blob.digest), near.has_blob(blob.digest)) == (True, False)
    assert store.has_blob(blob.digest)
    assert near.tags() == ()
    assert store.location == origin.location


def test_closing_closes_all():
    stores = [Broken(UnavailableError("")), Broken(UnavailableError(""))]

    MirroredStore(stores[0], stores[1:]).close()

    assert all(store.closed for store in stores)


@pytest.mark.parametrize(
    ("registry", "plain", "base"),
    [
        ("localhost:5000", None, "http://localhost:5000"),
        ("127.0.0.1:5000", None, "http://127.0.0.1:5000"),
        ("[::1]:5000", None, "http://[::1]:5000"),
        ("registry.example", None, "https://registry.example"),
        ("127.0.0.1.example", None, "https://127.0.0.1.example"),
        ("localhost:5000", False, "https://localhost:5000"),
        ("registry.example", True, "http://registry.example"),
    ],
)
def test_only_this_machine_is_spoken_to_without_tls_unasked(registry, plain, base):
    assert Transport(registry, RegistrySettings(plain_http=plain)).base == base
