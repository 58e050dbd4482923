"""A job on Ray whose mix needs a heavy source for a while: readers come and go, and no step changes."""

import os
import time

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from omniload.actors.opening import open_plane
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.mix.edits.edits_file import read_history
from omniload.mix.run_record import write_run_record
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.edited_runs import a_spec, replayed, taken_by
from tests.support.plane.edits.mix_commands import a_mix_file, json_of

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Readers are known by their titles, which a fork of a warm Python cannot set.
    pytest.mark.started_for_real,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

FEW = 4
WITHIN_S = 240.0
"""Twenty seconds until readers are added and two minutes until they are removed, on a machine with other work."""
PACE_S = 0.2
STAGE_AT = 400
BEFORE = 20
"""More steps than are planned and read ahead."""


def a_slow_tokenizer(folder):
    """Write a tokenizer that merges letters at random: each word of a text is different, and takes its time."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = words(0, 2_000)
    library.train_from_iterator([texts], trainers.BpeTrainer(vocab_size=2_000, show_progress=False))
    library.save(str(folder / "tokenizer.json"))


def words(seed, count):
    letters = np.random.default_rng(seed).integers(ord("a"), ord("i"), (count, 24), np.uint8)
    return " ".join(bytes(word).decode() for word in letters)


def readers_now():
    """Return the processes that read parts of sources."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "ReaderActor" in "".join(process.cmdline()[:1])]


@pytest.fixture
def a_heavy_mix(tmp_path, monkeypatch):
    """Return a function that writes a mix with a source which needs several readers at a larger share."""
    cores = len(os.sched_getaffinity(0))
    # The test passed with a load of eight for each core. Under a higher load, a reader gets less of a core than it
    # needs.
    if cores < 2 or os.getloadavg()[0] > 8 * cores:
        pytest.skip("NOT TESTED: no core is there for a reader beside the loader")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    a_slow_tokenizer(tmp_path)

    def made(**changes):
        path = a_mix_file(
            tmp_path,
            rows=16,
            micro_rows=1,
            pack={"overlong": "truncate"},
            tokenizer={"type": "bpe", "path": "tokenizer.json"},
            runtime={"kind": "ray"},
            **changes,
        )
        for shard in range(8):
            texts = [words(100 * shard + number, 400) for number in range(8)]
            write_texts(tmp_path / "text" / f"{shard}.jsonl", texts)
        write_run_record(tmp_path / "run", path, {"dp": 1})
        return path

    return made


def lines_of_loaders(run_dir):
    return "\n".join(log.read_text() for log in (run_dir / "logs").glob("loader-*.log"))


@pytest.mark.soak  # a minute and a half, because the cost of a source is not known at once
@pytest.mark.timeout(1200)
def test_before_a_stage_of_the_mix_a_reader_is_there_and_no_step_changes(tmp_path, a_heavy_mix):
    stages = [
        {"from_step": 0, "weights": {"ids": 9, "text": 1}},
        {"from_step": STAGE_AT, "weights": {"ids": 1, "text": 9}},
    ]
    path, run_dir, digests = a_heavy_mix(mix={"stages": stages}), tmp_path / "run", []

    with open_plane(a_spec(path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:
        while len(digests) < STAGE_AT - BEFORE:
            digests += taken_by([client], 1)
            time.sleep(PACE_S)
        assert len(readers_now()) >= 1
        # No step of the stage had to be read for that.
        assert f"from step {STAGE_AT} on its share is 90%, and 10% now" in lines_of_loaders(run_dir)
        digests += taken_by([client], 2 * BEFORE)

    assert replayed(a_spec(path, readers={"text": 1}), len(digests)) == digests


@pytest.mark.soak  # four minutes: readers are added after twenty seconds, and removed after two minutes
@pytest.mark.timeout(1200)
def test_readers_come_as_the_weight_of_a_source_rises_and_go_as_it_falls(tmp_path, a_heavy_mix):
    path = a_heavy_mix(weights={"ids": 1.0, "text": 1e-6})
    run_dir, digests = tmp_path / "run", []

    with open_plane(a_spec(path, run_dir=run_dir)) as plane, Client(plane.handle(0)) as client:

        def train_until(holds, *, pace_s=0.0):
            until_s = time.monotonic() + WITHIN_S
            while not holds():
                assert time.monotonic() < until_s, f"readers are {readers_now()}"
                digests.extend(taken_by([client], FEW))
                time.sleep(pace_s)

        digests += taken_by([client], FEW)
        assert readers_now() == []
        json_of("set", run_dir, "ids=1", "text=9")
        train_until(readers_now)
        first = readers_now()
        digests += taken_by([client], 4 * FEW)
        json_of("set", run_dir, "text=0")
        train_until(lambda: not readers_now(), pace_s=PACE_S)
        digests += taken_by([client], FEW)

    assert psutil.wait_procs(first, timeout=60)[1] == []
    said = lines_of_loaders(run_dir)
    assert "source text is read by 2 from now on" in said
    assert "source text is read by 1 from now on" in said
    edits = read_history(run_dir, load_mix(path)[0]).edits
    assert replayed(a_spec(path, readers={"text": 1}, edits=edits), len(digests)) == digests
