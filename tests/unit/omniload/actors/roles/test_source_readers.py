"""The shell that has the requested number of readers for a source: its events, actions and messages."""

from types import SimpleNamespace

import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles.sources import SourceReaders
from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError
from omniload.machine import readers as machine
from omniload.machine.scaling.coming import Ahead, Coming
from omniload.machine.scaling.measured import Reading
from omniload.source.parts.reader import OpenPart, ReaderLostError
from tests.property.omniload.source.test_records import a_source
from tests.support.plane.builders import a_mix

UNITS = [[[u, r] for r in range(4)] for u in range(4)]


class Reader:
    """A reader that has its source open at once."""

    def __init__(self, started):
        self.opened, self.is_closed = OpenPart(source=a_source(UNITS)[0]), False
        started.append(self)

    def facts(self):
        return self.opened.source.facts

    def read(self, *asked):
        return lambda: self.opened.read(*asked)

    def close(self):
        self.is_closed = True


@pytest.fixture
def a_loader(monkeypatch):
    # The processor time of a few records is nothing compared with the seconds of the clock here.
    monkeypatch.setattr(machine, "CORE", 0.0)
    monkeypatch.setattr(machine, "_WORTH", -1.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))

    def made(readers=1, **given):
        clock, activity, started = FakeClock(), Activity("loader-0"), []
        its = SourceReaders(lambda _opening, _number: Reader(started), activity, clock)
        opening = SimpleNamespace(name="web", number=0, mix=a_mix(loader={"readers": given}))
        source = its.of(opening, a_source(UNITS)[0], readers, None)

        def reads(seconds, share):
            for _ in range(seconds):
                with its.reading(0, is_lacked=False):
                    source.read(0, 8)
                    clock.advance(share)
                clock.advance(1 - share)
                its.look()

        return SimpleNamespace(
            its=its, source=source, started=started, reads=reads, clock=clock, activity=activity
        )

    return made


def figures(loader):
    found = loader.activity.figures.read()
    return found["readers"], found["reader_changes_total"]


def test_readers_come_while_a_source_is_read_all_the_time_and_go_when_it_is_not(a_loader, caplog):
    loader = a_loader()

    loader.reads(50, share=1.0)
    assert (loader.source.so_far.readers, figures(loader)) == (2, (1, 1))
    loader.reads(240, share=0.1)

    assert (loader.source.so_far.readers, figures(loader)) == (1, (0, 2))
    assert [reader.is_closed for reader in loader.started] == [True]
    assert "source web is read by 2 from now on: it is read 100% of the time" in caplog.text
    reading = Reading.in_figures(loader.activity.figures.read())["web"]
    assert (reading.readers, reading.share) == (1, pytest.approx(0.1, rel=0.1))


def test_readers_of_a_source_that_nobody_draws_from_any_more_end(a_loader):
    loader = a_loader(3)
    loader.reads(5, share=0.9)

    for _ in range(200):
        loader.clock.advance(1.0)
        loader.its.look()

    assert [reader.is_closed for reader in loader.started] == [True, True]


def test_readers_for_a_coming_step_are_started_before_it_and_it_is_told_for_which(a_loader, caplog):
    loader = a_loader()
    coming = Coming(steps=(0, 99, 100), shares_S={0: (0.1, 0.1, 0.6)})

    for step in range(90):
        loader.reads(1, share=0.15)
        loader.its.look(Ahead(step=step, coming=coming))
        if loader.started:
            break

    assert len(loader.started) == 1
    assert loader.source.so_far.readers == 1  # no read has been reported since
    reading = Reading.in_figures(loader.activity.figures.read())["web"]
    assert (reading.readers, reading.for_step) == (2, 100)
    assert "web is read by 2 from now on: from step 100 on its share is 60%" in caplog.text


def test_readers_that_were_never_started_have_no_figures(a_loader):
    loader = a_loader(3)

    loader.its.look()

    assert figures(loader) == (0, 0)
    assert Reading.in_figures(loader.activity.figures.read()) == {}


def test_a_number_of_readers_in_the_mix_is_kept_and_a_single_one_is_the_source_itself(a_loader):
    loader = a_loader(2, web=2)
    loader.reads(200, share=1.0)

    assert loader.source.so_far.readers == 2
    assert figures(loader) == (1, 0)
    alone = a_loader(1, web=1)
    assert not hasattr(alone.source, "divide")


def test_a_loader_whose_readers_are_lost_again_and_again_reads_alone_and_says_so(
    a_loader, monkeypatch
):
    loader = a_loader(2, web=2)

    def lost(*_asked):
        raise ReaderLostError("it was killed")

    monkeypatch.setattr(Reader, "facts", lost)
    loader.reads(10, share=0.1)

    reading = Reading.in_figures(loader.activity.figures.read())["web"]
    assert (reading.readers, reading.lost, len(loader.started)) == (1, 6, 6)
    assert "because 6 others were lost one after the other" in reading.said
    monkeypatch.setattr(Reader, "facts", lambda self: self.opened.source.facts)
    loader.reads(601, share=0.1)
    assert Reading.in_figures(loader.activity.figures.read())["web"].lost == 0
    assert len(loader.started) == 7


def test_readers_of_sources_that_are_dropped_end_with_them(a_loader):
    loader = a_loader(2)
    loader.reads(5, share=1.0)

    assert Reading.in_figures(loader.activity.figures.read())["web"].readers == 2
    loader.its.drop([0, 7])
    # From now on, the loader that serves the source reports its figures.
    assert figures(loader) == (0, 0)
    assert Reading.in_figures(loader.activity.figures.read()) == {}
    loader.reads(100, share=1.0)

    assert [reader.is_closed for reader in loader.started] == [True]
    assert loader.source.so_far.readers == 1


def test_readers_of_a_source_that_is_refused_as_it_is_added_end(a_loader):
    loader = a_loader(2)

    with loader.its.unless_refused(0):
        loader.reads(5, share=1.0)
    assert [reader.is_closed for reader in loader.started] == [False]
    with (
        pytest.raises(ConfigError, match="none of its first records"),
        loader.its.unless_refused(0),
    ):
        raise ConfigError("none of its first records can be drawn")

    assert [reader.is_closed for reader in loader.started] == [True]
