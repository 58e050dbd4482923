"""Attributes that no manifest has text for are refused as that, and not as too long."""

import errno
import os

import pytest

from fusefs.format.attributes import Attributes, checked_xattrs
from fusefs.tree.file_attributes import set_attributes
from tests.support.fusefs.builders import tiny_files

ODD = os.fsdecode(b"user.\xff")


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.names.make_link("link", ODD),
        lambda files: set_attributes(files, "f", Attributes(xattrs={ODD: b"1"})),
        lambda _: checked_xattrs({ODD: b"1"}, "f"),
    ],
)
def test_a_target_or_a_name_that_is_no_utf8_is_invalid(change):
    with tiny_files() as files:
        files.write_file("f", b"1")

        with pytest.raises(OSError, match="no UTF-8") as caught:
            change(files)

    assert caught.value.errno == errno.EINVAL
