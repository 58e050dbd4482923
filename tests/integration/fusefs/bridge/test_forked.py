"""A namespace in a process that was forked off: said at once, where it would wait for threads that are not there."""

import sys

import pytest

from tests.support.programs import finished

FORKING = """
import os, sys
import fsspec
from fusefs.fsspec_filesystem import OmniFileSystem
from omniload.base.errors import StateError

data = bytes(range(256)) * 20_000
parent = fsspec.filesystem("omnifs", store=sys.argv[1])
parent.pipe_file("f", data)
file = parent.open("f")
assert file.read(10) == data[:10]

def call(fs):
    if sys.argv[2] == "read":
        return file.read()
    if sys.argv[2] == "write":
        with fs.open("g", "wb") as new:
            new.write(data)
        return fs.cat_file("g")
    return fs.cat_file("f")

if not (child := os.fork()):
    try:
        call(parent)
    except StateError as error:
        assert str(os.getppid()) in str(error), error
    else:
        os._exit(1)
    if sys.argv[2] != "read":
        own = fsspec.filesystem("omnifs", store=sys.argv[1])
        assert own is not parent
        assert call(own) == data
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert call(parent)[-10:] == data[-10:]
"""


@pytest.mark.scripts_start_warm
@pytest.mark.parametrize("what", ["open", "read", "write"])
def test_a_forked_process_is_told_to_open_its_own(tmp_path, what):
    done = finished([sys.executable, "-c", FORKING, str(tmp_path), what], limit_s=60)

    assert (done.returncode, done.stderr) == (0, "")
