"""A shard cache answers with the store's bytes, within its cap, under reads, rewrites, damage and kills."""

import fcntl
import os
import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.cache.disk_directory import CopyFiles
from omniload.base.clock import FakeClock
from omniload.source.stores import accounts, shared_directory
from omniload.source.stores.blocks import BLOCK_BYTES
from tests.support.examples import few
from tests.support.plane.sources.shard_caches import Shards, a_cache, taken_bytes

B = BLOCK_BYTES
NAMES = "abcd"
LIMIT = 6 * B
SIZES = st.integers(1, 3 * B)
PLACES = st.floats(0, 1)


def bytes_of(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def range_in(data, places):
    start, stop = sorted(int(place * len(data)) for place in places)
    return start, stop


def in_a_child(work):
    """Run a function in a forked process; return its exit status, or minus the signal that ended it.

    An interrupt ends the child too. Otherwise the child's writes to the folder that is being removed would raise an
    error that hides the interrupt, and hypothesis would continue. An interrupt that comes during the fork waits,
    because Python ignores exceptions in its calls around a fork.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if not (child := os.fork()):
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


class Killed:
    """Ends the process before one of the calls that make a copy, as the kernel would."""

    def __init__(self, calls):
        self.left = calls
        for holder, name in [
            *((CopyFiles, name) for name in ("take", "write", "mark")),
            *((accounts, name) for name in ("note", "believe")),
            (shared_directory, "decode_map"),
            (shared_directory.SharedDirectory, "make"),
            (shared_directory.SharedDirectory, "_remove"),
        ]:
            setattr(holder, name, self.counted(getattr(holder, name)))

    def counted(self, call):
        def counting(*args):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return counting


class CacheOfShards(RuleBasedStateMachine):
    """Processes that share a directory, compared with a store that is never wrong."""

    gives_room_ahead = True

    def __init__(self):
        super().__init__()
        self.place, self.patches = tempfile.TemporaryDirectory(), ExitStack()
        self.folder = Path(self.place.name) / "cache"
        self.clock, self.boot = FakeClock(), Path(self.place.name) / "boot"
        self.boot.write_text("1")
        self.patches.enter_context(patch.object(accounts, "_BOOT", self.boot))
        # The pause is as long as ever, but on a clock without waits: the folder is not looked at a thousand times.
        self.patches.enter_context(patch.object(shared_directory, "_PAUSE_S", 0.5))
        if not self.gives_room_ahead:
            self.patches.enter_context(patch.object(os, "posix_fallocate", lambda *_: None))
        self.accounts = [b""]
        self.shards, self.contents, self.seed = Shards("/shards"), {}, 0
        self.caches = []
        self.damaged = set()
        self.protected = set()
        for name in NAMES:
            self.write(name, 2 * B + 17)
        self.start()

    def teardown(self):
        self.caches.clear()
        self.patches.close()
        self.place.cleanup()

    def write(self, name, size):
        self.seed += 1
        self.contents[name] = bytes_of(self.seed, size)
        self.shards.put(name, self.contents[name], tag=f"{name}-{self.seed}")

    def pairs(self):
        found = {path.stem: 0 for path in self.folder.glob("copies/*/*")}
        for path in self.folder.glob("copies/*/*"):
            found[path.stem] += 1
        return {name for name, files in found.items() if files == 2}

    def file(self, process, name):
        cache, used = self.caches[process % len(self.caches)]
        file = self.shards.through(cache, name)
        used.add(file.kept.version.name)
        return file

    def start(self):
        self.caches.append((a_cache(self.folder, LIMIT, self.clock), set()))

    @rule(process=st.integers(0, 2), name=st.sampled_from(NAMES), places=st.tuples(PLACES, PLACES))
    def read(self, process, name, places):
        start, stop = range_in(self.contents[name], places)

        assert self.file(process, name).read_range(start, stop) == self.contents[name][start:stop]

    @rule(
        process=st.integers(0, 2), name=st.sampled_from(NAMES), places=st.lists(PLACES, max_size=4)
    )
    def read_as_a_file(self, process, name, places):
        data = self.contents[name]
        with self.file(process, name).open() as file:
            for place in places:
                at = int(place * len(data))
                file.seek(at)
                assert file.read(1000) == data[at : at + 1000]
                assert file.read(B) == data[at + 1000 : at + 1000 + B]

    @rule(name=st.sampled_from(NAMES), size=SIZES)
    def write_anew(self, name, size):
        self.write(name, size)

    @precondition(lambda self: len(self.caches) < 3)
    @rule()
    def start_a_process(self):
        self.start()

    @precondition(lambda self: len(self.caches) > 1)
    @rule(process=st.integers(0, 2))
    def end_a_process(self, process):
        del self.caches[process % len(self.caches)]
        self.protected.clear()

    @rule()
    def a_minute_passes(self):
        self.accounts.append((self.folder / "account").read_bytes())
        self.clock.advance(61)

    @rule(number=st.integers(0, 20))
    def the_machine_loses_its_power(self, number):
        # The last write to the account may not have reached the disk.
        self.caches.clear()
        self.protected.clear()
        (self.folder / "account").write_bytes(self.accounts[number % len(self.accounts)])
        self.boot.write_text(f"{self.boot.read_text()}1")
        self.start()

    @rule(
        process=st.integers(0, 2),
        name=st.sampled_from(NAMES),
        gives=st.integers(0, 2),
        part=PLACES,
    )
    def read_over_a_disk_that_becomes_full(self, process, name, gives, part):
        take, left = os.posix_fallocate, [gives]

        def full(descriptor, start, size):
            left[0] -= 1
            if left[0] < 0:
                take(descriptor, start, max(1, int(part * size)))
                raise OSError(28, "No space left on device")
            take(descriptor, start, size)

        with patch.object(os, "posix_fallocate", full):
            file = self.file(process, name)
            assert file.read_range(0, file.size_bytes) == self.contents[name]

    @rule(process=st.integers(0, 2), name=st.sampled_from(NAMES), places=st.tuples(PLACES, PLACES))
    def read_while_the_lock_is_held(self, process, name, places):
        start, stop = range_in(self.contents[name], places)
        with (self.folder / "account").open("rb") as stopped:
            fcntl.flock(stopped, fcntl.LOCK_EX)
            data = self.shards.through(self.caches[process % len(self.caches)][0], name)
            assert data.read_range(start, stop) == self.contents[name][start:stop]

    @rule(calls=st.integers(0, 40), process=st.integers(0, 2), name=st.sampled_from(NAMES))
    def kill_a_process_that_was_forked(self, calls, process, name):
        def read():
            Killed(calls)
            file = self.file(process, name)
            assert file.read_range(0, file.size_bytes) == self.contents[name]
            self.shards.through(a_cache(self.folder, LIMIT, self.clock), name)

        status = in_a_child(read)
        assert status in {0, -signal.SIGKILL}
        # The parent process uses everything that the fork reported to use.
        self.file(process, name)

    @rule(number=st.integers(0, 40), place=PLACES, how=st.sampled_from(["byte", "cut", "gone"]))
    def damage(self, number, place, how):
        files = sorted(self.folder.glob("copies/*/*"))
        if not files:
            return
        file = files[number % len(files)]
        # A file that is no copy any more is removed by any process that meets it, and is made again.
        self.damaged.add(file.stem)
        self.protected.discard(file.stem)
        at = int(place * (file.stat().st_size - 1))
        if how == "gone":
            file.unlink()
        elif how == "cut":
            os.truncate(file, at)
        else:
            held = file.read_bytes()
            # The damage is in each page of the data, so a read of any part meets it; a hole stays a hole, because of
            # the limit.
            places = range(at % 4096, len(held), 4096) if file.suffix == ".data" else [at]
            with file.open("r+b") as opened:
                for spot in places:
                    if any(held[spot // 4096 * 4096 :][:4096]):
                        os.pwrite(opened.fileno(), bytes([held[spot] ^ 0x55]), spot)

    @rule()
    def damage_the_account(self):
        (self.folder / "account").write_bytes(b"nonsense")

    @invariant()
    def the_cap_holds_on_the_disk_itself(self):
        taken = taken_bytes(self.folder)
        assert taken <= LIMIT
        # After a kill, an account may be too high, and is counted again; a low account would break the limit.
        said = self.caches[0][0].directory.held_bytes()
        assert said >= taken or said == 0

    @invariant()
    def what_living_processes_use_stays(self):
        pairs = self.pairs()
        assert self.protected <= pairs
        used = set().union(*(used for _, used in self.caches))
        self.protected = (pairs & used) - self.damaged


class CacheWithNoRoomAhead(CacheOfShards):
    """The same on a file system that reports reserved space and reserves none before the write."""

    gives_room_ahead = False


TestCacheOfShards = CacheOfShards.TestCase
TestCacheOfShards.settings = settings(few(40, soak=400), stateful_step_count=25)
TestCacheWithNoRoomAhead = CacheWithNoRoomAhead.TestCase
TestCacheWithNoRoomAhead.settings = settings(few(20, soak=200), stateful_step_count=25)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.tuples(PLACES, PLACES)), max_size=20))
def test_a_store_gives_each_block_once_to_all_processes_of_a_node(reads):
    shards = Shards()
    contents = {name: bytes_of(seed, 3 * B + 5) for seed, name in enumerate("ab")}
    for name, data in contents.items():
        shards.put(name, data)
    with tempfile.TemporaryDirectory() as folder:
        caches = [a_cache(Path(folder) / "cache") for _ in range(3)]
        for turn, (name, places) in enumerate(reads):
            start, stop = range_in(contents[name], places)
            file = shards.through(caches[turn % 3], name)
            assert file.read_range(start, stop) == contents[name][start:stop]

        asked = [
            (path, at) for path, start, stop in shards.store.gave for at in range(start, stop, B)
        ]
        assert len(asked) == len(set(asked))
        assert all(at % B == 0 for _, at in asked)
