"""Lanes of tests: every test has a lane, and a lane that failed is never reported as passed."""

import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.house.modules import source_files, tree_of
from tests.lanes import LANES, TESTS, Lane, environment, keep_those_of, lane_of

REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1"/></testsuites>'


@pytest.fixture
def a_lane(tmp_path):
    """Start a lane whose process prints ``text``, writes ``report`` and ends with ``code``."""

    def start(text, code, report=None):
        if report:
            (tmp_path / "files.xml").write_text(report)
        says = f"import sys; sys.stdout.write({text!r}); sys.exit({code})"
        process = subprocess.Popen(
            [sys.executable, "-c", says],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lane = Lane("files", tmp_path / "files.xml", process, 0.0)
        lane.follow(threading.Lock())
        return lane

    return start


def test_every_test_file_has_a_lane_and_every_lane_has_tests():
    files = [path for path in TESTS.rglob("test_*.py") if "support" not in path.parts]

    assert {lane_of(path) for path in files} == set(LANES)


@pytest.mark.parametrize(
    ("place", "lane"),
    [
        ("unit/omniload/base/test_config.py", "units"),
        ("unit/snapshot/oci/test_image.py", "properties"),
        ("property/trainer_integration/test_properties.py", "units"),
        ("histories/test_histories.py", "properties"),
        ("integration/fusefs/stores/test_hdfs_mount.py", "packages"),
        ("faults/test_fusefs_kill.py", "files"),
        ("faults/omniload/test_actors_kill.py", "files"),
        ("contract/omniload/test_source_formats.py", "files"),
        ("contract/omniload/test_front_rendezvous.py", "trainer"),
        ("integration/omniload/test_front_ranks.py", "trainer"),
        ("integration/trainer_integration/test_external_launchers.py", "trainer"),
        ("integration/trainer_integration/checkpoint/test_striped_hdfs.py", "packages"),
        ("docs/test_docs_messages.py", "units"),
        ("docs/test_docs_snippets.py", "trainer"),
        ("docs/test_docs_site.py", "images"),
        ("integration/omniload/commands/test_mix.py", "images"),
        ("integration/omniload/source/test_silent_stores.py", "packages"),
        ("integration/omniload/test_front_hosts.py", "jobs"),
        ("integration/omniload/actors/test_ray.py", "jobs"),
    ],
)
def test_a_path_names_its_lane(place, lane):
    assert lane_of(TESTS / place) == lane


def test_a_test_whose_file_is_named_runs_in_its_own_lane_alone():
    files = ("unit/test_rules_of_unit_tests.py", "hosts/test_b.py", "unit/snapshot/test_c.py")
    items = [SimpleNamespace(path=TESTS / name) for name in files]

    keep_those_of("units", items)

    assert [item.path.name for item in items] == ["test_rules_of_unit_tests.py"]


def test_a_lane_tells_each_line_with_its_name_and_keeps_what_failed(a_lane, capsys):
    lane = a_lane("..F\nFAILED tests/a.py::test_b - AssertionError\n", 1, REPORT.format(3, 1))

    assert capsys.readouterr().out.splitlines()[0].split() == ["files", "..F"]
    assert lane.failed == ["FAILED tests/a.py::test_b - AssertionError"]
    assert lane.counts() == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    assert not lane.ended_well


@pytest.mark.parametrize(
    ("code", "well"), [(0, True), (5, True), (1, False), (2, False), (-9, False)]
)
def test_how_the_process_ended_decides(a_lane, code, well):
    sent = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else ""
    lane = a_lane("", f"0 if not {sent!r} else exec({sent!r})" if code < 0 else code)

    assert lane.ended_well is well
    assert lane.counts()["tests"] == 0


def test_lanes_keep_what_they_compile_and_compute_on_one_core_unless_told_otherwise():
    given = {"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"}

    assert environment(given) == {"OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert environment(given | {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


def test_syntax_trees_that_stay_are_not_looked_through_for_garbage():
    """All trees together have millions of nodes, so every garbage collection of a test would take a second."""
    tree_of.cache_clear()
    tree = tree_of(source_files()[0])

    assert gc.is_tracked(tree)
    assert not any(each is tree for each in gc.get_objects())
    assert gc.isenabled()
