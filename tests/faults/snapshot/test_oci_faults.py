"""A registry that is slow, wrong, broken or picky: right bytes or a clear error."""

import logging

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from snapshot.oci.auth import Credentials, token_url
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor
from snapshot.oci.registry import Registry
from snapshot.oci.store import MirroredStore
from snapshot.oci.transport import RegistrySettings, Transport
from tests.support.snapshot.registries.fake import FakeRegistry, serving

DATA = bytes(range(256)) * 40_000  # 10 MB: more than sockets and chunks hold


@pytest.fixture
def fake():
    registry = FakeRegistry()
    with serving(registry):
        yield registry


def client(fake, *, clock=None, credentials=None, **settings):
    transport = Transport(
        fake.address,
        RegistrySettings(timeout_s=60, **settings),
        credentials,
        clock or FakeClock(),
    )
    return Registry(transport, "a/b")


def layer(data):
    return Descriptor(media_type="application/x", digest=FakeRegistry().put(data), size=len(data))


def refuses(status, **headers):
    return lambda handler: handler.answer(status, b"overloaded", **headers)


def test_a_registry_without_ranges_gives_the_same_bytes(fake):
    fake.ranges = False
    digest = fake.put(DATA)
    store = client(fake)

    assert store.blob_range(digest, 5_000_000, 1000) == DATA[5_000_000:5_001_000]
    assert store.blob_range(digest, len(DATA) - 10, 10) == DATA[-10:]
    with pytest.raises(IntegrityError, match="gives 5 of the 10 bytes"):
        store.blob_range(digest, len(DATA) - 5, 10)


@pytest.mark.parametrize(
    "said", ["bytes 0-9/100", "bytes 10-29/100", "bytes 9-18/100", "10-19", "bytes */100", ""]
)
def test_a_range_that_was_not_asked_for_is_refused(fake, said):
    digest = fake.put(DATA)
    fake.faults = [lambda handler: handler.answer(206, DATA[10:20], Content_Range=said)]

    with pytest.raises(IntegrityError, match=r"answers with range .* bytes 10-19 were asked"):
        client(fake).blob_range(digest, 10, 10)

    fake.assert_all_faults_fired()


@pytest.mark.parametrize("size", [9, 11])
def test_a_range_of_another_length_than_it_says_is_refused(fake, size):
    digest = fake.put(DATA)
    fake.faults = [
        lambda handler: handler.answer(206, DATA[10 : 10 + size], Content_Range="bytes 10-19/100")
    ]

    with pytest.raises(IntegrityError, match=f"{size} of the 10 bytes"):
        client(fake).blob_range(digest, 10, 10)


def test_outages_are_retried_with_growing_waits_and_then_given_up(fake, caplog):
    digest, clock = fake.put(DATA), FakeClock()
    fake.faults = [refuses(500), refuses(503), refuses(429, Retry_After="7")]

    with caplog.at_level(logging.WARNING, "omniload"):
        assert client(fake, clock=clock).blob_range(digest, 1, 2) == DATA[1:3]

    assert clock.slept_s == [0.1, 0.2, 7.0, 0.4]
    fake.assert_all_faults_fired()

    fake.faults = [refuses(500)] * 3
    with pytest.raises(UnavailableError, match="answers 500: overloaded"):
        client(fake, attempts=3).blob_range(digest, 1, 2)
    fake.assert_all_faults_fired()


def test_a_wait_that_the_registry_asks_for_is_bounded(fake):
    digest, clock = fake.put(DATA), FakeClock()
    fake.faults = [refuses(429, Retry_After="86400")]

    client(fake, clock=clock).blob_range(digest, 1, 2)

    assert max(clock.slept_s) == 30.0


def test_a_range_that_breaks_off_is_asked_for_again(fake):
    digest = fake.put(DATA)
    fake.faults = [
        lambda handler: handler.break_off(200, len(DATA), DATA[:100]),
        lambda handler: handler.break_off(200, len(DATA), b""),
    ]

    assert client(fake).blob_range(digest, 1000, 2000) == DATA[1000:3000]

    fake.assert_all_faults_fired()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_whole_blob_that_breaks_off_goes_on_where_it_broke(fake, ranges):
    fake.ranges = ranges
    fake.put(DATA)
    fake.faults = [
        lambda handler: handler.break_off(200, len(DATA), DATA[:3_000_000]),
        refuses(502),
    ]

    assert b"".join(client(fake).blob_chunks(layer(DATA))) == DATA

    fake.assert_all_faults_fired()
    assert fake.asked[-1][2]["Range"].endswith(f"-{len(DATA) - 1}")
    assert not fake.asked[-1][2]["Range"].startswith("bytes=0-")


