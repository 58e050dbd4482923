"""A store that ails for a while: it refuses in three ways, or is slow, counts what it does, and is well again."""

from contextlib import closing
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected

import fsspec
import pytest

from benchmarks.faults.ailing_store import AilingStore

CONTENT = bytes(range(256)) * 40
LONG_S = 3600.0


@pytest.fixture
def store(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "0.bin").write_bytes(CONTENT)
    with AilingStore(tmp_path, 0.0) as store:
        yield store


def asked(store, part="bytes=100-199"):
    """Return the status of an answer, or what came in its place, and its content."""
    with closing(HTTPConnection(store.url.removeprefix("http://"), timeout=60)) as connection:
        connection.request("GET", "/web/0.bin", headers={"Range": part})
        try:
            answer = connection.getresponse()
            return answer.status, answer.read()
        except RemoteDisconnected:
            return "silence", b""
        except IncompleteRead as error:
            return "beginning", error.partial


def test_a_client_of_sources_finds_files_and_reads_parts_of_them(store):
    files, _ = fsspec.core.url_to_fs(store.url)

    assert files.glob(f"{store.url}/web/*.bin") == [url := f"{store.url}/web/0.bin"]
    assert files.info(url)["size"] == len(CONTENT)
    assert files.cat_ranges([url, url], [0, 1000], [10, 1010]) == [
        *(CONTENT[:10], CONTENT[1000:1010])
    ]
    assert store.counts()["refused"] == store.counts()["slow"] == 0


def test_it_refuses_in_every_way_and_counts_that(store):
    store.ail("store", LONG_S)

    found = dict(asked(store) for _ in range(6))

    assert found.keys() == {503, "silence", "beginning"}
    assert found["beginning"] == CONTENT[100:150]
    assert store.counts() == {"answered": 0, "refused": 6, "slow": 0}


def test_it_is_slow_and_gives_the_same(store):
    store.ail("delay", LONG_S)

    assert asked(store) == (206, CONTENT[100:200])

    assert store.counts() == {"answered": 1, "refused": 0, "slow": 1}


@pytest.mark.parametrize(("kind", "counted"), [("store", "refused"), ("delay", "slow")])
def test_it_is_well_again_once_the_time_has_passed(store, kind, counted):
    store.ail(kind, 0.05)

    for times in range(10_000):
        found = asked(store)
        if store.counts()[counted] == times:
            break

    assert found == (206, CONTENT[100:200])
