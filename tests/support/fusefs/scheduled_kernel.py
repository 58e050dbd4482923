"""A kernel of many processes over one mount, scheduled by chance: requests and answers overlap as they may on Linux.

Each process is a generator that yields a request and is resumed with its answer. What is left to chance
is which of these goes on next: a call of the store (in place of a thread), a handler whose call has
returned, a process whose answer has been written. So an answer may reach its process long after a later
one has reached another.

Modelled is what FUSE keeps for an inode (``fs/fuse/inode.c``, ``dir.c``, ``file.c`` of Linux 6.18): one
size, whether it is believed, the version that tells late answers from new ones, and one page cache.
"""

import errno
import itertools
import os
import random
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress

from fusefs.bridge.api.protocol import ROOT_INODE
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.attributes import DROP_XATTR
from tests.support.fusefs.bridge_mount import CONFIG, Mount

PAGE = 1024


class Interrupted(MemoryStore):
    """Lets another mount replace a file between any two calls."""

    between = staticmethod(lambda: None)

    def stat(self, path):
        self.between()
        return super().stat(path)

    def read(self, path, offset, size_bytes):
        self.between()
        return super().read(path, offset, size_bytes)


class Pool:
    """Threads that run when they are told to."""

    def __init__(self):
        self.calls = []

    def submit(self, call, *arguments, **named):
        future = Future()
        self.calls.append((future, lambda: call(*arguments, **named)))
        return future

    def run(self, number):
        future, call = self.calls.pop(number)
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- the handler's
            future.set_exception(error)

    def shutdown(self):
        pass


class Inode:
    """What the kernel keeps."""

    def __init__(self):
        self.size, self.is_valid, self.version, self.is_locked = 0, False, 0, False
        self.pages, self.lookups, self.users = {}, 0, 0


class Handling:
    """A request at the daemon, or its answer on the way back."""

    def __init__(self, process, handling):
        self.process, self.handling, self.future, self.answer = process, handling, None, None
        self.go_on()

    def go_on(self):
        try:
            self.future = self.handling.send(None)
        except StopIteration as stop:
            self.future, self.answer = None, (stop.value, None)
        except OSError as error:
            self.future, self.answer = None, (None, error)


