"""What the benchmark of the planner's shell says of steps that were published."""

from benchmarks.planner.plan_time import Case
from benchmarks.planner.published_steps import Published, memory_of, row_of

CASE = Case(sources=2, samples=64, dp=20, microbatches=2)


def published(ms, mib=100.0):
    parts = {"handle": ms * 5e-4, "parts_of": ms * 1e-4, "calls": ms * 3e-4, "keep": ms * 1e-4}
    return Published(
        thread_s=ms * 1e-3,
        process_s=ms * 2e-3,
        resident_bytes=round(mib * 2**20),
        parts_s=parts,
    )


def test_each_data_constructor_says_what_its_ranks_took_the_last_one_for_those_that_are_left():
    words = list(CASE.words(7))

    assert [len(word.steps) for word in words] == [8, 8, 4]
    assert {rank for word in words for rank in word.steps} == {(dp, 0) for dp in range(20)}
    assert {step for word in words for step in word.steps.values()} == {7}


def test_steps_that_are_planned_while_sources_are_first_read_are_left_out():
    found = [published(9_000)] * 8 + [published(ms) for ms in (10, 30, 20, 20, 20)]

    assert row_of(CASE, found) == (
        *("20 x 2", "3", "20", "26"),
        *("10.0", "2.0", "6.0", "2.0", "40"),
    )


def test_memory_is_what_it_has_come_to_since_half_of_the_steps():
    found = [published(1, mib=90)] * 5 + [published(1, mib=100)] * 4 + [published(1, mib=102.5)]

    assert memory_of(found) == ("10", "100", "+2.5")
