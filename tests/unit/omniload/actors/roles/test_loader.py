"""The shell of a source loader: the reads of a loader that takes over, and the end of a loader that reads."""

import itertools
import queue
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles import loader as loader_module
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.roles.sources import SourceReaders
from omniload.base.clock import FakeClock
from omniload.base.errors import IntegrityError, UnavailableError
from omniload.base.ragged import Ragged
from omniload.machine.messages import ReadAhead, TakeOver
from omniload.source.kept_profile import KeptProfile, RunningCosts, keep, kept_profiles
from omniload.source.parts.sample_block import SampleBlock
from tests.support.plane.builders import a_mix, a_table

WITHIN_S = 60.0


class AnOpening:
    """Opens a source whose reads are answered by ``answer``."""

    answer: staticmethod
    facts = None
    refusals: tuple = ()
    """Errors that opening source 0 raises, one after another."""

    def __init__(self, *, mix, number, **_):
        self.name, self.number = mix.names[number], number

    def open(self, *_):
        if self.number == 0 and self.refusals:
            type(self).refusals, refusal = self.refusals[1:], self.refusals[0]
            raise refusal
        return self

    def share(self, memory):
        """Hold nothing."""

    def give_way(self):
        """Hold nothing."""

    def block_stop(self, position):
        return position + 1

    def read(self, start, stop, without):
        type(self).answer(self.number, start, stop)
        lengths = [1] * (stop - start)
        tokens = Ragged.of([[7]] * (stop - start))
        return SampleBlock(table=a_table(lengths, start=start), tokens=tokens)

    def decode_ahead(self, start, stop, without):
        """Decode blocks of ten records: that of ``start``, and the next one."""
        type(self).answer(self.number, start, without)
        end = start // 10 * 10 + 10
        return end + 10 if stop > end else end


@pytest.fixture
def clock():
    return FakeClock()


class Following(LoaderShell):
    """A loader that opens in the place of a lost one, or to stand by."""

    opens_again_s = (0.1, 0.2)


@pytest.fixture
def a_shell(monkeypatch, clock):
    def opened(answer, kind=LoaderShell, activity=None, cache_dir=None):
        monkeypatch.setattr(AnOpening, "answer", staticmethod(answer), raising=False)
        monkeypatch.setattr(loader_module, "SourceOpening", AnOpening)
        monkeypatch.setattr(loader_module, "SystemClock", lambda: clock)
        activity = activity or Activity("loader-0")
        return kind(a_mix(), [0, 1], base_dir=Path(), cache_dir=cache_dir, activity=activity)

    return opened


def test_a_loader_that_takes_over_reads_its_sources_beside_each_other(a_shell):
    both = threading.Barrier(2)
    held = [Future(), Future()]

    def answer(source, start, stop):
        both.wait(WITHIN_S)
        held[source].set_result((start, stop))

    shell = a_shell(answer)
    shell.take_over(TakeOver(ranges={0: (3, 5), 1: (0, 9)}))

    assert [each.result(WITHIN_S) for each in held] == [(3, 5), (0, 9)]
    shell.close()


@pytest.mark.parametrize("waits_s", [0.05, WITHIN_S])
def test_a_take_over_waits_for_its_reads_no_longer_than_it_is_told(a_shell, waits_s):
    goes_on = threading.Event()
    if waits_s == WITHIN_S:
        goes_on.set()
    read = []

    def answer(source, start, stop):
        assert goes_on.wait(WITHIN_S)
        read.append((source, start, stop))

    shell = a_shell(answer)
    shell.take_over(TakeOver(ranges={0: (3, 5), 1: (0, 9)}), waits_s=waits_s)

    assert sorted(read) == ([(0, 3, 5), (1, 0, 9)] if goes_on.is_set() else [])
    goes_on.set()
    shell.close()


