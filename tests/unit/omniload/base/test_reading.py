"""Small files that a user names."""

import os

import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.reading import read_kept_file, read_small_file


def read(path, most_bytes=100):
    return read_small_file(path, most_bytes=most_bytes, what="a list")


def test_a_file_is_read_whole_up_to_the_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)

    assert read(tmp_path / "a") == b"x" * 100


def test_a_larger_file_is_refused_with_both_sizes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 101)

    with pytest.raises(ConfigError, match=r"a: holds 101 B, more than 100 B; is it a list\?"):
        read(tmp_path / "a")


def test_a_file_that_says_it_is_empty_is_held_to_the_limit_while_it_is_read():
    with pytest.raises(ConfigError, match=r"/proc/self/maps: holds .*, more than 100 B"):
        read("/proc/self/maps")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "no such file; give the path of a list"),
        ("fodler", r"no such file \(did you mean folder\?\); give the path of a list"),
        ("nowhere/a", "no such file; give the path of a list"),
        ("pipe", "is a pipe; give the path of a list"),
        ("folder", "is a folder; give the path of a list"),
        ("circle", "cannot be read: Too many levels of symbolic links"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: (open: )?embedded null"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, name, said):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")

    with pytest.raises(ConfigError, match=said):
        read(tmp_path / name)


def test_a_pipe_in_place_of_a_kept_file_is_told_as_one(tmp_path):
    os.mkfifo(tmp_path / "kept")

    with pytest.raises(IntegrityError, match="is a pipe, not an index; remove it"):
        read_kept_file(tmp_path / "kept", most_bytes=10, what="an index")
