"""The local runtime over files on disk: the same steps for any ranks, exact resume, clean ends."""

import json
import logging
import threading
from itertools import islice

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.metrics import REGISTRY
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.machine.plans import windows
from omniload.mix.deficit import integer_weights
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_extent, read_journal, state_before
from omniload.mix.journal.records import StepRecord, bad_in
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState
from omniload.source import kept_profile
from omniload.source.kept_profile import KeptProfile, keep, kept_profiles
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.corpora import a_corpus, a_mixed_corpus, write_texts, write_tokens
from tests.support.plane.local_runs import OneRank, a_spec, require_resumed_exactly

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def digests_of(spec, num_steps=6):
    """Return the digest of each step over all ranks."""
    ranks = range(spec.tree.size_of("dp"))
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in ranks]
        steps = [[client.next_batch() for client in clients] for _ in range(num_steps)]
    return [combined(batch_digest(batch) for batch in batches) for batches in steps]


@pytest.mark.parametrize("write", [a_corpus, a_mixed_corpus])
def test_any_number_of_ranks_trains_on_the_same_steps(tmp_path, write):
    mix = write(tmp_path, rows=6, micro_rows=1)
    deep = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"prefetch_steps": 1})})

    alone = digests_of(a_spec(tmp_path, mix))

    assert len(set(alone)) == 6
    assert digests_of(a_spec(tmp_path, mix, dp=2)) == alone
    assert digests_of(a_spec(tmp_path, deep, dp=3)) == alone


@pytest.mark.parametrize(
    "pack",
    [{}, {"method": "concat_and_split"}, {"overlong": "truncate", "lookahead_rows": 3}],
)
def test_a_run_resumes_exactly_from_every_step(tmp_path, pack):
    mix = a_mixed_corpus(tmp_path, pack=pack)

    require_resumed_exactly(tmp_path, mix)


def test_slices_of_cp_peers_add_up_to_the_rows(tmp_path):
    mix = a_corpus(tmp_path)
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        whole = [client.next_batch() for _ in range(8)]

    with LocalPlane(a_spec(tmp_path, mix, cp=2)) as plane:
        peers = [Client(plane.handle(0, cp_rank)) for cp_rank in range(2)]
        # One peer runs ahead as far as it can before the other begins.
        sliced = [[peer.next_batch() for _ in range(4)] for peer in peers]

    for step in range(4):
        for number, microbatch in enumerate(whole[step].microbatches):
            tokens = np.full_like(microbatch.tokens_RT, -1)
            labels = np.full_like(microbatch.labels_RT, -1)
            for batches in sliced:
                part = batches[step].microbatches[number]
                tokens[:, part.indices_C] = part.tokens_RC
                labels[:, part.indices_C] = part.labels_RC
            assert np.array_equal(tokens, microbatch.tokens_RT)
            assert np.array_equal(labels, microbatch.labels_RT)


def test_tokens_are_those_of_the_files(tmp_path):
    document = np.arange(40, dtype=np.int32)
    write_tokens(tmp_path / "web" / "0.parquet", [document + 100 * i for i in range(5)])
    mix = a_corpus(tmp_path, ("web",), records=0, shards=0, rows=2, length=20, micro_rows=2)

    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        (microbatch,) = client.next_batch().microbatches

    firsts = microbatch.tokens_RT[:, 0].tolist()
    for row, first in zip(microbatch.tokens_RT.tolist(), firsts, strict=True):
        assert first % 20 == 0
        assert row == list(range(first, first + 20))


@pytest.mark.parametrize(("stop", "least"), [("first_exhausted", 1), ("all_exhausted", 8)])
def test_a_stop_policy_ends_the_data(tmp_path, stop, least):
    mix = a_corpus(tmp_path, mix={"stop": stop}, records=40)

    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        batches = list(islice(client, 200))

        assert least <= len(batches) < 200
        assert client.next_batch() is None
        seen = {
            (key[0], key[1])
            for batch in batches
            for microbatch in batch.microbatches
            for key in microbatch.keys_K4.tolist()
        }
    if stop == "first_exhausted":
        assert max(position for _, position in seen) < 40
    else:
        assert {(s, p) for s in range(2) for p in range(30)} <= seen