class ScheduledKernel:
    """Processes, inodes and names of one mount.

    Args:
        seed: Of everything that is left to chance.
        sizes: Of the versions that are written, in bytes, of which each may have any.
    """

    def __init__(self, seed, sizes):
        self.chance = random.Random(seed)
        self.sizes, self.numbers = sizes, itertools.count(1)
        self.store = Interrupted()
        self.pool = Pool()
        self.mount = Mount(self.store, self.pool)
        self.mount.kernel.can_pass_through = False
        self.mount.kernel.outdated = self.outdated
        self.shown = self.mount.shown
        self.elsewhere = StripedFiles(self.store, CONFIG)
        self.inodes, self.names, self.looked_up = {}, {}, set()
        self.attr_version = self.evictions = 1
        self.ready, self.blocked, self.under_way = [], [], []
        self.exclusive = self.shared = 0
        self.found, self.wrong = Counter(), []
        self.replace()

    def close(self):
        self.mount.close()
        self.elsewhere.close()

    # What is written

    def version(self):
        number = next(self.numbers)
        size = self.chance.choice(self.sizes)
        return (number.to_bytes(4, "big") * (size // 4 + 1))[:size]

    def replace(self):
        between, self.store.between = self.store.between, lambda: None
        try:
            self.elsewhere.write_file("f", self.version())
        finally:
            self.store.between = between

    def maybe_replace(self):
        if self.chance.random() < 0.05:
            self.replace()

    # Schedule

    def run(self, steps):
        self.store.between = self.maybe_replace
        for _ in range(steps):
            if self.chance.random() < 0.03:
                self.something_happens()
            self.step()

    def finish(self):
        """Go on until nobody has anything left to do."""
        while self.ready or self.under_way or self.blocked or self.pool.calls:
            self.step()

    def something_happens(self):
        what = self.chance.choice(
            [self.replace, self.expire_names, self.expire_sizes, self.forget_infos, self.evict]
        )
        what()

    def forget_infos(self):
        self.start(self.dropper())

    def dropper(self):
        """Have the mount forget what it knows of paths."""
        yield self.shown.getxattr(ROOT_INODE, DROP_XATTR.encode())

    def expire_names(self):
        for name in self.names.values():
            name[1] = False

    def expire_sizes(self):
        for inode in self.inodes.values():
            inode.is_valid = False

    def evict(self):
        named = {number for number, _ in self.names.values()}
        for number, inode in list(self.inodes.items()):
            if number not in named and not inode.users:
                del self.inodes[number]
                self.evictions += 1
                self.shown.forget(number, inode.lookups)

    def start(self, process):
        self.ready.append((process, (None, None)))

    def step(self):
        choices = [("process", n) for n in range(len(self.ready))]
        choices += [("call", n) for n in range(len(self.pool.calls))]
        choices += [
            ("handler", n)
            for n, handling in enumerate(self.under_way)
            if handling.future is None or handling.future.done()
        ]
        choices += [("blocked", n) for n, (_, may) in enumerate(self.blocked) if may()]
        if not choices:
            assert not [*self.under_way, *self.blocked], "everybody waits"
            return
        what, n = self.chance.choice(choices)
        if what == "call":
            self.pool.run(n)
        elif what == "handler":
            self._go_on(self.under_way.pop(n))
        elif what == "blocked":
            self._resume(self.blocked.pop(n)[0], (None, None))
        else:
            self._resume(*self.ready.pop(n))

    def _go_on(self, handling):
        if handling.answer is not None:
            self._resume(handling.process, handling.answer)
            return
        handling.go_on()
        self.under_way.append(handling)

    def _resume(self, process, answer):
        value, error = answer
        try:
            wanted = process.throw(error) if error is not None else process.send(value)
        except StopIteration:
            return
        if wanted is None:
            self.ready.append((process, (None, None)))
        elif callable(wanted):
            self.blocked.append((process, wanted))
        else:
            self.under_way.append(Handling(process, wanted))

    # Inodes

    def outdated(self, number):
        if (inode := self.inodes.get(number)) is not None:
            self.attr_version += 1
            inode.version, inode.is_valid = self.attr_version, False

    def learn(self, number, entry, asked, evictions=None):
        """Take over attributes from an answer, unless newer ones came since it was asked for."""
        inode, size = self.inodes[number], entry.size_bytes
        if inode.is_locked:
            yield lambda: not inode.is_locked
        if asked and inode.version > asked:
            return
        is_racing = evictions is not None and not inode.version and evictions != self.evictions
        self.attr_version += 1
        inode.version, inode.is_valid = (
            self.attr_version,
            not is_racing and entry.attr_timeout_s > 0,
        )
        if evictions is not None and inode.lookups == 1:
            inode.size = size  # of a new one before anybody sees it
        elif size != inode.size:
            inode.is_locked = True
            yield None  # believed already, and not stored yet: ``fstat`` takes no lock
            inode.size, inode.is_locked = size, False
            inode.pages.clear()

    def known(self, number):
        inode = self.inodes.setdefault(number, Inode())
        inode.lookups += 1
        return inode

    # Processes

    def look_up(self, name, *, again=False):
        """Follow a name; return its inode's number, counted as used."""
        known = self.names.get(name)
        if known is not None and known[1] and not again:
            self.inodes[known[0]].users += 1
            return known[0]
        asked, evictions = self.attr_version, self.evictions
        if known is not None:
            number = known[0]
            self.inodes[number].users += 1
            entry = None
            with suppress(OSError):
                entry = yield self.shown.lookup(ROOT_INODE, name.encode())
            if entry is not None and entry.inode == number:
                self.inodes[number].lookups += 1
                known[1] = True
                yield from self.learn(number, entry, asked)
                return number
            self.inodes[number].users -= 1
            if self.names.get(name) is known:
                del self.names[name]
            if entry is not None:
                self.shown.forget(entry.inode, 1)
        yield lambda: not self.exclusive and name not in self.looked_up
        if (known := self.names.get(name)) is not None:
            self.inodes[known[0]].users += 1
            return known[0]
        self.shared += 1
        self.looked_up.add(name)
        asked, evictions = self.attr_version, self.evictions
        try:
            entry = yield self.shown.lookup(ROOT_INODE, name.encode())
            self.known(entry.inode).users += 1
            self.names[name] = [entry.inode, True]
            yield from self.learn(entry.inode, entry, asked, evictions)
            return entry.inode
        finally:
            self.shared -= 1
            self.looked_up.discard(name)

    def size_of(self, number):
        inode = self.inodes[number]
        if inode.is_valid:
            return inode.size
        asked = self.attr_version
        entry = yield self.shown.getattr(number)
        yield from self.learn(number, entry, asked)
        return entry.size_bytes

    def opened(self, name, flags):
        for again in (False, True):
            number = yield from self.look_up(name, again=again)
            try:
                answer = yield self.shown.open(number, flags)
            except OSError as error:
                self.inodes[number].users -= 1
                if again or error.errno != errno.ESTALE:
                    raise
                continue
            if not answer.keep_cache:
                self.inodes[number].pages.clear()
            return number, answer.handle
        raise AssertionError

    def reader(self, name="f"):
        """Open, fstat, read all, fstat, close."""
        try:
            number, handle = yield from self.opened(name, os.O_RDONLY)
        except OSError as error:
            if error.errno not in {errno.ESTALE, errno.ENOENT}:
                raise
            self.found["stale open"] += 1
            return
        try:
            sizes = [(yield from self.size_of(number))]
            data = yield from self.read_all(number, handle)
            sizes.append((yield from self.size_of(number)))
            self.judge(number, data, sizes)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.found["stale read"] += 1
        yield self.shown.flush(handle)
        self.start(self.releasing(number, handle))

    def read_all(self, number, handle):
        inode, data = self.inodes[number], b""
        while True:
            size = yield from self.size_of(number)
            size = inode.size
            if len(data) >= size:
                return data
            page = len(data) // PAGE
            if (bytes_of := inode.pages.get(page)) is None:
                asked = self.attr_version
                bytes_of = bytes((yield self.shown.read(handle, page * PAGE, PAGE)))
                inode.pages[page] = bytes_of
                end = page * PAGE + len(bytes_of)
                if len(bytes_of) < PAGE and inode.is_locked:
                    yield lambda: not inode.is_locked
                if len(bytes_of) < PAGE and asked >= inode.version and end < inode.size:
                    self.attr_version += 1
                    inode.version, inode.size = self.attr_version, end
            shown = bytes_of.ljust(PAGE, b"\0")[: max(0, inode.size - page * PAGE)]
            if len(shown) <= len(data) - page * PAGE:
                return data
            data += shown[len(data) - page * PAGE :]

    def judge(self, number, data, sizes):
        outcome = "whole"
        if data != (data[:4] * (len(data) // 4 + 1))[: len(data)]:
            outcome = "mixed"
        elif set(sizes) != {len(data)}:
            outcome = "size of another version"
        self.found[outcome] += 1
        if outcome != "whole":
            self.wrong.append((outcome, number, sizes, len(data), data[:4]))

    def releasing(self, number, handle):
        yield self.shown.release(handle)
        self.inodes[number].users -= 1

    def looker(self, name="f"):
        """Describe a path."""
        try:
            number = yield from self.look_up(name)
        except OSError:
            return
        try:
            yield from self.size_of(number)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        self.inodes[number].users -= 1

    def renamer(self, mark, name="f"):
        """Make a version beside a file and rename it over."""
        new, data = f".{mark}", self.version()
        yield lambda: not self.exclusive and not self.shared
        self.exclusive += 1
        try:
            opened, entry = yield self.shown.create(
                ROOT_INODE, new.encode(), 0o644, os.O_WRONLY | os.O_EXCL
            )
            inode = self.known(entry.inode)
            inode.users += 1
            self.names[new] = [entry.inode, True]
            yield from self.learn(entry.inode, entry, 0, self.evictions)
        finally:
            self.exclusive -= 1
        yield self.shown.write(opened.handle, 0, data)
        self.attr_version += 1
        inode.version, inode.size, inode.is_valid = self.attr_version, len(data), False
        for page in range(-(-len(data) // PAGE)):
            inode.pages[page] = data[page * PAGE : (page + 1) * PAGE]
        yield self.shown.flush(opened.handle)
        self.start(self.releasing(entry.inode, opened.handle))
        yield lambda: not self.exclusive and not self.shared
        self.exclusive += 1
        try:
            yield self.shown.rename(ROOT_INODE, new.encode(), ROOT_INODE, name.encode(), 0)
            if (over := self.names.get(name)) is not None and over[0] in self.inodes:
                self.attr_version += 1
                self.inodes[over[0]].version = self.attr_version
            self.names[name] = self.names.pop(new)
        finally:
            self.exclusive -= 1
