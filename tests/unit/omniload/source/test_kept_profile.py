"""Measurements of sources are found again at later starts, and are never needed."""

import os

import pytest

from omniload.source.kept_profile import KeptProfile, RunningCosts, keep, kept_profiles

MEASURED = KeptProfile(preprocess_s_per_token=2e-6, block_bytes=1_000)


def test_what_was_kept_is_found_by_the_name_of_its_source(tmp_path):
    keep(tmp_path / "index", "a.b", MEASURED)

    assert kept_profiles(tmp_path / "index", ["a.b", "other"]) == {"a.b": MEASURED}
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["a.b.profile.json"]


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"[]",
        b'{"version":1,"preprocess_s_per_token":2e-6',
        b'{"version":2,"preprocess_s_per_token":2e-6,"block_bytes":1}',
        b'{"version":1,"preprocess_s_per_token":-1,"block_bytes":1}',
        b'{"version":1,"preprocess_s_per_token":2e-6,"block_bytes":1,"more":1}',
        b'{"version":1,"preprocess_s_per_token":2e-6,"block_bytes":' + b"0" * 9_000 + b"1}",
    ],
)
def test_what_is_damaged_or_of_another_version_is_done_without(written, tmp_path):
    (tmp_path / "a.profile.json").write_bytes(written)
    keep(tmp_path, "b", MEASURED)

    assert kept_profiles(tmp_path, ["a", "b"]) == {"b": MEASURED}


def test_the_first_version_is_read(tmp_path):
    (tmp_path / "a.profile.json").write_bytes(
        b'{"version":1,"preprocess_s_per_token":2e-6,"block_bytes":1000}'
    )

    assert kept_profiles(tmp_path, ["a"]) == {"a": MEASURED}


def test_a_pipe_in_its_place_is_done_without(tmp_path):
    os.mkfifo(tmp_path / "a.profile.json")

    assert kept_profiles(tmp_path, ["a"]) == {}


@pytest.mark.parametrize("folder", [None, "gone"])
def test_where_there_is_no_folder_nothing_is_kept(folder, tmp_path):
    assert kept_profiles(folder and tmp_path / folder, ["a"]) == {}


def test_a_folder_that_cannot_be_written_is_told_and_not_needed(tmp_path, caplog):
    (tmp_path / "file").touch()

    keep(tmp_path / "file", "a", MEASURED)

    assert f"{tmp_path / 'file'}: nothing can be saved there (File exists)" in caplog.text


def kept_after(folder, *spent, at_s=(60.0,)):
    """Return the kept profile of ``a`` after a job spends these seconds on these tokens before each look."""
    costs, found = RunningCosts(folder, 0.0), []
    for (busy_s, tokens), now_s in zip(spent, at_s, strict=True):
        costs.count("a", busy_s / 2, tokens // 2)
        costs.count("a", busy_s / 2, tokens // 2)
        if costs.is_due(now_s):
            costs.keep()
        found.append(kept_profiles(folder, ["a"])["a"].preprocess_s_per_token)
    return found


@pytest.mark.parametrize(
    ("cost", "then"),
    [(1e-6, 1e-6), (2.3e-6, 2.3e-6), (2.1e-6, 2e-6), (1.9e-6, 2e-6)],
)
def test_a_job_keeps_what_reading_costs_where_it_is_another_by_a_tenth(tmp_path, cost, then):
    keep(tmp_path, "a", MEASURED)

    assert kept_after(tmp_path, (4.0, round(4.0 / cost))) == [pytest.approx(then)]
    assert kept_profiles(tmp_path, ["a"])["a"].block_bytes == MEASURED.block_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["a.profile.json"]


def test_it_does_so_a_minute_from_the_beginning_and_then_once_in_ten(tmp_path):
    keep(tmp_path, "a", MEASURED)
    spent = [(4.0, 10**6), (4.0, 10**6), (8.0, 10**6), (8.0, 10**6)]

    found = kept_after(tmp_path, *spent, at_s=(59.0, 60.0, 659.0, 661.0))

    # Each is for the time since the last look: the cost of reading an hour ago does not matter.
    assert found == pytest.approx([2e-6, 4e-6, 4e-6, 8e-6])


def test_a_few_reads_say_nothing_until_more_have_come(tmp_path):
    keep(tmp_path, "a", MEASURED)

    found = kept_after(tmp_path, (0.6, 10**5), (0.6, 10**5), at_s=(60.0, 661.0))

    assert found == pytest.approx([2e-6, 6e-6])


def test_of_a_source_that_was_never_profiled_nothing_is_kept_and_a_cost_has_its_limit(tmp_path):
    keep(tmp_path, "a", MEASURED)
    costs = RunningCosts(tmp_path, 0.0)
    costs.count("other", 9.0, 10**6)
    costs.count("a", 9.0, 2)
    costs.keep()

    assert kept_profiles(tmp_path, ["a", "other"]) == {
        "a": MEASURED.model_copy(update={"preprocess_s_per_token": 1.0})
    }


@pytest.mark.parametrize("tokens", [0, 10**6])
def test_a_job_without_a_folder_and_a_source_without_tokens_keep_nothing(tmp_path, tokens):
    keep(tmp_path, "a", MEASURED)
    costs = RunningCosts(None if tokens else tmp_path, 0.0)
    costs.count("a", 9.0, tokens)
    costs.keep()

    assert kept_profiles(tmp_path, ["a"]) == {"a": MEASURED}


def test_a_folder_that_cannot_be_looked_at_holds_no_measurements(tmp_path):
    # A name that is too long is refused to everyone; what lies in another user's home is refused only to others.
    assert kept_profiles(tmp_path / ("m" * 256), ["a"]) == {}