def test_a_take_over_reads_its_other_sources_although_one_cannot_be_read(a_shell, monkeypatch):
    said = Future()
    monkeypatch.setattr(loader_module._LOG, "warning", lambda _, error: said.set_result(str(error)))
    read = queue.SimpleQueue()

    def answer(source, start, stop):
        if source == 0:
            raise IntegrityError("cut short")
        read.put((start, stop))

    shell = a_shell(answer)
    shell.take_over(TakeOver(ranges={0: (0, 8), 1: (0, 2050)}))

    assert said.result(WITHIN_S) == "cut short"
    left = set(range(2050))
    while left:
        left -= set(range(*read.get(timeout=WITHIN_S)))
    shell.close()


def test_a_loader_that_is_closed_ends_a_read_with_the_part_under_way(a_shell):
    parts = []

    def answer(source, start, stop):
        parts.append((start, stop))
        shell.close()

    shell = a_shell(answer)

    with pytest.raises(UnavailableError, match="closed while code was read"):
        shell.read_ahead(ReadAhead(source=0, start=7, stop=5000))
    assert parts == [(7, 23)]


def test_a_range_is_reported_and_held_as_one_however_many_parts_it_is_read_in(a_shell):
    parts = []
    shell = a_shell(lambda source, start, stop: parts.append((start, stop)))

    report = shell.read_ahead(ReadAhead(source=0, start=0, stop=3000))

    assert parts[0] == (0, 16)
    assert [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]]
    assert (report.table.start, report.table.stop, len(report.table)) == (0, 3000, 3000)
    again = len(parts)
    shell.read_ahead(ReadAhead(source=0, start=10, stop=2000))
    assert len(parts) == again, "what is held is not read again"


def test_a_long_read_is_reported_in_parts_and_a_take_over_reads_to_the_end(a_shell, clock):
    read, done = [], threading.Event()

    def answer(source, start, stop):
        read.append((source, start, stop))
        clock.sleep(0.1 * (stop - start))
        if source == 1 and stop == 40:
            done.set()

    shell = a_shell(answer)

    report = shell.read_ahead(ReadAhead(source=0, start=0, stop=1000))
    shell.take_over(TakeOver(ranges={1: (0, 40)}))

    assert (report.table.start, report.table.stop) == (0, 16)
    assert report.size_bytes == 16 * 4 + 17 * 8
    assert done.wait(WITHIN_S)
    own = [(a, b) for source, a, b in read if source == 1]
    assert [a for a, _ in own] == [0, *(b for _, b in own[:-1])]
    shell.close()


def test_a_shadow_decodes_each_source_once_for_all_positions_that_lie_beside_each_other(a_shell):
    decoded = []
    shell = a_shell(lambda *what: decoded.append(what))

    for floor in (3, 4, 12, 13, 2):
        shell.decode_ahead(TakeOver(ranges={0: (floor, floor), 1: (0, 4)}))

    assert decoded == [(0, 3, ()), (1, 0, ()), (0, 12, ()), (0, 2, ())]


def test_a_shadow_decodes_the_next_block_before_reads_come_to_it(a_shell):
    decoded = []
    shell = a_shell(lambda source, position, _without: decoded.append(position))

    # As much again as is known ahead, at first: up to record 9, in the first block.
    shell.decode_ahead(TakeOver(ranges={0: (1, 5)}))
    # As far as it came, twice over, where that is more: up to record 8, then 15.
    shell.decode_ahead(TakeOver(ranges={0: (4, 6)}))
    assert decoded == [1]
    shell.decode_ahead(TakeOver(ranges={0: (6, 9)}))
    assert decoded == [1, 6]

    # What it holds reaches up to record 20.
    shell.decode_ahead(TakeOver(ranges={0: (8, 12)}))
    assert decoded == [1, 6]
    shell.decode_ahead(TakeOver(ranges={0: (12, 16)}))
    assert decoded == [1, 6, 12]


def test_a_shadow_leaves_out_shards_where_a_loader_that_takes_over_would(a_shell):
    decoded = []
    shell = a_shell(lambda *what: decoded.append(what))

    without = {0: (5, (2,)), 1: (6, (3,))}
    shell.decode_ahead(TakeOver(ranges={0: (5, 40), 1: (5, 40)}, without=without))

    assert decoded == [(0, 5, (2,)), (1, 5, ())]