def test_a_run_of_so_many_steps_ends_after_them_and_again_when_resumed(tmp_path):
    mix = a_corpus(tmp_path)
    with LocalPlane(a_spec(tmp_path, mix, num_steps=3)) as plane, Client(plane.handle(0)) as client:
        assert [batch.step for batch in client] == [0, 1, 2]
        state = client.state_dict()

    spec = a_spec(tmp_path, mix, num_steps=5, state=state)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        assert [batch.step for batch in client] == [3, 4]


def test_the_journal_leads_to_the_state_of_the_client(tmp_path):
    mix = a_corpus(tmp_path)
    run = tmp_path / "run"
    with LocalPlane(a_spec(tmp_path, mix, run_dir=run)) as plane, Client(plane.handle(0)) as client:
        for _ in range(4):
            client.next_batch()
        state = client.state_dict()

    base, stored = read_journal(run / JOURNAL_NAME)
    folded = state_before(
        4,
        MixState.from_json(base, mix.names, state["fingerprint"]),
        [StepRecord.from_json(record, mix.names) for record in stored],
        lambda before: integer_weights(weights_at(mix.mix.stages, mix.names, before.step)),
    )
    assert folded.to_json(mix.names, state["fingerprint"]) == json.loads(json.dumps(state))


def test_a_run_that_keeps_its_last_steps_resumes_exactly_and_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "_BASE_EVERY", 4)
    mix = a_corpus(tmp_path)
    whole = digests_of(a_spec(tmp_path, mix), 70)
    # Few, so that few steps show it; a mix file gives 2,048 at least.
    runtime = mix.runtime.model_copy(update={"journal_steps": 8, "prefetch_steps": 2})
    mix = mix.model_copy(update={"runtime": runtime})
    run, state, found = tmp_path / "run", None, []
    for steps in (40, 30):
        spec = a_spec(tmp_path, mix, run_dir=run, state=state)
        with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
            found += [batch_digest(client.next_batch()) for _ in range(steps)]
            state = client.state_dict()

    assert [combined([digest]) for digest in found] == whole
    extent = read_extent(run / JOURNAL_NAME)
    assert extent.next_step >= 70
    assert 8 <= extent.next_step - extent.first_step <= 2 * 8 + 4
    assert not list(run.glob("*aside*"))


def test_a_state_of_another_seed_is_refused_before_anything_starts(tmp_path):
    mix = a_corpus(tmp_path)
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        state = client.state_dict()

    with pytest.raises(StateError, match="seed: 7 saved, 8 now"):
        LocalPlane(a_spec(tmp_path, mix.model_copy(update={"seed": 8}), state=state))


def test_a_source_without_files_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"sources\.code\.path: .* matches no file"):
        LocalPlane(a_spec(tmp_path, a_corpus(tmp_path / "elsewhere")))


def a_corpus_with_bad_lines(folder, on_error):
    texts = [None if i % 10 == 3 else f"document {i} " * 3 for i in range(60)]
    write_texts(folder / "text" / "0.jsonl", texts)
    source = {"type": "jsonl", "path": "text/*.jsonl", "on_error": on_error}
    return a_mixed_corpus(folder / "other").model_validate(
        {
            "version": 1,
            "seed": 1,
            "sources": {"text": source},
            "mix": {"stages": [{"from_step": 0, "weights": {"text": 1}}]},
            "pack": {"length": 32},
            "batch": {"tokens": 128, "micro_tokens": 64},
            "tokenizer": {"type": "bytes"},
        }
    )


def test_a_bad_record_reaches_the_client_as_the_error_it_is(tmp_path, caplog):
    mix = a_corpus_with_bad_lines(tmp_path, {"policy": "raise"})

    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        with pytest.raises(IntegrityError, match=r"0\.jsonl.*on_error"):
            client.next_batch()
        with pytest.raises(IntegrityError, match="on_error"):
            client.next_batch()


