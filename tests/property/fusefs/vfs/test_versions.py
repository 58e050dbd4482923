"""A kernel looks up, opens, reads and forgets while another mount replaces files: no open sees two versions."""

import errno
import itertools
import os
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import run_blocking
from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.freshness import Shown
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.shown_version import Leads, leads
from tests.support.examples import few
from tests.support.fusefs.bridge.mount import CONFIG, Mount

NAMES = ("f", "g")
SIZES = (2, 100, 4096, 4097, 20_000)
PAGE = 4096
LONG_AGO_NS = 10**10


class Coarse(MemoryStore):
    """All versions have one time stamp, so only their contents distinguish them."""

    def _put(self, path, data):
        super()._put(path, data)
        self.mtimes_ns[path] = self.mtimes_ns[""] or self.mtimes_ns[path]
        self.mtimes_ns[""] = self.mtimes_ns[path]


class Open:
    """One open file: the version that it must show, and the bytes that it showed."""

    def __init__(self, inode, opened, wanted):
        self.inode, self.handle, self.wanted = inode, opened.handle, wanted
        self.is_stale = False


class KernelModel:
    """Dentries, sizes and a page cache as in the kernel, one of each for an inode."""

    def __init__(self, store):
        self.mount = Mount(store)
        self.mount.kernel.can_pass_through = False
        self.mount.kernel.outdated = self.outdated
        self.elsewhere = StripedFiles(store, CONFIG)
        self.shown, self.store = self.mount.shown, store
        self.names, self.lookups = {}, defaultdict(int)
        self.sizes, self.pages = {}, defaultdict(dict)
        self.open, self.now = [], {}
        self.numbers = itertools.count(1)

    def close(self):
        for file in list(self.open):
            self.release(file)
        self.mount.close()
        self.elsewhere.close()

    def outdated(self, inode):
        self.sizes.pop(inode, None)

    # On another host, and on this one next to the open files

    def new_version(self, size):
        return (next(self.numbers).to_bytes(2, "big") * size)[:size]

    def replace(self, name, size):
        data = self.new_version(size)
        self.elsewhere.write_file(name, data)
        self.now[name] = data

    def rename_here(self, name, size):
        data = self.new_version(size)
        self.elsewhere.write_file("new", data)
        self.lookup("new")
        run_blocking(self.shown.rename(ROOT_INODE, b"new", ROOT_INODE, name.encode(), 0))
        self.names[name] = self.names.pop("new")
        self.now[name] = data

    def move_here(self, name, other):
        if name in self.now and self.lookup(name):
            run_blocking(
                self.shown.rename(ROOT_INODE, name.encode(), ROOT_INODE, other.encode(), 0)
            )
            self.names[other] = self.names.pop(name)
            self.now[other] = self.now.pop(name)

    def remove(self, name):
        if self.now.pop(name, None) is not None:
            self.elsewhere.names.remove(name)

    def chmod(self, name, mode):
        if name in self.now:
            set_attributes(self.elsewhere, name, Attributes(mode=mode))
            # A plain file gets a manifest, which is another version for readers by its path.
            self.now[name] = bytes(bytearray(self.now[name]))

    def chmod_here(self, name, mode):
        if name in self.now and (inode := self.lookup(name)):
            try:
                run_blocking(self.shown.setattr(inode, Change(mode=mode), None))
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise

    # Questions of the kernel

    def told(self, entry):
        if self.sizes.get(entry.inode) not in {None, entry.size_bytes}:
            first_gone = entry.size_bytes // PAGE
            self.pages[entry.inode] = {
                page: data for page, data in self.pages[entry.inode].items() if page < first_gone
            }
        self.sizes[entry.inode] = entry.size_bytes

    def lookup(self, name):
        try:
            entry = run_blocking(self.shown.lookup(ROOT_INODE, name.encode()))
        except FileNotFoundError:
            self.names.pop(name, None)
            return None
        self.lookups[entry.inode] += 1
        self.names[name] = entry.inode
        self.told(entry)
        return entry.inode

    def open_by(self, name):
        """Open as the kernel does: by the dentry, and again by a lookup if the dentry is stale."""
        inode = self.names.get(name) or self.lookup(name)
        for attempt in range(2):
            if inode is None:
                assert name not in self.now or attempt == 0
                return
            try:
                opened = run_blocking(self.shown.open(inode, os.O_RDONLY))
            except OSError as error:
                if error.errno != errno.ESTALE or attempt:
                    raise  # no writer has replaced it since
                inode = self.lookup(name)
                continue
            if not opened.keep_cache:
                self.pages[inode].clear()
            self.open.append(Open(inode, opened, self.now[name]))
            return

    def read(self, file, page):
        if self.sizes.get(file.inode) is None:
            self.told(run_blocking(self.shown.getattr(file.inode)))
        size = self.sizes[file.inode]
        assert size == len(file.wanted)
        try:
            if page not in self.pages[file.inode] and page * PAGE < size:
                data = bytes(run_blocking(self.shown.read(file.handle, page * PAGE, PAGE)))
                self.pages[file.inode][page] = data
        except OSError as error:
            is_there = any(file.wanted is data for data in self.now.values())
            is_its_own = is_there and self.shown.session.inodes.node(file.inode).is_attached
            if error.errno != errno.ESTALE or is_its_own:
                raise
            return
        found = self.pages[file.inode].get(page, b"")[: max(0, size - page * PAGE)]
        assert found == file.wanted[page * PAGE : (page + 1) * PAGE]

    def stat(self, file):
        entry = run_blocking(self.shown.getattr(file.inode))
        assert entry.size_bytes == len(file.wanted)
        self.told(entry)

    def release(self, file):
        self.open.remove(file)
        run_blocking(self.shown.release(file.handle))

    def forget(self, name):
        inode = self.names.pop(name, None)
        if inode is not None and not any(file.inode == inode for file in self.open):
            self.shown.forget(inode, self.lookups.pop(inode))
            self.pages.pop(inode, None)
            self.sizes.pop(inode, None)

    def listing(self):
        listing = run_blocking(self.shown.opendir(ROOT_INODE))
        for line in self.shown.readdir(listing.handle, 0):
            name = line.name.decode()
            self.shown.advertised(line.entry.inode)
            self.lookups[line.entry.inode] += 1
            self.names[name] = line.entry.inode
            self.told(line.entry)
            if not any(file.inode == line.entry.inode for file in self.open):
                assert line.entry.size_bytes == len(self.now[name])
        run_blocking(self.shown.releasedir(listing.handle))

    def believe_nothing(self):
        self.shown.session.attributes.forget_all()
        self.names.clear()

    def press(self):
        self.pages.clear()
        self.mount.files.cache.drop(list(self.mount.files.cache._blocks))

    def age(self, name):
        if name in self.now and not isinstance(self.store, Coarse):
            self.store.mtimes_ns[name] -= LONG_AGO_NS

    def check(self):
        inodes = defaultdict(set)
        for file in self.open:
            inodes[file.inode].add(file.wanted)
        assert all(len(versions) == 1 for versions in inodes.values()), "one inode, one version"