def test_a_source_that_cannot_be_decoded_is_passed_over_and_tried_again_later(a_shell):
    decoded = []

    def answer(source, position, _without):
        if source == 0:
            raise UnavailableError("the store does not answer")
        decoded.append(position)

    shell = a_shell(answer)
    for floor in (0, 500, 1023):
        shell.decode_ahead(TakeOver(ranges={0: (floor, 2000), 1: (7, 9)}))
    assert decoded == [7]

    AnOpening.answer = staticmethod(lambda _source, position, _without: decoded.append(position))
    shell.decode_ahead(TakeOver(ranges={0: (1024, 2000), 1: (7, 9)}))

    assert decoded == [7, 1024]


def test_a_shadow_decodes_nothing_of_sources_that_it_has_not_open_nor_once_it_is_closed(a_shell):
    decoded = []
    shell = a_shell(lambda *what: decoded.append(what))

    shell.decode_ahead(TakeOver(ranges={7: (0, 9)}))
    shell.close()
    shell.decode_ahead(TakeOver(ranges={0: (0, 9)}))

    assert decoded == []


def test_a_shadow_that_takes_over_decodes_nothing_more_ahead(a_shell):
    decoded, shell = [], None

    def answer(source, position, _without):
        decoded.append((source, position))
        shell.take_over(TakeOver(ranges={}))

    shell = a_shell(answer)
    shell.decode_ahead(TakeOver(ranges={0: (3, 40), 1: (0, 9)}))
    shell.decode_ahead(TakeOver(ranges={1: (0, 9)}))
    shell.close()

    assert decoded == [(0, 3)]


def test_a_source_that_was_dropped_and_opened_anew_is_decoded_again(a_shell):
    decoded = []
    shell = a_shell(lambda source, position, _without: decoded.append((source, position)))
    shell.decode_ahead(TakeOver(ranges={0: (3, 5)}))

    shell.drop([0])
    shell.open_more([0], a_mix())
    shell.decode_ahead(TakeOver(ranges={0: (4, 5)}))

    assert decoded == [(0, 3), (0, 4)]


OUTAGES = (UnavailableError("outage 0"), UnavailableError("outage 1"), UnavailableError("outage 2"))


def test_a_replacement_of_a_loader_opens_its_sources_once_their_store_answers(
    a_shell, clock, monkeypatch
):
    monkeypatch.setattr(AnOpening, "refusals", OUTAGES[:2])

    a_shell(lambda *_: None, Following).close()

    assert clock.slept_s == [0.1, 0.2]


def test_a_replacement_of_a_loader_gives_up_on_a_store_that_goes_on_refusing(
    a_shell, clock, monkeypatch
):
    monkeypatch.setattr(AnOpening, "refusals", OUTAGES)

    with pytest.raises(UnavailableError, match="outage 2"):
        a_shell(lambda *_: None, Following)
    assert clock.slept_s == [0.1, 0.2]


def test_whoever_opens_a_plane_is_told_of_an_outage_at_once(a_shell, clock, monkeypatch):
    monkeypatch.setattr(AnOpening, "refusals", OUTAGES)

    with pytest.raises(UnavailableError, match="outage 0"):
        a_shell(lambda *_: None)
    assert clock.slept_s == []


def test_while_a_store_refuses_the_role_says_so_and_why(a_shell, clock, monkeypatch):
    activity, said = Activity("loader-0"), []
    refusals = [UnavailableError("the token has expired")]

    def answer(*_):
        if refusals:
            raise refusals.pop()

    shell = a_shell(answer, activity=activity)
    monkeypatch.setattr(clock, "sleep", lambda _: said.extend(activity.progress().tasks))
    shell.read_ahead(ReadAhead(source=0, start=0, stop=9))

    assert [task.doing for task in said] == [
        "has source code read again, as its store refused (the token has expired),"
    ]
    assert activity.progress().tasks == ()
    shell.close()


