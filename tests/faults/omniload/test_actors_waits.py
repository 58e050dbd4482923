"""Waits while a data plane runs: each names whom it waits for, ends at its limit, and ends with the plane."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from omniload.actors.claim import claim
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.roles import sources
from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.client import Client
from omniload.machine import queue
from omniload.machine.roster.roster import Roster
from omniload.machine.waiting import Wait
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.trainer.run_lines import write_mix

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]

_LONG_S = 120


def a_spec(folder, *, dp=1, **changes):
    mix = a_corpus(
        folder, ("web",), rows=6, micro_rows=1, runtime={"prefetch_steps": 2, "kind": "local"}
    )
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp), **changes)


class Store:
    """The store of the only source: a call to it ends when it is let go."""

    def __init__(self):
        self.asked, self.gone_on = threading.Event(), threading.Event()
        self.blocks_from = 0
        self.reads = 0

    def call(self):
        self.reads += 1
        if self.reads > self.blocks_from:
            with under_way("reads /store/web/0.parquet"):
                self.asked.set()
                assert self.gone_on.wait(_LONG_S)


class BlockedSource:
    def __init__(self, source, store):
        self._source, self._store = source, store

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, start, stop, without=()):
        self._store.call()
        return self._source.read(start, stop, without)


@pytest.fixture
def store(monkeypatch):
    found = Store()
    real = sources.open_source
    monkeypatch.setattr(
        sources, "open_source", lambda *args, **words: BlockedSource(real(*args, **words), found)
    )
    monkeypatch.setattr(queue, "_FIRST_READ", 20)
    yield found
    found.gone_on.set()


def test_a_store_that_blocks_is_named_when_the_time_has_passed_and_may_go_on(tmp_path, store):
    with LocalPlane(a_spec(tmp_path)) as plane, Client(plane.handle(0)) as client:
        assert store.asked.wait(_LONG_S)

        told_who_is_missing(
            client,
            r"rank dp=0 waited \d+ s for .* step 0.* planner .*waits for samples of 1 source \(web\).*"
            r"reads /store/web/0\.parquet for",
        )
        store.gone_on.set()

        assert client.next_batch().step == 0


def take_on(clients, timeout):
    """Take batches for ever, rank by rank."""
    while True:
        for client in clients:
            client.next_batch(timeout=timeout)


def told_who_is_missing(client, who):
    """Take batches until a short wait for one names ``who``: on a busy machine another wait may be too short."""
    until_s = time.monotonic() + _LONG_S
    while True:
        with pytest.raises(UnavailableError) as caught:
            take_on([client], 0.5)
        if re.search(who, str(caught.value)):
            return
        assert time.monotonic() < until_s, caught.value


def test_a_rank_that_never_asks_is_named_to_the_others(tmp_path):
    with LocalPlane(a_spec(tmp_path, dp=2)) as plane, Client(plane.handle(0)) as client:
        told_who_is_missing(client, r"ahead of 1 rank .* rank dp=1 has no handle")
        with Client(plane.handle(1)) as late:
            late.next_batch()
            assert client.next_batch() is not None
            told_who_is_missing(client, r"rank dp=1 .* has step 0 and has not")


def said_after(seconds):
    """Return waits that are said after so long for the first time."""

    class Said(Wait):
        def __init__(self, **words):
            super().__init__(**words)
            self._next_say_s = seconds

    return Said


def test_a_wait_is_logged_with_whom_it_is_for(tmp_path, store, monkeypatch, caplog):
    monkeypatch.setattr("omniload.actors.local.plane.Wait", said_after(0.01))
    with LocalPlane(a_spec(tmp_path)) as plane, Client(plane.handle(0)) as client:
        with pytest.raises(UnavailableError):
            client.next_batch(timeout=2.0)
        store.gone_on.set()

    said = r"rank dp=0 has waited \d+ s for the batch of step 0: constructor-0"
    assert re.search(said, caplog.text)


@contextmanager
def waiting(client):
    """Have another thread wait for batches; return the errors it got."""
    got = []

    def take():
        try:
            while True:
                client.next_batch()
        except BaseException as error:  # noqa: BLE001 -- whatever it is
            got.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    yield got
    thread.join(_LONG_S)
    assert not thread.is_alive()


def test_closing_a_plane_ends_the_wait_of_another_thread(tmp_path, store):
    plane = LocalPlane(a_spec(tmp_path))
    client = Client(plane.handle(0))
    with waiting(client) as got:
        assert store.asked.wait(_LONG_S)
        store.gone_on.set()
        plane.close()

    assert [str(error) for error in got] == ["the data plane was closed; open it again to continue"]
    with pytest.raises(UnavailableError, match="was closed"):
        plane.handle(0)


def test_several_threads_may_close_a_plane(tmp_path):
    plane = LocalPlane(a_spec(tmp_path, run_dir=tmp_path / "run"))
    threads = [threading.Thread(target=plane.close) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG_S)

    LocalPlane(a_spec(tmp_path, run_dir=tmp_path / "run")).close()


def test_closing_does_not_wait_for_a_store_that_blocks(tmp_path, store, monkeypatch, caplog):
    monkeypatch.setattr("omniload.actors.local.plane._CLOSE_S", 0.1)
    plane = LocalPlane(a_spec(tmp_path))
    assert store.asked.wait(_LONG_S)

    plane.close()

    assert "a call does not end: ['reads /store/web/0.parquet']" in caplog.text
    store.gone_on.set()
    for thread in plane._readers._threads:
        thread.join(_LONG_S)


def test_a_source_that_blocks_while_it_opens_ends_the_opening(tmp_path, monkeypatch):
    gone_on, before = threading.Event(), set(threading.enumerate())

    def blocked(source, **_):
        with under_way(f"lists hdfs://{source.name}/*"):
            assert gone_on.wait(_LONG_S)
        raise ConfigError("too late")

    monkeypatch.setattr(sources, "open_source", blocked)
    monkeypatch.setattr("omniload.actors.local.plane._CLOSE_S", 0.1)
    spec = a_spec(tmp_path)
    quick = spec.mix.runtime.model_copy(update={"batch_timeout": 5.0})
    spec = PlaneSpec(
        mix=spec.mix.model_copy(update={"runtime": quick}), base_dir=tmp_path, tree=spec.tree
    )

    with pytest.raises(
        UnavailableError, match=r"for its start.*opens source web.*lists hdfs://web"
    ):
        LocalPlane(spec)
    gone_on.set()
    # Those that began with this plane: a thread that tests before it share would never end.
    for thread in set(threading.enumerate()) - before:
        thread.join(_LONG_S)


def test_a_plane_of_a_run_is_opened_once(tmp_path):
    spec = a_spec(tmp_path, run_dir=tmp_path / "run")

    with (
        LocalPlane(spec),
        pytest.raises(
            StateError, match=rf"is open in process {os.getpid()} on .*: this process .* close\(\)"
        ),
    ):
        LocalPlane(spec)
    LocalPlane(spec).close()


def test_a_folder_that_cannot_hold_a_run_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"run's folder: .*file/run: Not a directory"):
        LocalPlane(a_spec(tmp_path, run_dir=tmp_path / "file" / "run"))


def test_a_rank_has_one_handle_at_a_time(tmp_path):
    with LocalPlane(a_spec(tmp_path)) as plane:
        with Client(plane.handle(0)), pytest.raises(StateError, match=r"rank dp=0 .* already"):
            plane.handle(0)
        with Client(plane.handle(0)) as client:
            assert client.next_batch().step == 0


_RANK = """
import signal, sys
from pathlib import Path
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import OmniloadError
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree
mix, base_dir = load_mix(Path(sys.argv[1]))
try:
    plane = open_plane(PlaneSpec(mix=mix, base_dir=base_dir, tree=ClientPlaceTree.of(dp=2)))
