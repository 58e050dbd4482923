"""The tables of what shows an image: medians, and ratios taken within a round."""

import sys

import pytest

from benchmarks import image_views
from benchmarks.image_views import STEPS, TEMPERATURES, WAYS, Took, mounts_table, steps_table


def samples_of(fuse_s, erofs_s):
    samples = {}
    for name in STEPS:
        for temperature in TEMPERATURES:
            samples["fuse", name, temperature] = [Took(s, s / 4, s / 2) for s in fuse_s]
            samples["erofs", name, temperature] = [Took(s, s / 4, 0.0) for s in erofs_s]
    return samples


def test_a_ratio_is_taken_within_a_round_and_its_median_is_told():
    table = steps_table(samples_of((10.0, 20.0, 40.0), (5.0, 2.0, 20.0)))

    assert [row[:2] for row in table.rows] == [(s, t) for s in STEPS for t in TEMPERATURES]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {row[2:] for row in table.rows} == {("20.000", "5.000", "0.50", "15.00", "1.25")}


def test_rounds_of_unequal_number_are_no_table():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        steps_table(samples_of((1.0, 2.0), (1.0,)))


def test_what_it_takes_to_mount_is_a_median_for_each_way():
    table = mounts_table({"fuse": [3.0, 1.0, 2.0], "erofs": [0.25]})

    assert table.rows == (("fuse", "2.00"), ("erofs", "0.25"))


class Ended:
    def poll(self):
        return 0


def test_a_step_is_done_in_a_process_of_its_own_and_an_ended_daemon_costs_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"x")

    took = image_views.step(tmp_path, STEPS["stat of every file"], Ended())

    assert took.seconds > 0
    assert took.reader_cpu_s > 0
    assert took.daemon_cpu_s == 0.0


def test_the_ways_are_options_of_a_mount_and_take_turns(tmp_path, monkeypatch):
    done = []

    def a_round(_, __, way, samples, mounts):
        done.append(way)
        mounts.append(1.0)
        for key, found in samples_of((1.0,), (1.0,)).items():
            if key[0] == way:
                samples.setdefault(key, []).extend(found)

    monkeypatch.setattr(image_views, "build_layout", lambda folder: folder / "layout")
    monkeypatch.setattr(image_views, "make_whole", lambda *_: done.append("whole"))
    monkeypatch.setattr(image_views, "run_round", a_round)

    image_views.main(["--folder", str(tmp_path / "place"), "--rounds", "2"])

    assert done == ["whole", "erofs", "fuse", "fuse", "erofs"]
    assert set(WAYS) == {"fuse", "erofs"}
    assert (tmp_path / "place").is_dir()
    assert sys.modules["benchmarks.image_views"] is image_views