def test_bad_records_that_may_be_skipped_are_counted(tmp_path):
    mix = a_corpus_with_bad_lines(tmp_path, {"policy": "skip"})
    key = ("omniload_samples_skipped_total", {"source": "text"})
    before = REGISTRY.get_sample_value(*key) or 0

    def counted():
        return (REGISTRY.get_sample_value(*key) or 0) - before

    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        # The samples are counted once the rank has reported their steps; with these small steps it reports once for
        # many.
        steps = iter(client.next_batch, None)
        assert any(counted() >= 6 for _ in islice(steps, 1_000))


@pytest.mark.parametrize("ahead", [1, 16])
def test_bad_records_count_as_they_lie_before_the_next_one_whatever_is_read_ahead_or_again(
    tmp_path, ahead
):
    mix = a_corpus_with_bad_lines(tmp_path, {"policy": "skip"})
    runtime = mix.runtime.model_copy(update={"prefetch_steps": ahead})
    mix = mix.model_copy(update={"runtime": runtime})
    run, state = tmp_path / "run", None
    # Each life begins some steps before the last planned step of the previous one, so their reads and counts come
    # again.
    for steps in (3, 1, 2, 30, 4):
        spec = a_spec(tmp_path, mix, run_dir=run, state=state)
        with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
            for _ in range(steps):
                client.next_batch()
            state = client.state_dict()
    _, records = read_journal(run / JOURNAL_NAME)

    source = open_source(
        SourceSpec("text", mix.sources["text"], seed=1, tokenizer=mix.tokenizer, base_dir=tmp_path)
    )
    before = 0
    for record in records:
        position = record["drawn"]["text"][0]
        bad = sum(source.read(at, at + 1).skipped for at in range(before, position))
        assert bad_in(record) == ({"text": bad} if bad else {})
        before = position
    # Each epoch has six bad lines, and the source was gone through more than once.
    assert before > 120


def steps_and_end(client, most):
    """Take batches, ``most`` of them; return their numbers, and what ended them."""
    steps = []
    try:
        while len(steps) < most:
            steps.append(client.next_batch().step)
    except IntegrityError as error:
        return steps, str(error)
    return steps, None


@pytest.mark.parametrize("limit", [2, "4%"])
def test_more_bad_records_than_allowed_stop_a_run_at_one_step_however_often_it_is_resumed(
    tmp_path, limit
):
    mix = a_corpus_with_bad_lines(tmp_path, {"policy": "skip", "limit": limit})
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        steps, end = steps_and_end(client, 100)
        with pytest.raises(IntegrityError, match=r"sources\.text: 3 records"):
            client.next_batch()
        assert client.state_dict()["step"] == len(steps)
    assert "text/0.jsonl:" in end
    assert "more than on_error.limit" in end

    resumed, state, last = [], None, None
    while last is None:
        spec = a_spec(tmp_path, mix, run_dir=tmp_path / "run", state=state)
        with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
            more, last = steps_and_end(client, 1)
            resumed += more
            state = client.state_dict()

    assert 1 < len(steps) < 100
    assert resumed == steps
    # The other source that the message names depends on the read-ahead.
    assert last.split("; what")[0] == end.split("; what")[0]


def test_a_percentage_of_bad_records_is_of_all_records_of_the_source(tmp_path):
    mix = a_corpus_with_bad_lines(tmp_path, {"policy": "skip", "limit": "0.1%"})

    with (
        LocalPlane(a_spec(tmp_path, mix)) as plane,
        Client(plane.handle(0)) as client,
        pytest.raises(
            IntegrityError, match=r"on_error\.limit 0\.1% \(0 of \d+ records\), the last of them"
        ),
    ):
        list(islice(client, 20))


