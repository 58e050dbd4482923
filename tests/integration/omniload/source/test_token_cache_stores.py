"""A token cache on real servers: S3 (moto's, if it is installed) and HDFS."""

import uuid

import pytest

from fusefs.stores.protocol import RESERVED
from fusefs.stores.url import open_store
from omniload.source.token_cache.places import StorePlace
from tests.faults.omniload.test_source_token_cache_faults import a_source, read_whole
from tests.support.hdfs.cluster import why_not

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3(s3_of_all):
    s3_of_all.client.create_dir("tokens")
    return s3_of_all


@pytest.fixture
def cluster(hdfs):
    return hdfs


def require_filled_and_used(folder, url):
    (folder / "a.jsonl").write_text("".join(f'{{"text": "record {i}"}}\n' for i in range(2000)))
    expected = read_whole(a_source(folder, None))

    assert read_whole(a_source(folder, url)) == expected

    (of_source,) = {found.name for found in open_store(url).listing("")} - {RESERVED}
    place = StorePlace(url)
    names = sorted(place.names(of_source))
    assert len(names) > 5
    torn = f"{of_source}/{names[0]}"
    whole = place.read(torn)
    place.write(torn, whole[:-20])
    assert read_whole(a_source(folder, url)) == expected
    assert place.read(torn) == whole  # made again


def test_a_cache_on_s3_is_filled_used_and_not_believed_where_it_is_torn(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    where = f"endpoint_override=http://{s3.address}&region=us-east-1"

    require_filled_and_used(tmp_path, f"s3://tokens/{uuid.uuid4().hex}?{where}")


@pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}")
def test_a_cache_on_hdfs_is_filled_used_and_not_believed_where_it_is_torn(cluster, tmp_path):
    require_filled_and_used(tmp_path, f"{cluster.url}/tokens/{uuid.uuid4().hex}")
