"""Whose close publishes a file that several have open, and who hears that it could not be: by scripts of events."""

import errno
import os

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE
from fusefs.bridge.api.waiting import run_blocking
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem
from tests.support.fusefs.bridge.mount import CONFIG, Mount

BEFORE, AFTER, OTHERS = b"before" * 2000, b"AFTER" * 2000, b"another mount's" * 500
FLAGS = {
    "reader": os.O_RDONLY,
    "writer": os.O_RDWR,
    "log": os.O_WRONLY,
    "cutter": os.O_RDONLY | os.O_TRUNC,
}


class Played:
    """A file that several open, write and close, as a script says, and what each close answered."""

    def __init__(self, mount):
        self.mount, self.shown = mount, mount.shown
        self.files = StripedFiles(mount.files.store, CONFIG)
        self.handles, self.errors = {}, {}

    def play(self, script):
        """Carry out words: a verb of this class, and who does it."""
        for word in script.split():
            verb, _, name = word.partition(":")
            getattr(self, verb)(name)
        return self

    def open(self, name):
        self.handles[name] = self.mount.open(self.mount.lookup(), FLAGS[name]).handle

    def create(self, name):
        made = self.shown.create(ROOT_INODE, b"new", 0o644, FLAGS[name] | os.O_CREAT)
        self.handles[name] = run_blocking(made)[0].handle

    def write(self, name):
        run_blocking(self.shown.write(self.handles[name], 0, AFTER))

    def patch(self, name):
        """Change so little that it is spliced into the version that is open."""
        run_blocking(self.shown.write(self.handles[name], 5000, b"little"))

    def flush(self, name):
        try:
            run_blocking(self.shown.flush(self.handles[name]))
        except OSError as error:
            self.errors[name] = error.errno

    def fsync(self, name):
        run_blocking(self.shown.fsync(self.handles[name]))

    def release(self, name):
        run_blocking(self.shown.release(self.handles.pop(name)))

    def replace(self, _):
        self.files.write_file("f", OTHERS)

    def handover(self, _):
        state = run_blocking(self.shown.handed_over())
        self.shown = StoreFileSystem(self.mount.files, SpoolPlace())
        run_blocking(self.shown.taken_over(state))

    def found(self, path="f"):
        with self.files.open(path) as file:
            return bytes(file.reader.read(0, 1 << 20))


@pytest.fixture
def played():
    mount = Mount()
    mount.kernel.can_pass_through = False
    mount.files.write_file("f", BEFORE)
    made = Played(mount)
    yield made
    made.files.close()
    mount.close()


@pytest.mark.parametrize(
    ("script", "shows_it"),
    [
        ("open:writer open:reader write:writer flush:reader", False),
        ("open:writer open:reader write:writer flush:reader release:reader", False),
        ("open:writer open:reader handover write:writer flush:reader", False),
        ("open:writer open:reader write:writer flush:writer", True),
        ("open:writer open:reader handover write:writer flush:writer", True),
        ("open:writer open:log write:writer flush:log", True),
        ("open:writer open:reader write:writer fsync:reader", True),
        # A mapping that was written behind the close: its bytes come with the release alone.
        ("open:writer open:reader flush:writer write:writer release:writer", True),
        ("open:writer open:log flush:writer write:writer release:writer", False),
        ("open:writer open:log flush:writer write:writer release:writer release:log", True),
        ("open:writer flush:writer write:writer release:writer", True),
    ],
)
def test_what_was_written_shows_by_the_close_of_one_who_may_write(played, script, shows_it):
    played.play(script)

    assert played.found().startswith(AFTER) is shows_it
    assert played.errors == {}


def test_a_reader_hears_nothing_of_what_a_writer_could_not_publish(played):
    """It was the reader's close that got the writer's ESTALE, whichever of them came first."""
    played.play("open:writer open:reader patch:writer replace flush:reader flush:writer")

    assert played.errors == {"writer": errno.ESTALE}
    assert played.found() == OTHERS


def test_a_file_that_is_cut_or_made_by_an_open_to_read_shows_at_its_close(played):
    played.play("open:cutter flush:cutter create:reader flush:reader")

    assert (played.found("f"), played.found("new")) == (b"", b"")


def test_a_release_that_told_no_modes_has_every_close_publish(played):
    played.play("open:writer open:reader")
    state = run_blocking(played.shown.handed_over())
    del state["read_only"]
    played.shown = StoreFileSystem(played.mount.files, SpoolPlace())
    run_blocking(played.shown.taken_over(state))

    played.play("write:writer flush:reader")

    assert played.found().startswith(AFTER)
