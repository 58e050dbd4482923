"""A journal on real servers: S3 (moto's, if it is installed) and HDFS."""

import uuid

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.client import Client
from omniload.mix.journal.place import JOURNAL_NAME, journal_at
from omniload.mix.journal.reading import read_journal
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.hdfs.cluster import why_not
from tests.support.plane.corpora import a_corpus
from tests.support.plane.journal_contract import StoredJournalContract, claiming

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3(s3_of_all):
    s3_of_all.client.create_dir("journals")
    return s3_of_all


@pytest.fixture
def cluster(hdfs):
    return hdfs


@pytest.fixture
def s3_url(s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    return (
        f"s3://journals/{uuid.uuid4().hex}?endpoint_override=http://{s3.address}&region=us-east-1"
    )


class TestS3(StoredJournalContract):
    steps = 40

    @pytest.fixture
    def place(self, s3_url, tmp_path):
        return claiming(lambda: journal_at(tmp_path / "run", s3_url))


@pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}")
class TestHdfs(StoredJournalContract):
    steps = 40

    @pytest.fixture
    def place(self, cluster, tmp_path):
        url = f"{cluster.url}/journals/{uuid.uuid4().hex}"
        return claiming(lambda: journal_at(tmp_path / "run", url))


def test_a_run_keeps_its_journal_on_s3_and_resumes_from_it(tmp_path, s3_url, s3):
    mix = a_corpus(tmp_path)
    kept = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"journal": s3_url})})

    def taken(mix, run_dir, steps, state=None):
        spec = PlaneSpec(
            mix=mix,
            base_dir=tmp_path,
            tree=ClientPlaceTree.of(dp=1),
            run_dir=run_dir,
            state=state,
            num_steps=8,
        )
        with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
            for _ in range(steps):
                client.next_batch()
            return client.state_dict()

    taken(mix, tmp_path / "alone", 8)
    s3.asked()
    state = taken(kept, tmp_path / "run", 4)
    asked = s3.asked()
    taken(kept, tmp_path / "run", 4, state)

    assert read_journal(journal_at(tmp_path / "run", s3_url)) == read_journal(
        tmp_path / "alone" / JOURNAL_NAME
    )
    assert not (tmp_path / "run" / JOURNAL_NAME).exists()
    puts = [request for request in asked if request.startswith("PUT") and "/lines/" in request]
    assert 2 <= len(puts) <= 9  # the base, and one put for each window of steps


def test_a_bucket_that_is_not_there_is_told(tmp_path, s3_url):
    with pytest.raises(ConfigError, match="there is no bucket 'nowhere'; make it, or name another"):
        journal_at(tmp_path / "run", s3_url.replace("//journals", "//nowhere"))