except OmniloadError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
print("open", flush=True)
signal.pause()
"""


@pytest.mark.scripts_start_warm
def test_ranks_of_one_launch_that_each_open_the_plane_are_refused_by_the_one_that_has_it(tmp_path):
    write_mix(tmp_path / "mix.yaml", a_spec(tmp_path).mix)

    def rank(port):
        return subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / "mix.yaml")],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )

    one, another = f"1{os.getpid()}", f"2{os.getpid()}"  # of this test alone
    first, other = rank(one), rank(another)
    try:
        assert [p.stdout.readline() for p in (first, other)] == ["open\n", "open\n"]
        second = rank(one)
        said = second.communicate(timeout=_LONG_S)[0]
        assert second.returncode == StateError.exit_code
        assert f"is open in process {first.pid} with the same mix and ranks" in said
        assert "the others join it" in said
        first.kill()
        first.wait()
        third = rank(one)  # the name went with its holder
        assert third.stdout.readline() == "open\n"
        third.kill()
        third.communicate()
    finally:
        for process in (first, other):
            process.kill()
            process.communicate()


# A name of the whole machine: another run of these tests may be under way on it.
LAUNCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}


def test_each_further_rank_of_a_launch_is_refused_however_many_there_are(tmp_path):
    spec = a_spec(tmp_path, dp=64)
    with ExitStack() as held:
        held.callback(claim(spec, LAUNCH))
        for _ in range(63):
            with pytest.raises(
                StateError, match=rf"is open in process {os.getpid()} with the same"
            ):
                claim(spec, LAUNCH)


def test_a_rank_is_refused_by_one_that_has_taken_the_name_and_does_not_listen_yet(
    tmp_path, monkeypatch
):
    spec, bound = a_spec(tmp_path, dp=2), []

    class Late(socket.socket):
        def listen(self, backlog):
            bound.append(self)

    monkeypatch.setattr("omniload.actors.claim._TRIES", 10_000)  # the timer below may be late
    with monkeypatch.context() as late:
        late.setattr(socket, "socket", Late)
        first = claim(spec, LAUNCH)
    listens = threading.Timer(0.05, lambda: socket.socket.listen(bound[0], 8))
    listens.start()

    with pytest.raises(StateError, match=rf"is open in process {os.getpid()} with the same"):
        claim(spec, LAUNCH)
    listens.join()
    first()


def test_a_name_whose_holder_ends_as_it_is_asked_is_taken(tmp_path, monkeypatch, caplog):
    spec = a_spec(tmp_path, dp=2)
    first = claim(spec, LAUNCH)

    class Asking(socket.socket):
        def connect(self, name):
            first()
            super().connect(name)

    with monkeypatch.context() as ending:
        ending.setattr(socket, "socket", Asking)
        second = claim(spec, LAUNCH)

    with pytest.raises(StateError, match="with the same mix and ranks"):
        claim(spec, LAUNCH)
    second()
    assert not caplog.messages


@pytest.mark.ray
def test_a_stopped_planner_that_nobody_replaces_is_named_and_the_plane_closes(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(Roster, "handle", lambda *_: ())
    monkeypatch.setattr("omniload.actors.ray.plane._CLOSE_S", 1.0)
    # Once its heartbeat is old, and long before the limit: a busy machine looks late.
    monkeypatch.setattr("omniload.actors.ray.rank.handle.Wait", said_after(7.0))
    spec = a_spec(tmp_path, dp=2)
    ray_mix = spec.mix.model_copy(
        update={"runtime": spec.mix.runtime.model_copy(update={"kind": "ray"})}
    )
    spec = PlaneSpec(mix=ray_mix, base_dir=tmp_path, tree=spec.tree)
    with open_plane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        for client in clients:
            client.next_batch()
        with pytest.raises(StateError, match=rf"rank dp=1 .* process {os.getpid()} on"):
            plane.handle(1)
        pid = plane.pids()["planner"]
        os.kill(pid, signal.SIGSTOP)

        with pytest.raises(UnavailableError) as caught:
            take_on(clients, 12)
        with waiting(clients[0]) as got:
            plane.close()

    assert f"planner (process {pid}, last heartbeat" in str(caught.value)
    assert "is stopped, or its machine is too busy" in str(caught.value)
    assert re.search(r"has waited \d+ s for the batch of step", caplog.text)
    assert [type(error) for error in got] == [UnavailableError]
