"""How often ranks look at the head of their Ray, when it counts as lost, and which of its processes are stopped."""

import psutil
import pytest

pytest.importorskip("ray")

from omniload.actors.ray.head_watch import HeadWatch, between_looks_s, check_servers, why_late
from omniload.base.errors import UnavailableError

RAY_S = 60.0
"""Time without its head after which Ray ends a process."""
PROMISED_S = 56.0
"""Limit within which a lost head is reported, counted from its last answer (docs/design/roles/0016)."""
LOOK_S = 5.0
"""Longest look without an answer, as when the network is cut."""


class Head:
    """A fake head, and the clock of the watch that looks at it."""

    def __init__(self, ranks=8, draw=0.5, late_s=0.0, *, is_cut=True):
        self.now_s, self.is_there, self.looks = 1000.0, True, []
        self.answered = []
        self.late_s, self.is_cut = late_s, is_cut
        self.watch = HeadWatch(
            "10.0.0.1:1", ranks, lambda: self.now_s, draw=lambda: draw, answers=self.answers
        )

    def answers(self, _, within_s):
        self.looks.append(self.now_s)
        if not self.is_there and self.is_cut:
            self.now_s += within_s
        if self.is_there:
            self.answered.append(self.now_s)
        return self.is_there

    def look_until(self, until_s):
        """Look as the thread of a rank does; return when the head was lost, where it was."""
        while self.watch.look_at_s < until_s:
            self.now_s = max(self.now_s, self.watch.look_at_s) + self.late_s
            self.watch.look()
            if self.is_lost():
                return self.now_s
        return None

    def is_lost(self):
        try:
            self.watch.check()
        except UnavailableError:
            return True
        return False


@pytest.mark.parametrize(
    ("ranks", "looks"), [(1, 0.2), (8, 1.6), (500, 100), (2_500, 100), (4_096, 164)]
)
def test_all_ranks_together_look_a_hundred_times_a_second_until_each_looks_as_rarely_as_it_may(
    ranks, looks
):
    assert ranks / between_looks_s(ranks) == pytest.approx(looks, rel=0.01)


@pytest.mark.parametrize("ranks", [8, 1_000, 4_096, 100_000])
@pytest.mark.parametrize("part", [0.001, 0.5, 0.999])
def test_a_head_that_is_lost_is_told_of_before_ray_ends_the_process(ranks, part):
    head = Head(ranks)
    head.look_until(1100.0)
    lost_s = head.looks[-1] + part * between_looks_s(ranks)
    head.is_there = False

    told_s = head.look_until(2000.0)

    # This is before the longest time for which a lifeline bears a cut, so no rank is ended.
    assert 25.0 <= told_s - lost_s < RAY_S


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("late_s", [0.0, 0.002, 0.05])
@pytest.mark.parametrize("ranks", [1, 64, 1_000, 4_096])
def test_silence_is_told_within_what_is_promised_also_by_a_rank_that_looks_a_little_late(
    ranks, late_s, is_cut
):
    for part in range(20):
        head = Head(ranks, part / 20, late_s, is_cut=is_cut)
        head.look_until(1000.0 + 7 * part)
        head.is_there = False

        told_s = head.look_until(2000.0)

        assert 50.0 - 1e-6 <= told_s - max([1000.0, *head.answered]) <= PROMISED_S


@pytest.mark.parametrize("ranks", [8, 4_096])
def test_a_head_that_is_back_was_never_lost_and_is_looked_at_as_before(ranks):
    head = Head(ranks, draw=0.25)
    head.look_until(1100.0)
    head.is_there = False
    assert head.look_until(head.now_s + between_looks_s(ranks) + 3 * LOOK_S) is None

    head.is_there, missed = True, len(head.looks)
    assert head.look_until(2000.0) is None

    every_s = between_looks_s(ranks)
    gaps = [b - a for a, b in zip(head.looks[missed:], head.looks[missed + 1 :], strict=False)]
    # The first gap is random, so that ranks which waited for the same cut look at different times.
    assert gaps == pytest.approx([0.25 * every_s] + [every_s] * (len(gaps) - 1))


def test_ranks_that_were_started_together_look_apart():
    dues = [Head(4_096, draw=part / 10).watch.look_at_s for part in range(10)]

    assert dues == pytest.approx([1000.0 + 2.5 * part for part in range(10)])


def test_time_in_which_a_process_was_stopped_is_not_counted():
    head = Head()
    head.look_until(1100.0)
    head.is_there, head.now_s = False, 1800.0  # stopped meanwhile, and the network comes up late

    assert head.look_until(1800.0 + 3 * LOOK_S) is None
    assert head.look_until(2000.0) is not None


def test_a_look_in_which_the_process_was_stopped_is_not_counted_longer_than_a_look_takes():
    head = Head()

    def stopped(*_):
        head.now_s += 600.0
        return False

    watch = HeadWatch("10.0.0.1:1", 8, lambda: head.now_s, draw=lambda: 0.0, answers=stopped)
    watch.look()

    watch.check()


def test_a_look_that_is_not_due_is_none():
    head = Head()

    head.now_s = 1000.1
    head.watch.look()

    assert head.looks == []


def test_a_server_that_has_ended_is_named():
    check_servers(lambda: "")
    with pytest.raises(UnavailableError, match="Ray's gcs_server ended with -9, and the data"):
        check_servers(lambda: "gcs_server ended with -9")


def test_a_process_that_ends_as_it_is_looked_at_hides_no_server_that_is_stopped(monkeypatch):
    class Child:
        def __init__(self, pid, name):
            self.pid, self._name = pid, name

        def name(self):
            if not self._name:
                raise psutil.NoSuchProcess(self.pid)
            return self._name

        def status(self):
            return psutil.STATUS_STOPPED

    children = [Child(2, ""), Child(3, "python"), Child(4, "raylet")]
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: children)

    assert why_late() == "its raylet, process 4, is stopped (kill -CONT 4 resumes it)"
