"""Memory of its own for large reads."""

import mmap
import weakref

import pytest

from fusefs.base.huge_pages import LARGE_BYTES, huge_page_buffer


def test_mapped_memory_is_writable_zeroed_and_of_the_size_asked_for():
    memory = huge_page_buffer(LARGE_BYTES + 1)

    memory[-1:] = b"x"

    assert (len(memory), memory[0], memory[-1]) == (LARGE_BYTES + 1, 0, ord("x"))


def test_memory_goes_with_the_last_view_of_it():
    memory = huge_page_buffer(LARGE_BYTES)
    gone = weakref.ref(memory.obj)
    part = memory[10:20]

    del memory
    assert gone() is not None
    del part

    assert gone() is None


@pytest.mark.parametrize("advice", [-1, 0xFFFF])
def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch, advice):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice)

    assert len(huge_page_buffer(LARGE_BYTES)) == LARGE_BYTES
