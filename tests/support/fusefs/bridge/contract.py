"""The promises of every ``FileSystem`` to its bindings, whatever it shows."""

import errno
import os
import stat

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import run_blocking


class FileSystemContract:
    """Provide ``shown``: a file system with a folder ``d`` in its root and a file ``d/f`` that has ``content``."""

    content = b""

    @pytest.fixture
    def folder(self, shown):
        return run_blocking(shown.lookup(ROOT_INODE, b"d"))

    @pytest.fixture
    def file(self, shown, folder):
        return run_blocking(shown.lookup(folder.inode, b"f"))

    @pytest.fixture
    def opened(self, shown, file):
        opened = run_blocking(shown.open(file.inode, os.O_RDONLY))
        yield opened
        run_blocking(shown.release(opened.handle))

    def test_the_root_is_a_directory_of_number_one(self, shown):
        root = run_blocking(shown.getattr(ROOT_INODE))

        assert root.inode == ROOT_INODE
        assert stat.S_ISDIR(root.mode)

    def test_a_name_leads_to_the_inode_whose_attributes_are_told(self, shown, file):
        assert stat.S_ISREG(file.mode)
        assert file.size_bytes == len(self.content)
        again = run_blocking(shown.getattr(file.inode))
        assert again[:10] == file[:10]

    def test_a_name_that_is_not_there_is_enoent_or_an_inode_of_zero(self, shown, folder):
        try:
            entry = run_blocking(shown.lookup(folder.inode, b"nothing"))
        except FileNotFoundError:
            return  # any other error fails the test

        assert entry.inode == 0
        assert entry.entry_timeout_s > 0

    def test_a_listing_begins_at_any_line_and_names_no_dots(self, shown, folder):
        opened = run_blocking(shown.opendir(folder.inode))
        whole = list(shown.readdir(opened.handle, 0))

        assert b"f" in [name for name, _ in whole]
        assert not {b".", b".."} & {name for name, _ in whole}
        for line in range(min(len(whole), 5) + 1):
            assert list(shown.readdir(opened.handle, line)) == whole[line:]
        run_blocking(shown.releasedir(opened.handle))

    def test_what_a_listing_told_can_be_asked_about_until_it_is_forgotten(self, shown, folder):
        opened = run_blocking(shown.opendir(folder.inode))
        entry = dict(shown.readdir(opened.handle, 0))[b"f"]
        shown.advertised(entry.inode)
        run_blocking(shown.releasedir(opened.handle))

        assert run_blocking(shown.getattr(entry.inode)).size_bytes == len(self.content)
        shown.forget(entry.inode, 1)

    @pytest.mark.parametrize(("offset", "size"), [(0, 10), (3, 5000), (0, 1 << 24), (17, 0)])
    def test_a_read_returns_the_whole_range(self, shown, opened, offset, size):
        data = run_blocking(shown.read(opened.handle, offset, size))

        assert bytes(data) == self.content[offset : offset + size]

    def test_a_read_is_cut_at_the_end_and_nowhere_else(self, shown, opened):
        end = len(self.content)

        assert bytes(run_blocking(shown.read(opened.handle, end - 3, 100))) == self.content[-3:]
        assert bytes(run_blocking(shown.read(opened.handle, end + 10, 100))) == b""

    def test_every_open_has_a_handle_of_its_own(self, shown, file, opened):
        other = run_blocking(shown.open(file.inode, os.O_RDONLY))

        assert other.handle != opened.handle
        run_blocking(shown.release(other.handle))
        assert bytes(run_blocking(shown.read(opened.handle, 0, 4))) == self.content[:4]

    def test_an_attribute_that_is_not_there_is_enodata(self, shown, file):
        with pytest.raises(OSError, match=r".") as caught:
            run_blocking(shown.getxattr(file.inode, b"user.none"))

        assert caught.value.errno == errno.ENODATA
        assert b"user.none" not in run_blocking(shown.listxattr(file.inode))

    def test_space_is_told_in_blocks(self, shown):
        space = run_blocking(shown.statfs())

        assert space.block_bytes > 0
        assert 0 <= space.free_blocks <= space.blocks
        assert space.name_max > 0

    def test_what_is_not_allowed_raises_and_changes_nothing(self, shown, file, folder):
        with pytest.raises(OSError, match=r"."):
            run_blocking(shown.link(file.inode, folder.inode, b"linked"))
        with pytest.raises(OSError, match=r"."):
            run_blocking(shown.setattr(file.inode, Change(uid=file.uid + 1), None))

        assert run_blocking(shown.getattr(file.inode)).uid == file.uid
