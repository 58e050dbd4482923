"""Whose the directory of a disk cache may be."""

import os
import stat

import pytest

from fusefs.cache.disk_directory import DiskDirectory
from fusefs.cache.disk_format import MARKER
from omniload.base.errors import ConfigError


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["", MARKER])
def test_a_directory_or_a_marker_of_another_user_is_refused_by_name(tmp_path, what):
    DiskDirectory(str(tmp_path)).close()
    os.chown(tmp_path / what, 12345, -1)

    with pytest.raises(
        ConfigError, match=rf"{what}' belongs to user 12345, and this process is user 0"
    ):
        DiskDirectory(str(tmp_path))


def test_a_directory_that_every_user_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)

    with pytest.raises(ConfigError, match="has mode 777, so every user may write there"):
        DiskDirectory(str(tmp_path))


def test_a_link_in_place_of_the_marker_is_not_followed(tmp_path):
    (tmp_path / "victim").touch()
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / MARKER).symlink_to(tmp_path / "victim")

    with pytest.raises(ConfigError, match="is a symbolic link, which no cache of ours is"):
        DiskDirectory(str(cache))
    assert (tmp_path / "victim").read_bytes() == b""


def test_a_pipe_in_place_of_the_marker_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / MARKER, 0o600)
    assert stat.S_ISFIFO((tmp_path / MARKER).stat().st_mode)

    with pytest.raises(ConfigError, match="is no file; remove it"):
        DiskDirectory(str(tmp_path))