def test_once_a_store_answers_again_the_role_says_what_it_reads_as_before(a_shell):
    activity, said = Activity("loader-0"), []
    refusals = [UnavailableError("the token has expired")]

    def answer(*_):
        said.extend(task.doing for task in activity.progress().tasks)
        if refusals:
            raise refusals.pop()

    shell = a_shell(answer, activity=activity)
    shell.read_ahead(ReadAhead(source=0, start=0, stop=200))

    reads, refused, *later = said
    assert "as its store refused" in refused
    assert later
    assert set(later) == {reads}
    shell.close()


def test_of_a_long_error_of_a_store_a_heartbeat_has_the_first_letters(a_shell, clock, monkeypatch):
    activity, said = Activity("loader-0"), []
    refusals = [UnavailableError("9 9 9 9 9 " * 50)]

    def answer(*_):
        if refusals:
            raise refusals.pop()

    shell = a_shell(answer, activity=activity)
    monkeypatch.setattr(clock, "sleep", lambda _: said.extend(activity.progress().tasks))
    shell.read_ahead(ReadAhead(source=0, start=0, stop=9))

    assert [task.doing.count("9") for task in said] == [100]  # and a space after each
    shell.close()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_what_reading_costs_in_a_job_is_kept_for_the_next_start_as_far_as_it_is_known(
    a_shell, clock, monkeypatch, tmp_path, before, after
):
    measured = KeptProfile(preprocess_s_per_token=1e-6, block_bytes=1_000)
    keep(tmp_path, "code", measured)
    spent_s, keeps = itertools.count(step=2.0), queue.SimpleQueue()

    class Noted(RunningCosts):
        def keep(self):
            super().keep()
            keeps.put("kept")

    monkeypatch.setattr(loader_module, "RunningCosts", Noted)
    shell = a_shell(lambda *_: None, cache_dir=tmp_path)
    monkeypatch.setattr(loader_module.time, "thread_time", lambda: next(spent_s))
    # If several processes read a source, this thread spends a part of the time, also when they begin or cease to
    # read.
    readers = itertools.cycle((before, after))
    monkeypatch.setattr(SourceReaders, "read_by", lambda self, number: next(readers))

    def kept():
        return kept_profiles(tmp_path, ["code"])["code"].preprocess_s_per_token

    shell.read_ahead(ReadAhead(source=0, start=0, stop=1000))
    at_once = kept()
    clock.advance(61.0)
    shell.read_ahead(ReadAhead(source=0, start=1000, stop=2000))
    keeps.get(timeout=WITHIN_S)
    after_a_minute = kept()
    shell.read_ahead(ReadAhead(source=0, start=2000, stop=2500))
    shell.keep_costs()
    shell.close()

    assert at_once == 1e-6
    assert (after_a_minute, kept()) == ((2e-3, 4e-3) if before == after == 1 else (1e-6, 1e-6))


def test_a_folder_of_costs_that_hangs_holds_up_neither_reads_nor_the_end(
    a_shell, clock, monkeypatch, tmp_path, caplog
):
    begun, answers, answered = threading.Event(), threading.Event(), []

    class Hanging(RunningCosts):
        def keep(self):
            begun.set()
            answered.append(answers.wait(WITHIN_S))

    monkeypatch.setattr(loader_module, "RunningCosts", Hanging)
    monkeypatch.setattr(loader_module, "_KEEP_S", 0.01)
    shell = a_shell(lambda *_: None, cache_dir=tmp_path)
    clock.advance(61.0)

    shell.read_ahead(ReadAhead(source=0, start=0, stop=10))
    assert begun.wait(WITHIN_S)
    shell.read_ahead(ReadAhead(source=0, start=10, stop=20))
    shell.close()
    shell.keep_costs()

    assert not answered
    assert f"{tmp_path} did not answer within 0 s" in caplog.text
    answers.set()


def test_a_fault_in_keeping_costs_is_told_and_ends_no_read(a_shell, clock, monkeypatch, caplog):
    class Faulty(RunningCosts):
        def keep(self):
            raise KeyError("web")

    monkeypatch.setattr(loader_module, "RunningCosts", Faulty)
    shell = a_shell(lambda *_: None)

    shell.keep_costs()
    shell.close()

    assert "a fault of omniload itself in a source loader: KeyError" in caplog.text
