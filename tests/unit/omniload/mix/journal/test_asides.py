"""Journals that are moved aside on a store: a removed one is contained in another, byte for byte, and reported."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fusefs.stores.memory import MemoryStore
from omniload.mix.journal.segments import ASIDES, Life, Segment, moved_aside

LONG, SHORT, SEGMENT_BYTES = 6000, 4000, 300_000


def a_text(count, seed=b"one"):
    lines, before = [], b""
    for step in range(count):
        text = b'{"step":%d,"seed":"%s"}%s' % (step, seed, b" " * 300)
        before = xxhash.xxh64_hexdigest(before + text).encode()
        lines.append(text + b"\t" + before + b"\n")
    return b"".join(lines)


def put(store, folder, content, life=1):
    for start in range(0, len(content), SEGMENT_BYTES):
        part = content[start : start + SEGMENT_BYTES]
        segment = Segment(start, start + len(part), Life(life, "00000000"))
        store.publish(f"{folder}/{segment.name}", part)


def bytes_in(store, folder):
    parts = sorted(store.listing(folder), key=lambda each: each.name)
    return b"".join(store.read(f"{folder}/{each.name}", 0, each.size_bytes) for each in parts)


def folders(store):
    return {entry.name for entry in store.listing("")}


WHOLE, BEGINNING = a_text(LONG), a_text(SHORT)


@given(
    at=st.integers(0, len(BEGINNING) - 1), is_longer_damaged=st.booleans(), is_first=st.booleans()
)
def test_a_sound_journal_stays_wherever_the_other_one_is_damaged(at, is_longer_damaged, is_first):
    long, short = bytearray(WHOLE), bytearray(BEGINNING)
    (long if is_longer_damaged else short)[at] ^= 1
    store = MemoryStore()
    put(store, "aside-1", bytes(long if is_first else short))
    put(store, "lines", bytes(short if is_first else long))

    assert moved_aside(store, "lines") == "aside-2"

    assert folders(store) == {"aside-1", "aside-2"}


def test_of_two_whose_bytes_are_the_same_the_longer_stays_and_that_is_told(caplog):
    store = MemoryStore()
    put(store, "aside-1", WHOLE)
    put(store, "lines", BEGINNING)

    assert moved_aside(store, "lines") == "aside-1"

    assert folders(store) == {"aside-1"}
    assert bytes_in(store, "aside-1") == WHOLE
    assert "/aside-2 is removed: aside-1 holds all of it" in caplog.text


@pytest.fixture
def many():
    """Return a store with asides of an earlier release, which removed none; the first has no beginning."""
    store = MemoryStore()
    store.publish(f"aside-1/{Segment(5, 9, Life(1, '00000000')).name}", b"rest")
    for number in range(2, ASIDES + 6):
        put(store, f"aside-{number}", a_text(3, b"%d" % number))
    return store


def test_one_goes_for_each_that_comes_and_none_that_cannot_be_read(many, caplog):
    before = folders(many)

    for number in range(2):
        put(many, "lines", a_text(3, b"new %d" % number))
        moved_aside(many, "lines")

    assert before - folders(many) == {"aside-2", "aside-3"}
    assert "/aside-2 is removed, the oldest of" in caplog.text
    assert "/aside-3 is removed, the oldest of" in caplog.text


def test_none_goes_for_one_that_another_holds(many):
    before = folders(many)
    put(many, "lines", a_text(2, b"4"))

    assert moved_aside(many, "lines") == "aside-4"

    assert folders(many) == before
