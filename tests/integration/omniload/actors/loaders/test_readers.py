"""Sources with several readers at once, in threads and in processes: the steps of a run with one reader each."""

import json
import os
import signal
import threading
import time
from itertools import cycle

import psutil
import pytest

from omniload.actors.local import plane as local_plane
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.roles import sources
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.machine.readers import ReadEnded, ReaderScaler, ReadersWanted
from omniload.mix.runtime import TokenCacheConfig
from omniload.source.parts import divided
from omniload.source.parts.sample_block import merged
from tests.support.plane.corpora import a_corpus, a_mixed_corpus
from tests.support.plane.local_runs import a_spec

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

STEPS = 40
FEW = 16
"""Steps enough to read each source several times before and after a change."""
WHOLE_WITHIN_S = 60


def a_mix(folder, **changes):
    # Steps of some hundred samples, so a source is read again every few of them.
    return a_corpus(folder, records=6_000, rows=256, micro_rows=64, masked=True, **changes)


def read_by(mix, readers):
    loader = mix.loader.model_copy(update={"readers": dict.fromkeys(mix.names, readers)})
    return mix.model_copy(update={"loader": loader})


def steps_of(client, count):
    return [batch_digest(client.next_batch()) for _ in range(count)]


def local_run(spec, count=STEPS):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        return steps_of(client, count), json.loads(json.dumps(client.state_dict()))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus with its mix, and the cost of a run of it with one reader for each source."""
    folder = tmp_path_factory.mktemp("corpus")
    mix = a_mix(folder)
    return folder, mix, local_run(a_spec(folder, mix))[0]


class OpenedFirst(divided.ThreadReader):
    """A reader that has the source open before any read; otherwise a busy machine would have read all steps by then."""

    def __init__(self, open_part):
        self.is_open = threading.Event()
        super().__init__(lambda: self.opened(open_part))

    def opened(self, open_part):
        part = open_part()
        self.is_open.set()
        return part

    def facts(self):
        assert self.is_open.wait(WHOLE_WITHIN_S)
        return super().facts()


@pytest.mark.parametrize("readers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_threads_that_read_parts_of_a_source_change_no_step_and_resume_in_the_midst(
    corpus, readers, monkeypatch
):
    read = []
    monkeypatch.setattr(divided, "merged", lambda parts: read.append(len(parts)) or merged(parts))
    monkeypatch.setattr(local_plane, "ThreadReader", OpenedFirst)
    folder, mix, alone = corpus

    begun, state = local_run(a_spec(folder, read_by(mix, readers)), FEW // 2)
    resumed, _ = local_run(a_spec(folder, read_by(mix, 5 - readers), state=state), FEW // 2)

    assert begun + resumed == alone[:FEW]
    # A read that the closing plane interrupts may be of one reader.
    assert set(read) - {1} == {2, 3}


def test_readers_fill_a_token_cache_and_take_their_units_from_it_without_changing_a_step(tmp_path):
    mix = a_mixed_corpus(tmp_path, records=1_000, rows=64, micro_rows=64)
    text = mix.sources["text"].model_copy(update={"unit": 4096})
    mix = mix.model_copy(update={"sources": {**mix.sources, "text": text}})
    alone, _ = local_run(a_spec(tmp_path, mix))
    mix = read_by(mix, 2)
    cache = TokenCacheConfig(path=str(tmp_path / "kept"))
    mix = mix.model_copy(update={"loader": mix.loader.model_copy(update={"token_cache": cache})})

    runs = [local_run(a_spec(tmp_path, mix))[0] for _ in range(2)]

    assert runs == [alone, alone]
    assert any(path.is_file() for path in (tmp_path / "kept").rglob("*"))


class Swinging(ReaderScaler):
    """Requests another number of readers of a source after each of its reads."""

    def handle(self, event):
        if not isinstance(event, ReadEnded):
            return ()
        number = next(self.numbers)
        return (ReadersWanted(source=event.source, readers=number, why="the test says so"),)


@pytest.mark.parametrize("numbers", [(2, 1), (1, 3, 2, 2)])
def test_readers_that_come_and_go_with_each_read_change_no_step(corpus, numbers, monkeypatch):
    folder, mix, alone = corpus
    monkeypatch.setattr(Swinging, "numbers", cycle(numbers), raising=False)
    monkeypatch.setattr(sources, "ReaderScaler", Swinging)
    read = []
    monkeypatch.setattr(divided, "merged", lambda parts: read.append(len(parts)) or merged(parts))

    swung, _ = local_run(a_spec(folder, mix))

    assert swung == alone
    assert read


# `make test` covers killed and stopped loaders, and readers as threads.
@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.started_for_real  # readers are known by their titles, which a fork of a warm Python cannot set
@pytest.mark.timeout(600)
def test_readers_and_loaders_that_are_killed_and_stopped_change_no_step(tmp_path):
    pytest.importorskip("ray")
    mix = a_mix(tmp_path)
    alone, _ = local_run(a_spec(tmp_path, mix), 4 * STEPS)
    runtime = mix.runtime.model_copy(update={"kind": "ray", "loaders": 1})
    mix = read_by(mix, 3).model_copy(update={"runtime": runtime})

    with open_plane(a_spec(tmp_path, mix, dp=2, run_dir=tmp_path / "run")) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]

        def more():
            taken = [[client.next_batch() for client in clients] for _ in range(STEPS)]
            return [combined(map(batch_digest, batches)) for batches in taken]

        steps = more()
        os.kill(a_reader().pid, signal.SIGKILL)
        steps += more()
        stopped = a_reader()
        stopped.suspend()
        steps += more()
        assert not stopped.is_running()
        loader, its = plane.pids()["loader-0"], readers_now()
        os.kill(loader, signal.SIGKILL)
        steps += more()
        assert psutil.wait_procs(its, timeout=60)[1] == []
        # The readers of the successor shadow come once that shadow has settled.
        until_s = time.monotonic() + WHOLE_WITHIN_S
        while len(readers_now()) < 4:
            assert time.monotonic() < until_s, f"{readers_now()} after {WHOLE_WITHIN_S} s"
            time.sleep(0.1)
        pids = [*readers_now(), *map(psutil.Process, plane.pids().values())]

    assert steps == alone
    assert psutil.wait_procs(pids, timeout=60)[1] == []
    said = (tmp_path / "run" / "logs" / "loader-0.log").read_text()
    assert " has ended" in said  # in the words of the call that noticed it
    assert "is stopped" in said


def readers_now():
    """Return the processes that read parts of sources."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "ReaderActor" in "".join(process.cmdline()[:1])]


def a_reader():
    return readers_now()[0]