NAME, SIZE = st.sampled_from(NAMES), st.sampled_from(SIZES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("replace"), NAME, SIZE),
        st.tuples(st.just("open_by"), NAME),
        st.tuples(
            st.sampled_from(["read", "read", "stat", "release"]),
            st.integers(0, 9),
            st.integers(0, 5),
        ),
        st.tuples(st.sampled_from(["lookup", "forget", "remove", "age"]), NAME),
        st.tuples(st.just("rename_here"), NAME, SIZE),
        st.sampled_from([("move_here", "f", "g"), ("move_here", "g", "f")]),
        st.tuples(st.sampled_from(["chmod", "chmod_here"]), NAME, st.sampled_from([0o600, 0o644])),
        st.sampled_from([("listing",), ("believe_nothing",), ("press",)]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("make_store", [MemoryStore, Coarse])
@few(60, soak=1500)
@given(steps=STEPS)
def test_no_open_ever_sees_two_versions(make_store, steps):
    kernel = KernelModel(make_store())
    try:
        for size, name in zip((100, 20_000), NAMES, strict=True):
            kernel.replace(name, size)
        for call, *arguments in steps:
            if call in {"read", "stat", "release"}:
                if kernel.open:
                    file = kernel.open[arguments[0] % len(kernel.open)]
                    getattr(kernel, call)(file, *arguments[1:][: call == "read"])
            else:
                getattr(kernel, call)(*arguments)
            kernel.check()
        for file in kernel.open:
            for page in range(6):
                kernel.read(file, page)
    finally:
        kernel.close()


@given(
    shown=st.sampled_from(Shown),
    is_changed=st.booleans(),
    num_readers=st.integers(0, 3),
    passes_through=st.booleans(),
)
def test_an_inode_that_is_read_never_takes_up_another_version(
    shown, is_changed, num_readers, passes_through
):
    where = leads(
        shown, is_changed=is_changed, num_readers=num_readers, passes_through=passes_through
    )

    assert (where is Leads.HERE) == (is_changed or shown is Shown.SAME)
    if num_readers or passes_through or shown is Shown.NOTHING:
        assert where is not Leads.ANEW
