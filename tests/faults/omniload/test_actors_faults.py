"""Faults while a data plane runs: each reaches the rank that waits, as the error it is, and none is passed over."""

import errno
import os
import threading
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.actors.roles import constructor, loader, planner, sources
from omniload.base.clock import FakeClock
from omniload.base.errors import DefectError, IntegrityError, StateError, UnavailableError
from omniload.base.ragged import Ragged
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.machine import queue
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.place import JOURNAL_NAME
from omniload.mix.journal.reading import read_journal
from omniload.mix.journal.room import Room
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus, write_tokens

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


class FaultySource:
    """A source that does something else at scripted reads."""

    def __init__(self, source, faults):
        self._source, self._faults = source, faults
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, start, stop, without=()):
        number, self.reads = self.reads, self.reads + 1
        fault = self._faults.pop(number, None)
        if isinstance(fault, Exception):
            raise fault
        block = self._source.read(start, stop, without)
        return block if fault is None else fault(block)


@pytest.fixture
def faults(monkeypatch):
    """Faults of the only source, by number of the read; small reads, so that there are several."""
    script = {}
    real = sources.open_source
    monkeypatch.setattr(
        sources, "open_source", lambda *args, **kwargs: FaultySource(real(*args, **kwargs), script)
    )
    monkeypatch.setattr(queue, "_FIRST_READ", 20)
    return script


@pytest.fixture
def clock(monkeypatch):
    """The clock that a loader waits with."""
    fake = FakeClock()
    monkeypatch.setattr(loader, "SystemClock", lambda: fake)
    return fake


def a_spec(folder, **changes):
    mix = a_corpus(folder, ("web",), runtime={"prefetch_steps": 1})
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=1), **changes)


def batches_of(spec, count):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        return list(islice(client, count))


def until_error(spec, kind, match):
    """Return the steps handed out before the error came."""
    steps = []
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        with pytest.raises(kind, match=match):
            steps.extend(batch.step for batch in islice(client, 500))
        with pytest.raises(kind, match=match):  # and it stays so
            client.next_batch()
    return steps


@pytest.mark.parametrize(
    ("kind", "heard"), [(IntegrityError, IntegrityError), (ValueError, DefectError)]
)
@pytest.mark.parametrize("read", [0, 3])
def test_an_error_in_the_middle_of_reading_reaches_the_client(tmp_path, faults, kind, heard, read):
    def damaged(_block):
        raise kind("the shard is damaged")

    # Whenever it is read: what lies before damage is looked for once more.
    faults |= dict.fromkeys(range(read, 100), damaged)

    steps = until_error(a_spec(tmp_path), heard, "the shard is damaged")

    assert read not in faults
    assert steps == list(range(len(steps)))
    assert (len(steps) > 0) == (read > 0)


def test_an_outage_is_waited_out_and_changes_nothing(tmp_path, faults, clock, caplog):
    undisturbed = [batch_digest(batch) for batch in batches_of(a_spec(tmp_path), 6)]
    faults.update({0: UnavailableError("outage"), 1: UnavailableError("outage")})

    disturbed = [batch_digest(batch) for batch in batches_of(a_spec(tmp_path), 6)]

    assert faults == {}
    assert disturbed == undisturbed
    assert clock.slept_s == [0.1, 0.2]
    assert "source web: read again in 0.2 s: outage" in caplog.text


def test_an_outage_that_lasts_reaches_the_client_with_what_was_tried(tmp_path, faults, clock):
    faults.update({number: UnavailableError("outage") for number in range(50)})

    with (
        LocalPlane(a_spec(tmp_path)) as plane,
        Client(plane.handle(0)) as client,
        pytest.raises(UnavailableError, match="outage") as caught,
    ):
        client.next_batch()

    assert "gave up after 18 attempts" in caught.value.__notes__[0]
    assert 55 < sum(clock.slept_s) < 65


def test_closing_does_not_wait_for_an_outage_to_end(tmp_path, faults, monkeypatch):
    asleep, closing = threading.Event(), threading.Event()

    class Sleeper(FakeClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            asleep.set()
            assert closing.wait(60)

    fake = Sleeper()
    monkeypatch.setattr(loader, "SystemClock", lambda: fake)
    faults.update({number: UnavailableError("outage") for number in range(50)})
    plane = LocalPlane(a_spec(tmp_path))
    assert asleep.wait(60)
    stop = plane.loader.close
    monkeypatch.setattr(plane.loader, "close", lambda: (stop(), closing.set()))

    plane.close()

    assert len(fake.slept_s) == 1


def shortened(block):
    """Return a block whose samples hold fewer tokens than its table says."""
    tokens = block.tokens
    return replace(block, tokens=Ragged.of([tokens[i][:-1] for i in range(len(tokens))]))


def test_a_source_that_gives_fewer_tokens_than_it_reported_is_found_out(tmp_path, faults):
    faults[0] = shortened

    steps = until_error(a_spec(tmp_path), IntegrityError, r"gave \d+ tokens where \d+ were planned")

    assert steps == []


def test_a_shard_that_is_replaced_while_it_is_read_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "_FIRST_READ", 20)
    spec = a_spec(tmp_path)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        client.next_batch()
        for shard in range(2):
            documents = [np.arange(7, dtype=np.int32)] * 60
            write_tokens(tmp_path / "web" / f"{shard}.parquet", documents, rows_per_group=7)

        with pytest.raises(IntegrityError, match="changed since the source was opened"):
            list(islice(client, 500))


def test_a_step_that_cannot_be_journaled_is_not_handed_out(tmp_path, monkeypatch):
    append, write = Journal.append, os.pwrite
    full = []

    def pwrite(fd, rest, at):
        if full:
            raise OSError(errno.ENOSPC, "no space left on the device")
        return write(fd, rest, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(
        Journal,
        "append",
        lambda journal, record: (full.extend([1] * (record["step"] == 2)), append(journal, record)),
    )
    # The wait for room is given up at once.
    monkeypatch.setattr(planner, "Room", lambda: Room(lambda _: True))
    run = tmp_path / "run"

    steps = until_error(
        a_spec(tmp_path, run_dir=run), StateError, "no space left on the device, .*; make room"
    )

    assert steps == [0, 1]
    assert [record["step"] for record in read_journal(run / JOURNAL_NAME)[1]] == [0, 1]


def test_a_sample_that_is_held_no_more_reaches_the_client(tmp_path, monkeypatch):
    monkeypatch.setattr(constructor, "_TOLD_WITHIN_S", 0.5)
    spec = a_spec(tmp_path)
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        client.next_batch()
        plane.loader._machine._held.clear()

        with pytest.raises(StateError, match="released, or never read; restart the data plane"):
            list(islice(client, 500))
