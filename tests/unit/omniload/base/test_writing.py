"""A file is there whole or as it was, and nothing is left beside it."""

import pytest

from omniload.base import writing
from omniload.base.writing import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced(tmp_path, durable):
    for data in (b"one", b"two"):
        write_whole(tmp_path / "file", data, durable=durable)

        assert (tmp_path / "file").read_bytes() == data
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"one")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"two", durable=True)

    assert (tmp_path / "file").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_as_long_as_a_name_may_be_is_written(tmp_path):
    write_whole(tmp_path / ("n" * 255), b"x")

    assert (tmp_path / ("n" * 255)).read_bytes() == b"x"
