"""The disk cache under many threads that store, read, take, drop and close the same copies."""

import os
import random
import threading
from pathlib import Path

from fusefs.cache.disk_format import footprint
from tests.support.fusefs.disk import (
    UNIT,
    a_cache,
    a_version,
    all_bytes_of,
    bytes_of,
    bytes_on_disk,
    fill,
    read,
    span_of,
)

VERSIONS = [a_version(number, 4, short=number) for number in range(3)]
ROOM_FOR_ONE = footprint(4) + 4 * (UNIT + 8)


def one_step(cache, random, held):
    version = random.choice(VERSIONS)
    unit = random.randrange(4)
    copy = held.setdefault(version.key, None) or cache.open(version)
    held[version.key] = copy
    match random.choice(["store", "store", "fill", "read", "read", "take", "drop", "close"]):
        case "store":
            copy.store(span_of(version, unit), bytes_of(version, unit))
        case "fill":
            fill(copy, version)
        case "read":
            assert read(copy, version, unit) in (None, bytes_of(version, unit))
        case "take":
            if (descriptor := copy.descriptor()) is not None:
                cache.drop(random.choice(VERSIONS))
                assert os.pread(descriptor, 1 << 20, 0) == all_bytes_of(version)
                os.close(descriptor)
                return "taken"
        case "drop":
            cache.drop(version)
        case "close":
            held.pop(version.key).close()
            # A task that was late: it must neither fail nor disturb whoever opens the copy next.
            copy.acquire()
            copy.store(span_of(version, unit), bytes_of(version, unit))
            copy.release()
    return ""


def test_many_threads_see_right_bytes_or_none_and_leave_a_right_account(tmp_path):
    failed, taken = [], []
    with a_cache(tmp_path / "disk", int(2.5 * ROOM_FOR_ONE)) as cache:

        def work(seed):
            choices, held = random.Random(seed), {}
            try:
                taken.extend(one_step(cache, choices, held) for _ in range(300))
                for copy in held.values():
                    copy.close()
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert failed == []
        assert "taken" in taken
        assert cache.used_bytes <= cache.capacity_bytes
        assert bytes_on_disk(tmp_path / "disk") <= cache.used_bytes
        assert cache._table.copies == {}
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert [link for link in links if str(tmp_path) in os.path.realpath(link)] == []