def test_a_registry_that_dies_for_good_ends_a_blob_with_an_error(fake):
    fake.put(DATA)
    fake.faults = [lambda handler: handler.break_off(200, len(DATA), DATA[:1000])]
    fake.faults += [refuses(503)] * 5
    chunks = client(fake).blob_chunks(layer(DATA))

    with pytest.raises(UnavailableError, match="answers 503"):
        list(chunks)

    fake.assert_all_faults_fired()


def test_a_blob_of_wrong_bytes_is_refused(fake):
    wrong = DATA[:-1] + b"?"
    blob = layer(DATA)
    fake.blobs[blob.digest] = wrong

    with pytest.raises(IntegrityError, match="has altered it"):
        list(client(fake).blob_chunks(blob))


def test_a_manifest_by_digest_must_have_it_and_none_may_be_endless(fake):
    fake.manifests["sha256:" + "0" * 64] = (b"{}", MANIFEST_TYPE)
    fake.manifests["huge"] = (b" " * (5 << 20), MANIFEST_TYPE)

    with pytest.raises(IntegrityError, match="have digest"):
        client(fake).manifest("sha256:" + "0" * 64)
    with pytest.raises(IntegrityError, match="more than 4194304"):
        client(fake).manifest("huge")


def test_a_mirror_with_wrong_bytes_or_an_outage_is_passed_over(fake, caplog):
    good = FakeRegistry()
    data = b"manifest"
    digest = good.put(data)
    good.manifests[digest] = (data, MANIFEST_TYPE)
    fake.manifests[digest] = (b"forged", MANIFEST_TYPE)
    with serving(good), caplog.at_level(logging.WARNING, "omniload"):
        store = MirroredStore(client(good), [client(fake)])

        assert store.manifest(digest).data == data

    assert "have digest" in caplog.text


def test_basic_credentials_are_sent_when_asked_for(fake):
    fake.auth = "basic"
    digest = fake.put(DATA)

    store = client(fake, credentials=Credentials("user", "secret"))

    assert store.blob_range(digest, 0, 4) == DATA[:4]
    assert "Authorization" not in fake.asked[0][2]


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_wrong_credentials_are_a_configuration_error_that_does_not_show_them(fake, auth):
    fake.auth = auth
    for credentials in (Credentials("user", "wrong"), None):
        with pytest.raises(ConfigError, match="podman login") as caught:
            client(fake, credentials=credentials).blob_range(fake.put(DATA), 0, 4)

        assert "wrong" not in str(caught.value)


def test_a_token_is_fetched_once_and_again_when_it_is_no_longer_good(fake):
    fake.auth = "bearer"
    digest = fake.put(DATA)
    store = client(fake, credentials=Credentials("user", "secret"))

    for _ in range(3):
        store.blob_range(digest, 0, 4)
    assert fake.tokens_given == 1

    fake.tokens_given = 5  # the first is worth nothing now
    assert store.blob_range(digest, 0, 4) == DATA[:4]
    assert fake.tokens_given == 6
    asked = [path for _, path, _ in fake.asked if path.startswith("/token")]
    assert asked[0] == "/token?service=fake&scope=repository%3Aa%2Fb%3Apull"


@pytest.mark.parametrize("there", ["http://[x/blob", "file:///etc/passwd"])
def test_a_redirect_to_no_url_is_an_outage(fake, there):
    digest = fake.put(DATA)
    fake.faults = [lambda handler: handler.answer(307, Location=there)] * 9

    with pytest.raises(UnavailableError, match="is the registry up"):
        client(fake).blob_range(digest, 0, 4)


def test_what_a_registry_says_moves_no_cursor(fake):
    digest = fake.put(DATA)
    fake.faults = [lambda handler: handler.answer(403, b"\x1b[2J\x1b]0;mine\x07 denied")]

    with pytest.raises(ConfigError, match="denied") as raised:
        client(fake).blob_range(digest, 0, 4)

    assert str(raised.value).isprintable()


def test_credentials_do_not_follow_a_redirect_to_another_host(fake):
    elsewhere = FakeRegistry()
    digest = fake.put(DATA)
    elsewhere.put(DATA)
    fake.auth = "basic"
    with serving(elsewhere) as address:
        there = f"http://{address}/v2/a/b/blobs/{digest}"
        fake.faults = [lambda handler: handler.answer(307, Location=there)]
        store = client(fake, credentials=Credentials("user", "secret"))

        assert store.blob_range(digest, 0, 4) == DATA[:4]

    ((_, _, headers),) = elsewhere.asked
    assert "Authorization" not in headers
    assert headers["Range"] == "bytes=0-3"


def test_a_registry_over_tls_that_sends_for_tokens_over_plain_http_gets_no_credentials():
    realm = {"realm": "http://registry.example/token", "service": "s"}

    with pytest.raises(ConfigError, match="not https"):
        token_url(realm, "", is_plain=False)

    assert token_url(realm, "a:b", is_plain=True) == f"{realm['realm']}?service=s&scope=a%3Ab"
    assert Transport("registry.example").base == "https://registry.example"