def test_closing_wakes_whoever_waits(tmp_path):
    with LocalPlane(a_spec(tmp_path, a_corpus(tmp_path))) as plane:
        client = Client(plane.handle(0))
        client.next_batch()

    with pytest.raises(UnavailableError, match="the data plane was closed"):
        list(islice(client, 20))


def test_a_rank_of_a_plane_that_is_closed_is_told_so_also_where_its_next_step_is_built(tmp_path):
    with LocalPlane(a_spec(tmp_path, a_corpus(tmp_path))) as plane:
        client = Client(plane.handle(0))
        client.next_batch()
        assert plane.constructor.wait(client.next_step, 60.0)

    assert plane.constructor.has(client.next_step)
    with pytest.raises(UnavailableError, match="the data plane was closed"):
        client.next_batch()
    assert client.peek() is None


def test_a_step_that_is_withheld_is_waited_for_no_longer_than_a_batch_may_take(tmp_path):
    with LocalPlane(a_spec(tmp_path, a_corpus(tmp_path))) as plane:
        client = Client(plane.handle(0))
        client.next_batch()
        assert plane.constructor.wait(client.next_step, 60.0)
        plane.constructor.fence((99, 1))

        with pytest.raises(UnavailableError, match="waited"):
            client.next_batch(timeout=0.2)


def test_closing_in_the_middle_of_reading_says_nothing(tmp_path, caplog):
    mix = a_corpus(tmp_path, tuple(f"s{i}" for i in range(12)), records=20)

    with caplog.at_level(logging.DEBUG, "concurrent.futures"):
        for _ in range(5):
            LocalPlane(a_spec(tmp_path, mix)).close()

    assert caplog.records == []


def test_closing_twice_is_closing_once(tmp_path):
    plane = LocalPlane(a_spec(tmp_path, a_corpus(tmp_path), run_dir=tmp_path / "run"))

    plane.close()
    plane.close()


def test_what_reading_cost_is_kept_for_the_next_start_as_a_plane_is_closed(tmp_path, monkeypatch):
    mix, index = a_corpus(tmp_path), tmp_path / "index"
    before = KeptProfile(preprocess_s_per_token=1.0, block_bytes=1_000)
    keep(index, "web", before)
    # Otherwise the corpus would need a minute of reading.
    monkeypatch.setattr(kept_profile, "_LEAST_BUSY_S", 0.0)
    with OneRank(LocalPlane(a_spec(tmp_path, mix, cache_dir=index))) as rank:
        list(islice(rank, 5))
        during = kept_profiles(index, ["web"])

    after = kept_profiles(index, ["web"])["web"]
    assert during == {"web": before}
    assert 0 < after.preprocess_s_per_token < before.preprocess_s_per_token
    assert after.block_bytes == before.block_bytes


def test_a_wrong_rank_is_refused_at_the_handle_and_the_others_go_on(tmp_path):
    with LocalPlane(a_spec(tmp_path, a_corpus(tmp_path), cp=2)) as plane:
        for wrong in ((1, 0), (0, 3), (0, "0")):
            with pytest.raises(ConfigError, match="this plane has"):
                plane.handle(*wrong)
        peers = [Client(plane.handle(0, cp_rank)) for cp_rank in range(2)]

        assert [peer.next_batch().step for _ in range(8) for peer in peers] == [
            step for step in range(8) for _ in peers
        ]


def test_a_mix_for_one_rank_opens_without_ray(tmp_path):
    with open_plane(a_spec(tmp_path, a_corpus(tmp_path))) as plane:
        assert isinstance(plane, LocalPlane)


def test_files_of_many_sources_are_listed_without_a_thread_for_each(tmp_path, monkeypatch):
    started, start = [], threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: started.append(self.name) or start(self)
    )
    mix = a_mixed_corpus(tmp_path, rows=2, micro_rows=1)

    with LocalPlane(a_spec(tmp_path, mix)):
        pass

    listing = [name for name in started if "listing" in name or "within" in name]
    assert len(mix.names) > 1
    assert set(listing) == {"omniload-listing_0"}
