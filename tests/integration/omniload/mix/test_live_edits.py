"""A mix changes at random, by two shells at once and by halves, while ranks come and go: no sample is lost."""

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.base.errors import UnavailableError
from omniload.mix.edits.edit import AddSource
from omniload.mix.run_record import write_run_record
from tests.support.plane.corpora import write_texts
from tests.support.plane.edits.edited_runs import a_spec
from tests.support.plane.edits.live_edits import LiveRun
from tests.support.plane.edits.mix_commands import a_mix_file
from tests.support.trainer.run_lines import a_step
from trainer_integration.report.proof import prove
from trainer_integration.run.run_log import RunLog

ADDED = ("books", "a-new")
SHARDS = ("text/1.jsonl", "text/0.jsonl", "1.parquet", "books.1.jsonl", "none.jsonl")


def a_run(folder, monkeypatch, seed, *, kind="local", **changes):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    chance = random.Random(seed)
    path = a_mix_file(folder, rows=6, micro_rows=1)
    for shard in (1, 2):
        texts = [f"shard {shard} text {i} " * (i % 5 + 1) for i in range(60)]
        write_texts(folder / "text" / f"{shard}.jsonl", texts)
    for name in ADDED:
        for shard in (0, 1):
            texts = [f"{name} {i} " * (i % (9 - 2 * shard) + 1) for i in range(40)]
            write_texts(folder / "more" / f"{name}.{shard}.jsonl", texts)
    write_run_record(folder / "run", path, {"dp": 1})
    spec = a_spec(path, run_dir=folder / "run")
    runtime = spec.mix.runtime.model_copy(update={"elastic": True, "kind": kind, "constructors": 2})
    return LiveRun(
        random=chance,
        spec=replace(spec, mix=spec.mix.model_copy(update={"runtime": runtime})),
        names=("ids", "text", *ADDED),
        shards=SHARDS,
        added=iter([an_added(folder, name, chance.choice([0.5, 4.0])) for name in ADDED]),
        **changes,
    )


def an_added(folder, name, weight):
    source = {"type": "jsonl", "path": str(folder / "more" / f"{name}.*.jsonl")}
    return AddSource(name=name, source=source, weight=weight)


def require_unbroken(run):
    """Check that each step was trained on the samples that the edits alone give it, and no piece of a sample twice."""
    with RunLog(run.folder) as log:
        for step, digest in sorted(run.digests.items()):
            log.write(a_step(step, digest=f"{digest:016x}"))

    assert prove(run.folder).require().num_logged == 1 + max(run.digests)
    assert max(sum(run.pieces.values(), Counter()).values()) == 1


@pytest.mark.parametrize(
    "seed", [32, 37, *(pytest.param(s, marks=pytest.mark.soak) for s in range(100, 140))]
)
def test_a_run_of_threads_that_is_changed_in_every_way_is_that_of_its_edits_alone(
    tmp_path, monkeypatch, seed
):
    run = a_run(tmp_path, monkeypatch, seed, open_plane=LocalPlane)

    for _ in range(2):
        run.live(14)
        run.rest()
    run.live(14)

    require_unbroken(run)
    assert run.taken
    assert run.refused


# `make test` runs the threads above, and kills of every role during edits in simulated jobs.
@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize("seed", range(1100, 1106))
def test_a_run_of_actors_that_are_killed_meanwhile_is_that_of_its_edits_alone(
    tmp_path, monkeypatch, seed
):
    pytest.importorskip("ray")
    killed = []

    def kill(plane, chance):
        with suppress(UnavailableError):  # one that was killed earlier has not been replaced yet
            role, pid = chance.choice(sorted(plane.pids().items()))
            os.kill(pid, signal.SIGKILL)
            killed.append(role)

    run = a_run(tmp_path, monkeypatch, seed, kind="ray", open_plane=open_plane, kill=kill)

    run.live(16)
    run.rest()
    run.live(16)

    require_unbroken(run)
    assert killed
    assert run.taken
