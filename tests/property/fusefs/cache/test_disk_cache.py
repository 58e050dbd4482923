"""The disk cache compared with a dictionary, with crashes and damage at any moment: right bytes or none."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.cache.disk_cache import DiskCache
from fusefs.cache.disk_directory import CopyFiles, DiskDirectory
from fusefs.cache.disk_format import footprint
from tests.support.examples import few
from tests.support.fusefs.disk import (
    UNIT,
    a_version,
    abandon,
    all_bytes_of,
    bytes_of,
    bytes_on_disk,
    files_in,
    flip,
    read,
    span_of,
)

VERSIONS = [a_version(0, 3), a_version(1, 5, short=100), a_version(2, 1, short=4000)]
CAPACITY = footprint(5) * 2 + 7 * (UNIT + 8)
SHM = Path("/dev/shm")

versions = st.sampled_from(VERSIONS)
units = st.integers(0, 4)


class Killed(BaseException):
    """The process ends here."""


class Fuse:
    """Ends the process half-way through the n-th step that reaches the disk."""

    def __init__(self):
        self.left = None

    def burns(self):
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


class DiskCacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None))
        self.fuse = Fuse()
        self.stack = contextlib.ExitStack()
        for owner, name in (
            (CopyFiles, "write"),
            (CopyFiles, "mark"),
            (DiskDirectory, "make"),
            (DiskDirectory, "set_aside"),
        ):
            self.stack.enter_context(patch.object(owner, name, self.fused(getattr(owner, name))))
        self.start()

    def fused(self, step):
        def fused(files, *arguments):
            if not self.fuse.burns():
                return step(files, *arguments)
            if step.__name__ == "write":
                offset, data = arguments
                step(files, offset, data[: len(data) // 2])
            raise Killed

        return fused

    def start(self):
        self.cache = DiskCache(str(self.directory), CAPACITY)
        self.copies = {}

    def copy(self, version):
        if version.key not in self.copies:
            self.copies[version.key] = self.cache.open(version)
        return self.copies[version.key]

    @rule(version=versions, unit=units, steps=st.none() | st.integers(0, 3))
    def store(self, version, unit, steps):
        unit %= version.num_units
        copy = self.copy(version)
        self.fuse.left = steps
        try:
            kept = copy.store(span_of(version, unit), bytes_of(version, unit))
        except Killed:
            self.kill()
            return
        finally:
            self.fuse.left = None
        assert kept == copy.has(unit)
        assert kept  # every version fits by itself

    @rule(version=versions, unit=units)
    def read(self, version, unit):
        unit %= version.num_units
        copy = self.copy(version)
        had = copy.has(unit)

        found = read(copy, version, unit)

        assert found in (None, bytes_of(version, unit))
        assert (found is None) == (not copy.has(unit))
        assert had or found is None

    @rule(version=versions)
    def take_it_whole(self, version):
        descriptor = self.copy(version).descriptor()
        if descriptor is not None:
            assert os.pread(descriptor, version.size_bytes + 1, 0) == all_bytes_of(version)
            os.close(descriptor)
            self.close(version)

    @rule(version=versions)
    def close(self, version):
        if (copy := self.copies.pop(version.key, None)) is not None:
            copy.close()

    @rule(version=versions)
    def drop(self, version):
        self.cache.drop(version)
        assert not any(map(self.copy(version).has, range(version.num_units)))

    @rule()
    def restart(self):
        self.cache.close()
        self.start()

    @rule()
    def kill(self):
        abandon(self.cache)
        self.start()

    @precondition(lambda self: files_in(self.directory, ".*"))
    @rule(data=st.data())
    def damage_and_restart(self, data):
        """Cut the power: any part of the data that was not on the disk yet is lost."""
        abandon(self.cache)
        path = data.draw(st.sampled_from(files_in(self.directory, ".*")), label="file")
        size = path.stat().st_size
        match data.draw(st.sampled_from(["flip", "cut", "zero", "remove"]), label="damage"):
            case "flip":
                flip(path, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
            case "cut":
                os.truncate(path, data.draw(st.integers(0, size - 1)))
            case "zero":
                path.write_bytes(bytes(size))
            case "remove":
                path.unlink()
        self.start()

    @invariant()
    def the_account_is_kept(self):
        assert bytes_on_disk(self.directory) <= self.cache.used_bytes <= CAPACITY

    def teardown(self):
        self.cache.close()
        self.stack.close()
        shutil.rmtree(self.directory)


TestDiskCacheAgainstADictionary = DiskCacheMachine.TestCase
TestDiskCacheAgainstADictionary.settings = settings(few(25, soak=500), stateful_step_count=30)
