"""The number of readers of a source: when readers are added, when they are removed, and why none is added."""

import pytest

from omniload.machine.readers import ReadBegun, ReadEnded, ReaderScaler, TimePassed
from omniload.machine.scaling.coming import Ahead, Coming
from omniload.machine.scaling.measured import Reading

WEB = 0
READ_S = 0.5


class Job:
    """One source with slow reads, and a loader that obeys commands."""

    def __init__(self, readers=1, *, is_given=False, cores=16, most=8):
        self.scaler = ReaderScaler(cores=cores, most=most)
        self.scaler.follow(WEB, readers, is_given=is_given)
        self.now_s, self.readers, self.said = 0.0, readers, []
        self.coming, self.was_ahead = None, []

    def goes_on(self, seconds, *, work, core=1.0, gains=True, dividing=None, lacked=False):
        """Read data that takes one reader ``work`` seconds a second; return the numbers of readers since."""
        changes = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            readers = self.readers if dividing is None else dividing
            share = min(1.0, work / (readers if gains else 1) / core)
            took_s = READ_S * share
            changes += self.told(ReadBegun(now_s=self.now_s, source=WEB, is_lacked=lacked))
            self.now_s += took_s
            tokens = round(1000 * took_s * core * (readers if gains else 1))
            ended = ReadEnded(
                now_s=self.now_s, source=WEB, busy_s=took_s * core, tokens=tokens, readers=readers
            )
            changes += self.told(ended)
            self.now_s += READ_S - took_s
            changes += self.told(TimePassed(now_s=self.now_s, ahead=self.ahead()))
        return changes

    def ahead(self):
        """One step a second is planned; the coming weights are reported as the planner reports them."""
        step, coming = int(self.now_s), self.coming
        return Ahead(step=step, coming=coming if coming and step < coming.steps[-1] else None)

    def to_rise(self, step, before, then, *, drawn=None):
        """Let the share of the source jump at a coming step."""
        drawn_S = {} if drawn is None else {WEB: drawn}
        steps, shares = (int(self.now_s), step - 1, step), (before, before, then)
        self.coming = Coming(steps=steps, shares_S={WEB: shares}, drawn_S=drawn_S)

    def idles(self, seconds):
        """Read nothing for so long, while another source is read; return the numbers of readers since."""
        self.scaler.follow(1, 1, is_given=True)
        changes, until_s = [], self.now_s + seconds
        while self.now_s < until_s:
            changes += self.told(ReadBegun(now_s=self.now_s, source=1))
            self.now_s += 1
            ended = ReadEnded(now_s=self.now_s, source=1, busy_s=1, tokens=9, readers=1)
            changes += self.told(ended)
            changes += self.told(TimePassed(now_s=self.now_s, ahead=self.ahead()))
        return changes

    def told(self, event):
        found = self.scaler.handle(event)
        for command in found:
            self.readers = command.readers
            self.said.append(command.why)
            self.was_ahead.append(command.is_ahead)
        return [command.readers for command in found]


def test_a_source_that_is_read_all_the_time_gets_readers_until_they_keep_up():
    job = Job()

    assert job.goes_on(300, work=3.0) == [2, 3, 5]
    assert job.goes_on(3600, work=3.0) == []
    assert "of the time, with 1.00 of a core" in job.said[0]


def test_the_time_in_which_a_planner_that_lacks_a_source_asks_for_it_again_is_the_sources_too():
    assert Job().goes_on(120, work=0.7) == []
    assert Job().goes_on(60, work=0.7, lacked=True) == [2]
    # One that is drawn from now and then is lacked each time, and not read any more for that.
    assert Job(2).goes_on(300, work=0.1, lacked=True) == [1]


def test_a_burst_adds_nobody_and_a_pause_ends_nobody():
    job = Job(2)

    assert job.goes_on(15, work=9.0) == []
    assert job.goes_on(60, work=0.8) == []
    job.now_s += 3600
    assert job.goes_on(60, work=1.2) == []


@pytest.mark.parametrize("first_s", [0, 5, 25])
def test_a_store_that_is_slow_for_a_while_ends_nobody_who_was_just_added(first_s):
    job = Job()
    job.goes_on(30, work=8.0)

    assert job.goes_on(first_s, work=8.0) + job.goes_on(20, work=8.0, core=0.05) in ([], [2])
    assert job.goes_on(200, work=8.0)[-3:] == [3, 5, 8]


def test_a_core_that_does_not_come_back_is_waited_for_two_minutes_and_no_more():
    job = Job()
    assert job.goes_on(40, work=8.0) == [2]

    assert job.goes_on(100, work=8.0, core=0.4) == []
    assert job.goes_on(40, work=8.0, core=0.4) == [1]
    assert job.goes_on(1800, work=8.0) == []


def test_of_readers_that_have_little_to_do_as_many_stay_as_keep_up():
    job = Job(6)

    assert job.goes_on(110, work=1.0) == []
    assert job.goes_on(60, work=1.0) == [2]
    assert job.goes_on(3600, work=1.0) == []
    assert "read 17% of the time" in job.said[0]


