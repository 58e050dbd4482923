"""The SlowCalls machine: a call that takes far longer than usual is told of once, with the role that makes it."""

import pytest

from omniload.machine.progress import USUAL_CALL, Progress, Task
from omniload.machine.slow_calls import SlowCalls

NOW_S = 500.0


def a_loader(*, for_s, usual_s, name="loader-1", doing="reads /data/3.parquet"):
    figures = {} if usual_s is None else {USUAL_CALL: usual_s}
    calls = (Task(doing=doing, since_s=NOW_S - for_s),)
    return Progress(name=name, pid=7, beat_s=NOW_S, tasks=(), calls=calls, figures=figures)


def seen(*loaders, by=None):
    return (by or SlowCalls()).see({loader.name: loader for loader in loaders})


@pytest.mark.parametrize(
    ("for_s", "usual_s", "is_slow"),
    [
        (4.9, 0.5, False),
        (5.0, 0.5, True),
        (1.9, 0.001, False),  # so short a wait holds nobody up
        (2.1, 0.001, True),
        (300.0, None, False),  # nothing to compare it with
    ],
)
def test_a_call_is_slow_at_ten_times_the_usual_and_two_seconds(for_s, usual_s, is_slow):
    assert bool(seen(a_loader(for_s=for_s, usual_s=usual_s))) == is_slow


def test_the_loader_and_its_call_are_named_once():
    machine = SlowCalls()
    first = a_loader(for_s=6, usual_s=0.5)

    (line,) = seen(first, by=machine)
    assert line.startswith("loader-1 reads /data/3.parquet for 6 s, where a call to its store ")
    assert line.endswith("usually takes 0.5 s: the store is slow, or does not answer")
    assert seen(first, by=machine) == ()
    assert len(seen(first, a_loader(for_s=9, usual_s=0.5, name="loader-2"), by=machine)) == 1


def test_another_slow_call_of_the_same_loader_is_told_again():
    machine = SlowCalls()
    seen(a_loader(for_s=6, usual_s=0.5), by=machine)
    seen(a_loader(for_s=0, usual_s=0.5), by=machine)

    assert len(seen(a_loader(for_s=7, usual_s=0.5), by=machine)) == 1
