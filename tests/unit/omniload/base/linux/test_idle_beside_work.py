"""Cores that idle although something wants them, by the kernel's counts as they are and as they might be."""

from types import SimpleNamespace

import pytest

from omniload.base.linux import kept_waiting
from omniload.base.linux.kept_waiting import IdleBesideWork, share_idle


@pytest.mark.parametrize(
    ("idle_cores", "wanted", "share"),
    [
        # Two cores that are wanted all the time, of which a fifth of one idles.
        (0.2, [2, 5], 0.1),
        (0.0, [2, 5], 0.0),
        # One core is wanted for half of the time, and is idle in the other half because there is no work.
        (1.5, [0, 1], 0.0),
        (1.6, [0, 1], 0.2),
        # Counts that do not belong together.
        (1.5, [2, 2], 0.25),
        (0.3, [0, 1], 0.0),
        (2.0, [0, 0], 0.0),
    ],
)
def test_a_core_that_idles_is_missed_only_where_more_is_wanted_than_is_had(
    idle_cores, wanted, share
):
    assert share_idle(idle_cores, wanted * 50, 2) == pytest.approx(share)


def test_a_few_looks_tell_nothing():
    assert share_idle(0.2, [2] * 3, 2) == 0.0


def test_the_kernel_is_asked_once_it_is_entered_and_once_it_is_left(tmp_path, monkeypatch):
    stat, load, now = tmp_path / "stat", tmp_path / "loadavg", iter((10.0, 12.0))
    monkeypatch.setattr(kept_waiting, "_STAT", stat)
    monkeypatch.setattr(kept_waiting, "_LOAD", load)
    monkeypatch.setattr(kept_waiting, "_LEAST_SAMPLES", 0)
    # A clock for this module alone: a thread that another test left would use a shared one too.
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr(kept_waiting, "time", clock)
    load.write_text("9.31 4.40 2.35 5/412 9041\n")
    stat.write_text("cpu  9 0 9 100 50 0 0 0 0 0\ncpu0 0\ncpu1 0\nintr 5 0\n")

    with IdleBesideWork() as cores:
        stat.write_text("cpu  9 0 9 110 60 0 0 0 0 0\ncpu0 0\ncpu1 0\nintr 5 0\n")
        while not cores.wanted:
            pass

    # Four threads wanted both of two cores, and 0.2 s of two seconds idled.
    assert cores.share == pytest.approx(0.1 / 2)
    assert set(cores.wanted) == {4}


def test_where_the_kernel_tells_nothing_no_core_idles(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_waiting, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(kept_waiting, "_LOAD", tmp_path / "loadavg")

    with IdleBesideWork() as cores:
        pass

    assert cores.share == 0.0
