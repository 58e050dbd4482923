"""Paths of settings: from the folder of the file, from a home, whole, or refused."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError
from omniload.base.settings.paths import path_from


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("near", "/base/near"),
        ("../near", "/base/../near"),
        ("/fast/near", "/fast/near"),
        ("file:///fast/near", "/fast/near"),
        ("~/near", "/home/me/near"),
    ],
)
def test_a_path_is_of_the_folder_of_its_file_unless_it_says_otherwise(text, found, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")

    assert path_from(Path("/base"), text, "loader.shard_cache.path") == Path(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("~no-such-user-here/near", "loader.x is '~no-such-user-here/near', and no user of that"),
        ("a\0b", r"loader.x is 'a\\x00b', and no name of a file holds a zero byte"),
    ],
)
def test_a_path_that_nobody_can_have_is_refused_by_its_key(text, fault):
    with pytest.raises(ConfigError, match=fault):
        path_from(Path("/base"), text, "loader.x")
