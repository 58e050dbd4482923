"""Every kind of shard on each store, with a running server: the same samples as from a folder, and the refusals.

S3 is moto's server, Cloud Storage an emulator, HDFS Hadoop's own. A few kinds run in every test run, and all of them
in ``make soak``, because formats make the same calls as over the in-memory store of their contract.
"""

from itertools import product

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.stores import listings
from tests.support.fusefs.gcs import BUCKET
from tests.support.plane.sources.in_stores import (
    StoredShards,
    clients_told,
    config_in_units,
    shards_in,
)
from tests.support.plane.sources.source_contract import (
    SHARDS,
    TEXTS_PER_SHARD,
    expected_tokens,
    samples,
    texts_of_shard,
)
from tests.support.plane.sources.source_kinds import KINDS

pytestmark = pytest.mark.slow

N = SHARDS * TEXTS_PER_SHARD
SECRET = "a-secret-of-the-store"
ALWAYS = {
    # Its library reads with its own client.
    ("s3", "lance-tokens"),
    ("s3", "megatron"),
    ("hdfs", "mds"),
    ("hdfs", "parquet"),
    ("gcs", "jsonl-gz"),
    ("gcs", "webdataset"),
}
REFUSED = {("hdfs", "lance"), ("hdfs", "lance-tokens")}
"""Stores that the library of a format does not read."""
UNHEARD = {("gcs", "lance"), ("gcs", "lance-tokens")}
"""Lance lists by the XML interface of Cloud Storage, which the emulator does not have."""


@pytest.fixture
def s3(s3_of_all):
    s3_of_all.client.create_dir("corpora")
    address = f"http://{s3_of_all.address}"
    with clients_told("s3", key="k", secret=SECRET, endpoint_url=address):
        yield "s3://corpora"


@pytest.fixture
def gcs(gcs_url):
    with clients_told("gs", token="anon", endpoint_url=gcs_url):
        yield f"gs://{BUCKET}"


@pytest.fixture
def hdfs_root(hdfs):
    return f"{hdfs.url}/corpora"


STORES = {"s3": "s3", "gcs": "gcs", "hdfs": "hdfs_root"}
PAIRS = [
    pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.soak)
    for pair in product(STORES, KINDS)
    if pair not in REFUSED | UNHEARD
]


@pytest.fixture
def root(request, store):
    return request.getfixturevalue(STORES[store])


@pytest.fixture
def kind(name):
    return KINDS[name]()


@pytest.fixture
def folder(tmp_path, kind):
    for shard in range(SHARDS):
        kind.write(tmp_path / f"part-{shard}{kind.suffix}", texts_of_shard(shard))
    return tmp_path


@pytest.fixture
def config(kind, folder):
    return config_in_units(kind, folder)


@pytest.fixture
def stored(root, folder):
    return StoredShards(folder, root)


def locally(folder, config, kind):
    return open_source(
        SourceSpec("web", config, seed=11, tokenizer=kind.tokenizer, base_dir=folder)
    )


@pytest.mark.parametrize(("store", "name"), PAIRS)
def test_a_store_gives_what_a_folder_does_from_every_position_and_keeps_its_index(
    stored, folder, kind, config, tmp_path_factory
):
    kept = tmp_path_factory.mktemp("index")
    local = locally(folder, config, kind)
    source = stored.opened(config, kind.tokenizer, cache_dir=kept)
    resumed, hopping = (stored.opened(config, kind.tokenizer, cache_dir=kept) for _ in range(2))
    until = N + 7

    whole = samples(local.read(0, until))

    assert source.facts == local.facts
    assert samples(source.read(0, until)) == whole
    # Up to the end of the first records of each, and some way into the next epoch: a full read at each place would be
    # long.
    parts = [samples(resumed.read(p, min(p + 5, until))) for p in range(until + 1)]
    assert parts == [whole[p : p + 5] for p in range(until + 1)]
    for position in np.random.default_rng(0).permutation(N)[:6].tolist():
        assert samples(hopping.read(position, position + 1)) == whole[position : position + 1]
    (index,) = kept.glob("web.*.index.arrow")
    assert SECRET.encode() not in index.read_bytes()


@pytest.mark.parametrize(("store", "name"), PAIRS)
def test_a_shard_that_is_damaged_or_cut_short_in_a_store_is_named(stored, folder, kind, config):
    _, second, _ = shards_in(folder, kind)
    others = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for damage in (kind.corrupt, kind.truncate):
        for file, content in others.items():
            file.write_bytes(content)
        damage(second)
        stored.put()
        with pytest.raises(IntegrityError, match="part-1"):
            stored.opened(config, kind.tokenizer).read(0, N)


@pytest.mark.parametrize(("store", "name"), PAIRS)
def test_an_empty_shard_in_a_store_gives_no_sample(stored, folder, kind, config):
    kind.write(folder / f"part-1a{kind.suffix}", [])
    stored.put()

    source = stored.opened(config, kind.tokenizer)

    assert source.positions_per_epoch == N
    assert sorted(samples(source.read(0, N))) == sorted(
        expected_tokens(text) for shard in range(SHARDS) for text in texts_of_shard(shard)
    )


@pytest.mark.parametrize(("store", "name"), PAIRS)
def test_a_shard_of_a_store_that_changes_or_goes_under_way_is_named(
    stored, folder, kind, config, monkeypatch
):
    monkeypatch.setattr(listings, "LISTED_S", 0.0)  # as if that time had passed
    _, second, _ = shards_in(folder, kind)
    content = second.read_bytes()
    changing, going = (stored.opened(config, kind.tokenizer) for _ in range(2))

    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stored.put_one(second)
    with pytest.raises(IntegrityError, match=r"part-1.*changed since the source was opened"):
        changing.read(0, N)
    stored.store.rm_file(stored.at(second))
    with pytest.raises(IntegrityError, match=r"part-1.*gone since the source was opened"):
        going.read(0, N)


@pytest.mark.parametrize(("store", "name"), PAIRS)
def test_a_shard_that_was_replaced_by_one_of_its_size_is_read_anew_whatever_index_is_kept(
    stored, folder, kind, config, tmp_path_factory
):
    kept = tmp_path_factory.mktemp("index")
    before = stored.opened(config, kind.tokenizer, cache_dir=kept)
    was = samples(before.read(0, N))
    kind.write(folder / f"part-1{kind.suffix}", [text.swapcase() for text in texts_of_shard(1)])
    stored.put()

    after = stored.opened(config, kind.tokenizer, cache_dir=kept)

    assert after.facts.content_digest != before.facts.content_digest
    assert samples(after.read(0, N)) == samples(locally(folder, config, kind).read(0, N)) != was


@pytest.mark.parametrize(("store", "name"), sorted(REFUSED)[:1])
def test_a_store_that_the_library_of_a_format_does_not_read_is_refused(stored, kind, config):
    with pytest.raises(ConfigError, match="is in a store that Lance does not read; it reads"):
        stored.opened(config, kind.tokenizer)