def test_a_source_that_falls_away_keeps_its_loader_alone():
    job = Job(4)
    job.goes_on(60, work=3.0)

    changes = [change for _ in range(200) for change in job.goes_on(1, work=0.0)]

    assert changes[-1] == job.readers == 1


def test_readers_that_wait_for_a_store_or_a_core_get_no_others():
    job = Job()

    assert job.goes_on(600, work=4.0, core=0.3) == []


def test_readers_that_make_no_read_quicker_go_again_and_are_not_tried_for_an_hour():
    job = Job()

    assert job.goes_on(300, work=4.0, gains=False) == [2, 1]
    assert "2 read it 1.00 times as quickly as 1" in job.said[1]
    assert job.goes_on(3000, work=4.0, gains=False) == []
    assert job.goes_on(900, work=4.0, gains=False) == [2, 1]


def test_a_number_that_was_given_stays():
    for work in (0.1, 9.0):
        assert Job(2, is_given=True).goes_on(900, work=work) == []


def test_while_others_open_the_source_no_more_are_asked_for_and_none_go():
    job = Job(3)

    assert job.goes_on(900, work=9.0, dividing=1) == []
    # One that is enough by itself need not wait for them.
    assert job.goes_on(300, work=0.3, dividing=1) == [1]


def test_there_are_no_more_readers_than_cores_over_all_sources():
    job = Job(cores=4)
    job.scaler.follow(1, 2, is_given=True)

    assert job.goes_on(900, work=9.0) == [2, 3]
    job.scaler.forget(1)
    assert job.goes_on(300, work=9.0) == [4]


def test_what_was_said_of_a_source_that_is_gone_is_passed_over():
    job = Job(2)
    job.scaler.forget(WEB)

    assert job.goes_on(300, work=9.0) == []
    assert job.scaler.readings_S == {}


def test_readers_are_there_a_minute_before_a_stage_that_needs_them_and_stay_for_it():
    job = Job()
    job.to_rise(500, 0.1, 0.4)

    assert job.goes_on(430, work=0.5) == []
    assert job.goes_on(69, work=0.5) == [4]
    assert job.was_ahead == [True]
    assert job.said == ["from step 500 on its share is 40%, and 10% now"]
    assert job.scaler.readings_S[WEB].for_step == 500
    assert job.goes_on(3600, work=2.0) == []
    assert job.scaler.readings_S[WEB].for_step == 0


def test_a_source_that_is_not_drawn_yet_gets_the_readers_it_had_or_those_its_profile_asks_for():
    job = Job(3)
    job.to_rise(1000, 0.0, 0.5)
    assert job.idles(900) == [1]
    assert job.idles(99) == [3]

    job.goes_on(600, work=1.2)
    assert job.readers == 2
    job.idles(600)
    job.to_rise(int(job.now_s) + 200, 0.0, 0.5, drawn=0.25)
    assert (job.readers, job.idles(199)) == (1, [4])


def test_a_step_that_is_planned_away_keeps_nobody():
    job = Job()
    job.to_rise(100, 0.1, 0.4)
    assert job.goes_on(90, work=0.6) == [4]

    job.coming = None
    assert job.goes_on(300, work=0.6) == [1]


def test_readers_for_a_stage_prove_their_worth_in_it_and_are_not_tried_again():
    job = Job()
    job.to_rise(100, 0.1, 0.4)
    assert job.goes_on(99, work=0.6) == [4]

    assert job.goes_on(200, work=4.0, gains=False) == [1]
    job.to_rise(600, 0.1, 0.4)
    assert job.goes_on(600, work=0.6, gains=False) == []


@pytest.mark.parametrize("changes", [{"core": 0.3}, {"cores": 1}, {"is_given": True}])
def test_no_readers_come_for_a_stage_where_they_would_not_help_or_their_number_is_given(changes):
    core = changes.pop("core", 1.0)
    job = Job(**changes)
    job.to_rise(200, 0.1, 0.4)

    assert job.goes_on(199, work=0.6 * core, core=core) == []


@pytest.mark.parametrize(
    ("reading", "why"),
    [
        (
            Reading(readers=2, share=0.3, core=1.0, for_step=500),
            "by 2, 30% of the time, of whom some are there for step 500",
        ),
        (Reading(readers=3, share=0.5, core=1.0), "by 3, 50% of the time, which is enough"),
        (Reading(readers=1, share=0.9, core=0.2), "by 1, 90% of the time, who wait for its store"),
        (Reading(readers=2, share=1.0, core=0.9), "by 2, 100% of the time, too slowly"),
    ],
)
def test_it_is_said_how_a_source_is_read_and_why_not_by_more(reading, why):
    figures = {"held_bytes": 3.0, **reading.figures("web: a"), **reading.figures("code")}

    assert Reading.in_figures(figures) == {"code": reading, "web: a": reading}
    assert f"is read {why}" in reading.said
