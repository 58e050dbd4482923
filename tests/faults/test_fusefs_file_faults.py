"""Damage, outages and races of files: an error with a name, never other bytes."""

import errno

import pytest

from fusefs.format.manifest import encode_manifest
from fusefs.stores.memory import MemoryStore
from omniload.base.errors import IntegrityError, UnavailableError
from tests.support.fusefs.builders import contents, object_paths, some_files, tiny_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = bytes(range(256)) * 2


def flip(store, path, at, bit=0):
    data = bytearray(store.read(path, 0, store.stat(path).size_bytes))
    data[at] ^= 1 << bit
    store.publish(path, bytes(data))


def test_a_flipped_bit_is_an_integrity_error_that_names_the_object():
    with tiny_files() as files:
        files.write_file("f", DATA)
        damaged = object_paths(files.store)[1]
        flip(files.store, damaged, 9, bit=5)

        with pytest.raises(IntegrityError, match=damaged):
            contents(files, "f")


def test_units_beside_a_damaged_one_stay_readable():
    with tiny_files(unit=8, count=3, read_ahead=0) as files:
        files.write_file("f", DATA)
        manifest = files.manifest("f")
        flip(files.store, manifest.segments[0].object_path(0), 0)

        with files.open("f") as file:
            with pytest.raises(IntegrityError):
                file.reader.read(0, 4)
            assert file.reader.read(8, 16) == DATA[8:24]


def test_an_object_cut_short_is_an_integrity_error():
    with tiny_files() as files:
        files.write_file("f", DATA)
        damaged = object_paths(files.store)[0]
        files.store.publish(damaged, files.store.read(damaged, 0, 5))

        with pytest.raises(IntegrityError, match="of the"):
            contents(files, "f")


def test_a_missing_object_is_an_integrity_error_while_the_manifest_names_it():
    with tiny_files() as files:
        files.write_file("f", DATA)
        missing = object_paths(files.store)[2]
        files.store.remove(missing)

        with pytest.raises(IntegrityError, match=missing):
            contents(files, "f")


def test_a_version_that_another_process_replaced_is_stale_to_its_reader():
    store = MemoryStore()
    with tiny_files(store) as reading, tiny_files(store) as writing:
        writing.write_file("f", DATA)
        with reading.open("f") as file:
            writing.write_file("f", DATA[::-1])

            with pytest.raises(OSError, match="open the file again") as caught:
                file.reader.read(0, 512)

        assert caught.value.errno == errno.ESTALE
        assert contents(reading, "f") == DATA[::-1]


def test_a_version_replaced_or_removed_here_stays_readable_until_it_is_closed():
    with tiny_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        file = files.open("f")
        files.write_file("f", b"other" * 10)
        files.names.remove("f")

        assert file.reader.read(0, 512) == DATA
        file.close()

        assert object_paths(files.store) == []


def test_a_manifest_cut_short_is_not_taken_for_a_plain_file():
    with tiny_files() as files:
        files.write_file("f", DATA)
        manifest = encode_manifest(files.manifest("f"))
        files.store.publish("f", manifest[:4000])

        with pytest.raises(IntegrityError, match="cut short"):
            contents(files, "f")


def test_a_damaged_magic_is_an_integrity_error_since_the_other_end_still_tells():
    with tiny_files() as files:
        files.write_file("f", DATA)
        flip(files.store, "f", 0)

        with pytest.raises(IntegrityError, match="ends as one"):
            files.stat("f")


def test_a_broken_manifest_hides_none_of_its_neighbours_in_a_listing():
    with tiny_files() as files:
        files.write_file("d/a", DATA)
        files.write_file("d/b", DATA)
        flip(files.store, "d/a", 100)

        assert [info.name for info in files.listing("d")] == ["a", "b"]


def test_a_write_that_fails_is_raised_by_finish_and_nothing_is_published():
    faulty = FaultyStore(MemoryStore(), {("create", 2): Outage})
    with tiny_files(faulty) as files:
        writer = files.writers.file("f")

        writer.write(DATA[:16])
        with pytest.raises(UnavailableError, match="scripted outage"):
            writer.finish()
        writer.abandon()

        with pytest.raises(FileNotFoundError):
            files.stat("f")
    faulty.assert_all_faults_fired()


def test_an_outage_while_publishing_leaves_the_old_version_whole():
    objects = MemoryStore()
    with tiny_files(objects) as files:
        files.write_file("f", DATA)
    faulty = FaultyStore(objects, {("publish", 1): Outage})
    with tiny_files(faulty) as files:
        with pytest.raises(UnavailableError):
            files.write_file("f", b"new" * 100)

        assert contents(files, "f") == DATA


def test_an_outage_while_reading_is_not_remembered():
    objects = MemoryStore()
    with some_files(objects) as files:
        files.write_file("f", DATA * 100)
        path = object_paths(objects)[0]
        reads = sum(1 for _ in object_paths(objects)) + 2
    faulty = FaultyStore(objects, {("read", n): Outage for n in range(2, 2 + reads)})
    with some_files(faulty, read_ahead=0) as files, files.open("f") as file:
        with pytest.raises(UnavailableError):
            file.reader.read(0, 4096)
        for _ in range(reads - 1):
            with pytest.raises(UnavailableError):
                file.reader.read(0, 4096)

        assert file.reader.read(0, 4096) == (DATA * 100)[:4096]
    assert path
    faulty.assert_all_faults_fired()
