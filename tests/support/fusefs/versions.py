"""Files that are replaced while others read them: the contents of each version, and readers that compare.

Every eight bytes of a version contain its number, and its length differs from that of every version near it. So the
bytes that a reader finds show which whole version they are, or that no version ever had them.
"""

import errno
import os
import random
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

__all__ = [
    "NAMES",
    "content",
    "race",
    "race_over_mounts",
    "read_once",
    "replace",
    "rewrite",
    "what_is_wrong",
    "wrong_in",
]

NAMES = ("f", "g")
_FINE = {"whole", "stale open", "stale read", "stale write", "versions"}

_SHORTEST, _STEPS, _STEP = 20_000, 997, 40


def content(number):
    """Return the bytes of a version: 20,000 to 60,000 of them."""
    size_bytes = _SHORTEST + _STEP * (number * 619 % _STEPS)
    return number.to_bytes(8, "little") * (size_bytes // 8)


def what_is_wrong(data, sizes):
    """Return the fault in the bytes that one open showed, or None if they are one version.

    Args:
        data: All bytes that were read.
        sizes: The sizes that ``fstat`` reported meanwhile.
    """
    if not data:
        return "empty"
    if data == (wanted := content(int.from_bytes(data[:8], "little"))):
        return None if set(sizes) <= {len(wanted)} else "size of another version"
    if len(data) == len(wanted) and data.rstrip(b"\0") == wanted[: len(data.rstrip(b"\0"))]:
        return "ends in zeros"
    if data in {wanted[: len(data)], wanted + bytes(len(data))[len(wanted) :]}:
        return "cut short" if len(data) < len(wanted) else "ends in zeros"
    return "mixed"


def read_once(path, chance, *, opened=None):
    """Open a file, read all of it in pieces, and return the outcome: ``whole``, ``stale`` or a fault.

    Args:
        path: The file to open.
        chance: Decides the way of reading.
        opened: Called between the first piece and the rest.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        return _named(error, "stale open")
    try:
        sizes = [os.fstat(file).st_size]
        data = os.read(file, 4096)
        if opened is not None:
            opened()
        piece = chance.choice([1 << 20, 16 << 10, 4096])
        while more := os.read(file, piece):
            data += more
        sizes.append(os.fstat(file).st_size)
    except OSError as error:
        return _named(error, "stale read")
    finally:
        os.close(file)
    return what_is_wrong(data, sizes) or "whole"


def _named(error, stale):
    return stale if error.errno == errno.ESTALE else errno.errorcode[error.errno]


def replace(path, number):
    """Write a version next to a file and rename it over the file."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(content(number))
    new.replace(path)


def rewrite(path, number):
    """Write a version into the file itself."""
    with path.open("wb") as file:
        file.write(content(number))


def race(readers, writers, *, reads, within_s, rest_s=0.0, seed=0):
    """Let processes read files that others replace, and count the outcome of each open.

    Args:
        readers: For each reader, the paths it reads.
        writers: For each writer, the paths it replaces, and the way: ``replace`` or ``rewrite``.
        reads: Number of reads by all readers together; each reader ends after its share.
        within_s: Time after which they end in any case.
        rest_s: Pause of a writer after each version.
        seed: Seed of all random choices.

    Returns:
        The number of times that each outcome came, and the number of versions written (``versions``).
    """
    spawning = get_context("fork")
    over, answers = spawning.Event(), spawning.SimpleQueue()
    share, until = -(-reads // len(readers)), time.monotonic() + within_s
    reading = [
        spawning.Process(target=_reader, args=(paths, share, until, seed + i, answers))
        for i, paths in enumerate(readers)
    ]
    writing = [
        spawning.Process(target=_writer, args=(paths, how, i, len(writers), over, rest_s, answers))
        for i, (paths, how) in enumerate(writers)
    ]
    for process in (*writing, *reading):
        process.start()
    found = Counter()
    try:
        for _ in reading:
            found += answers.get()
        over.set()
        for _ in writing:
            found += answers.get()
        for process in (*writing, *reading):
            process.join()
    finally:
        # If a race is interrupted, a writer without this signal would continue to write, and the race would wait for
        # it.
        for process in (*writing, *reading):
            process.kill()
    return found


def race_over_mounts(roots, *, reads, readers, rest_s, within_s=3600.0, seed=0):
    """Race ``readers`` on each of the first two of three mounts with writers on all of them.

    The first two rename versions over both files. The third writes into one file and has no readers, because its
    readers would see that file change, as POSIX requires within one mount.
    """
    *shared, other = roots
    for name in NAMES:
        replace(other / name, 0)
    return race(
        [[root / name for name in NAMES] for root in shared for _ in range(readers)],
        [
            *(([root / name for name in NAMES], replace) for root in shared),
            ([other / NAMES[0]], rewrite),
        ],
        reads=reads,
        within_s=within_s,
        rest_s=rest_s,
        seed=seed,
    )


def wrong_in(found):
    """Return how often an open showed bytes that no version ever had, by the bytes shown."""
    return {outcome: count for outcome, count in found.items() if outcome not in _FINE}


def _reader(paths, share, until, seed, answers):
    chance, found = random.Random(seed), Counter()
    for _ in range(share):
        if time.monotonic() > until:
            break
        found[read_once(Path(chance.choice(paths)), chance)] += 1
    answers.put(found)


def _writer(paths, how, first, step, over, rest_s, answers):
    number, found = first + step, Counter()
    while not over.wait(rest_s):
        for path in paths:
            number += step
            try:
                how(Path(path), number)
                found["versions"] += 1
            except OSError as error:
                found[_named(error, "stale write")] += 1
    answers.put(found)
