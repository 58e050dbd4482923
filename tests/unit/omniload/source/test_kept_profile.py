"""What was measured of sources is found again at later starts, and is never needed."""

import os

import pytest

from omniload.source.kept_profile import KeptProfile, keep, kept_profiles

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

    assert f"{tmp_path / 'file'}: nothing can be kept there (File exists)" in caplog.text
