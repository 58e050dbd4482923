"""The promises of a journal, wherever it is stored: inherit, and provide ``place``, a fixture that opens it.

``place()`` is for readers, ``place(claimed=True)`` for a planner; both see the records of earlier planners.
"""

import itertools
import re
from pathlib import Path

import pytest

from omniload.base.errors import IntegrityError, StateError
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.lines import last_base, sound_lines
from omniload.mix.journal.reading import Extent, read_extent, read_journal, read_tail, read_worlds
from omniload.mix.journal.segments import ASIDES, FAN_IN, Life, Mark, Segment
from tests.support.plane.journals import NAMES, PRINT, a_journal, opened, records_between, states

FOUND = states(12)
LONG = states(40)
KEPT, KEPT_EVERY = 8, 3
"""Steps that are kept at least, and steps between two bases."""
WORLD = {"step": 2, "generation": 1, "sizes": {"dp": 3}}


def claiming(open_storage):
    """Return ``place``: a function that opens a storage and claims it for a planner."""

    def place(*, claimed=False):
        storage = open_storage()
        if claimed:
            storage.claim()
        return storage

    return place


def bytes_of(place):
    # A single call would request 8 KiB at a time from a store.
    with place().opened() as file:
        return b"".join(iter(lambda: file.read(1 << 20), b""))


def texts_of(place):
    return [line.text for line in sound_lines(place)]


def take_over(storage, after):
    return Journal.taken_over(storage, read_tail(storage, 3), after.step, keep_steps=KEPT)


def resume(storage, after):
    return opened(storage, after, keep_steps=KEPT)


def unbroken(tmp_path, found, **changes):
    return a_journal(tmp_path / "unbroken", found, **changes).read_bytes()


def asides_of(place):
    names = {entry.name for entry in place().store.listing("")}
    return {name for name in names if name.startswith("aside")}


class JournalContract:
    def test_there_is_none_before_it_is_begun(self, place):
        assert not place().exists()
        what = "; give the folder" if isinstance(place(), Path) else " where runtime.journal of the"
        with pytest.raises(StateError, match=f"no journal{what} "):
            read_journal(place())

    def test_what_was_appended_is_read_back_and_is_the_bytes_of_a_file(self, place, tmp_path):
        a_journal(place(claimed=True), FOUND, every=5)

        base, records = read_journal(place())

        assert base == FOUND[0].to_json(NAMES, PRINT)
        assert [record["step"] for record in records] == list(range(11))
        assert bytes_of(place) == unbroken(tmp_path, FOUND, every=5)
        assert read_tail(place(), 3).first_step == 5

    def test_a_window_of_steps_is_there_whole(self, place, tmp_path):
        with opened(place(claimed=True), FOUND[0]) as journal:
            with journal.together():
                for record in records_between(FOUND[:4]):
                    journal.append(record.to_json(NAMES))
                assert read_journal(place())[1] == []
            assert len(read_journal(place())[1]) == 3

        assert bytes_of(place) == unbroken(tmp_path, FOUND[:4])

    def test_a_planner_that_takes_over_leaves_the_journal_of_an_unbroken_run(self, place, tmp_path):
        a_journal(place(claimed=True), FOUND[:8], every=5)
        storage = place(claimed=True)

        with Journal.taken_over(storage, read_tail(storage, 3), 4) as journal:
            for record, after in zip(records_between(FOUND[4:]), FOUND[5:], strict=True):
                journal.append(record.to_json(NAMES))
                if after.step % 5 == 0:
                    journal.append_base(after.to_json(NAMES, PRINT), after.digest())

        assert bytes_of(place) == unbroken(tmp_path, FOUND, every=5)

    def test_a_step_that_is_planned_again_as_another_one_is_refused(self, place):
        a_journal(place(claimed=True), FOUND[:8])
        before, storage = bytes_of(place), place(claimed=True)
        record = records_between(FOUND)[5].to_json(NAMES) | {"digest": "another"}

        with (
            Journal.taken_over(storage, read_tail(storage, 4), 5) as journal,
            pytest.raises(IntegrityError, match="step 5 planned again has digest another"),
        ):
            journal.append(record)

        assert bytes_of(place) == before

    @pytest.mark.parametrize("back_to", [3, 5, 6])
    def test_steps_that_are_taken_back_leave_no_trace(self, place, tmp_path, back_to):
        journal, records = opened(place(claimed=True), FOUND[0]), records_between(FOUND)

        def append(first, last):
            for record, after in zip(records[first:last], FOUND[first + 1 :], strict=False):
                journal.append(record.to_json(NAMES))
                if after.step % 5 == 0:
                    journal.append_base(after.to_json(NAMES, PRINT), after.digest())

        with journal:
            append(0, 7)
            journal.cut(back_to)
            assert read_tail(place(), 0).next_step == back_to
            append(back_to, 11)

        assert bytes_of(place) == unbroken(tmp_path, FOUND, every=5)
        storage = place(claimed=True)
        Journal.taken_over(storage, read_tail(storage, 3), 9).close()
        assert bytes_of(place) == unbroken(tmp_path, FOUND, every=5)

    def test_a_step_of_a_planner_before_is_not_taken_back(self, place):
        a_journal(place(claimed=True), FOUND[:8])
        storage = place(claimed=True)

        with (
            Journal.taken_over(storage, read_tail(storage, 4), 5) as journal,
            pytest.raises(StateError, match="step 5 cannot be taken back"),
        ):
            journal.cut(5)

    def test_whoever_reads_as_steps_are_taken_back_has_what_was_there_before(self, place):
        records = [record.to_json(NAMES) for record in records_between(FOUND)]
        with opened(place(claimed=True), FOUND[0]) as journal:
            for record in records[:9]:
                journal.append(record)
            lines = sound_lines(place())
            read = list(itertools.islice(lines, 4))
            journal.cut(2)
            for record in records[2:4]:
                journal.append({**record, "digest": "another, and longer than before"})
            read += lines

        assert [line.parsed()["digest"] for line in read[1:]] == [
            record["digest"] for record in records[: len(read) - 1]
        ]

    def test_a_run_that_resumes_drops_the_steps_that_were_lost(self, place, tmp_path):
        a_journal(place(claimed=True), FOUND)

        a_journal(place(claimed=True), FOUND[:9], first=6)

        assert bytes_of(place) == unbroken(tmp_path, FOUND[:9])

    def test_a_cut_that_nothing_follows_is_a_cut(self, place):
        a_journal(place(claimed=True), FOUND)

        opened(place(claimed=True), FOUND[6]).close()

        assert read_tail(place(), 0).next_step == 6

    def test_a_journal_of_another_mix_is_moved_aside(self, place, caplog):
        a_journal(place(claimed=True), FOUND)

        opened(place(claimed=True), FOUND[3], {"seed": "8"}).close()

        assert "aside-1: it is of another mix or other data" in caplog.text
        assert read_tail(place(), 0).next_step == 3

    def test_a_run_from_step_0_keeps_the_steps_of_another_aside(self, place, caplog):
        a_journal(place(claimed=True), FOUND)

        opened(place(claimed=True), FOUND[0]).close()

        assert "this run begins at step 0, so they are moved to" in caplog.text
        assert "aside-1. To continue the earlier run" in caplog.text
        assert read_tail(place(), 0).next_step == 0

    def test_if_only_the_last_steps_are_kept_old_ones_go_and_a_run_goes_on(self, place, tmp_path):
        whole = texts_of(a_journal(tmp_path / "whole", LONG, every=KEPT_EVERY))
        journal = opened(place(claimed=True), LONG[0], keep_steps=KEPT)
        records, starts = records_between(LONG), {17: take_over, 23: resume, 31: take_over}
        for record, after in zip(records, LONG[1:], strict=True):
            journal.append(record.to_json(NAMES))
            if after.step % KEPT_EVERY == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())
            if after.step == 29:
                journal.cut(after.step - 1)
                journal.append(record.to_json(NAMES))
            found = read_extent(place())
            assert found.next_step == after.step
            assert min(KEPT, after.step) <= after.step - found.first_step
            assert after.step - found.first_step < 2 * KEPT + KEPT_EVERY
            if after.step in starts:
                journal.close()
                journal = starts[after.step](place(claimed=True), after)
        journal.close()

        begin = read_extent(place()).first_step
        base, kept = read_journal(place())
        assert begin > 0
        assert base == LONG[begin].to_json(NAMES, PRINT)
        assert kept == [record.to_json(NAMES) for record in records[begin:]]
        assert read_tail(place(), 0).next_step == len(records)
        # The lines are those of a journal that keeps all.
        assert texts_of(place())[1:] == whole[-len(texts_of(place())) + 1 :]

    def test_a_run_that_goes_back_before_the_kept_steps_begins_a_journal(self, place, caplog):
        a_journal(place(claimed=True), LONG, every=KEPT_EVERY, keep_steps=KEPT)

        opened(place(claimed=True), LONG[3]).close()

        begin = r"aside-1: it starts at step \d+, the run goes on from step 3"
        assert re.search(begin, caplog.text)
        assert read_tail(place(), 0).next_step == 3

    def test_ranks_are_noted(self, place):
        with opened(place(claimed=True), FOUND[0]) as journal:
            for record in records_between(FOUND[:3]):
                journal.append(record.to_json(NAMES))
            journal.append_world(WORLD)

        assert read_worlds(place()) == [{"kind": "world", **WORLD}]


class StoredJournalContract(JournalContract):
    """The further promises of a journal of objects."""

    steps = 400
    """Steps, which are written one by one: fewer if a put takes long."""

    def test_many_records_lie_in_few_objects(self, place, tmp_path):
        found = states(self.steps)
        a_journal(place(claimed=True), found, every=100)

        objects = place().store.listing("lines")

        assert len(objects) < 2 * FAN_IN + self.steps / FAN_IN**2
        assert bytes_of(place) == unbroken(tmp_path, found, every=100)

    def test_many_planners_leave_few_objects_and_the_large_ones(self, place):
        large = place(claimed=True)
        large.begin(b"base\n")
        large.append(b"x" * (3 << 20) + b"\n")
        large.close()
        content = bytes_of(place)
        for life in range(2):
            storage = place(claimed=True)
            storage.go_on(len(content))
            for number in range(FAN_IN + 4):
                line = b"%d of %d\n" % (number, life)
                storage.append(line)
                content += line
            storage.close()

        assert bytes_of(place) == content
        lines, claims = (place().store.listing(folder) for folder in ("lines", "claims"))
        assert len(claims) == 1
        assert len(lines) <= 10
        assert sorted(entry.size_bytes for entry in lines)[-2] < 1 << 20

    def test_segments_of_steps_that_are_not_kept_go(self, place):
        storage = place(claimed=True)
        a_journal(storage, states(self.steps), every=KEPT_EVERY, keep_steps=KEPT)

        begin, extents = storage.since(), storage.extents()
        stored = [entry.name for entry in storage.store.listing("lines")]

        assert sum(name.startswith("from-") for name in stored) == 1
        segments = [segment for name in stored if (segment := Segment.named(name))]
        assert all(segment.stop > begin.offset for segment in segments)
        assert extents[0].start == begin.offset
        assert read_extent(place()).first_step >= self.steps - 1 - (2 * KEPT + KEPT_EVERY)

    def test_a_reader_goes_on_while_segments_are_merged_under_it(self, place, tmp_path):
        records = records_between(FOUND)
        with opened(place(claimed=True), FOUND[0]) as journal:
            for record in records[:3]:
                journal.append(record.to_json(NAMES))
            with place().opened().detach() as reader:
                begun = reader.read(100)
                opened(place(claimed=True), FOUND[3]).close()  # its start contains the small values
                read = begun + b"".join(iter(lambda: reader.read(100), b""))

        assert read == unbroken(tmp_path, FOUND[:4])

    def test_a_stale_planner_hands_out_nothing_more(self, place):
        lost = opened(place(claimed=True), FOUND[0])
        first, second, *_ = (record.to_json(NAMES) for record in records_between(FOUND))
        lost.append(first)
        storage = place(claimed=True)

        with pytest.raises(StateError, match=r"process \d+ on '.*' has taken the journal over"):
            lost.append(second)

        # It was written before the next planner looked, so that planner has it.
        assert read_tail(storage, 0).next_step == 2
        Journal.taken_over(storage, read_tail(storage, 0), 2).close()
        assert read_tail(place(), 0).next_step == 2

    def test_of_journals_that_begin_alike_the_longest_is_kept_aside_alone(
        self, place, caplog, tmp_path
    ):
        for count in (4, 9, 6):
            a_journal(place(claimed=True), FOUND[:count])
            opened(place(claimed=True), FOUND[0]).close()

        assert asides_of(place) == {"aside-2"}
        assert [
            text.partition("moved to ")[2][-7:] for text in caplog.text.split(". To continue")[:-1]
        ] == [
            *("aside-1", "aside-2", "aside-2"),
        ]
        whole = len(unbroken(tmp_path, FOUND[:9]))
        assert max(Segment.named(e.name).stop for e in place().store.listing("aside-2")) == whole

    def test_few_journals_stay_aside_and_what_goes_is_told(self, place, caplog):
        for number in range(ASIDES + 2):
            opened(place(claimed=True), FOUND[number], {"seed": str(number)}).close()

        assert asides_of(place) == {f"aside-{number}" for number in range(2, ASIDES + 2)}
        assert f"aside-1 is removed, the oldest of {ASIDES + 1} journals" in caplog.text
        assert read_tail(place(), 0).next_step == ASIDES + 1

    def test_a_stale_planner_takes_nothing_back(self, place):
        lost = opened(place(claimed=True), FOUND[0])
        for record in records_between(FOUND[:4]):
            lost.append(record.to_json(NAMES))
        storage = place(claimed=True)

        with pytest.raises(StateError, match="has taken the journal over"):
            lost.cut(1)

        assert read_tail(storage, 0).next_step == 3

    def test_what_a_stale_planner_takes_back_late_is_there_for_the_next_one(self, place):
        """It had claimed the journal before the next planner did, and its object appears after that planner's look."""
        lost = opened(place(claimed=True), FOUND[0])
        for record in records_between(FOUND[:7]):
            lost.append(record.to_json(NAMES))
        content, late = bytes_of(place), place(claimed=True)
        begin = content.index(b'{"step":4,')
        (life,) = {Life.read(entry.name) for entry in late.store.listing("claims")} - {
            Segment.named(entry.name).life for entry in late.store.listing("lines")
        }
        storage = place(claimed=True)
        tail = read_tail(storage, 3)
        late.store.publish(f"lines/{Segment(begin - 1, begin, life).name}", b"\n")

        Journal.taken_over(storage, tail, 3).close()

        assert bytes_of(place) == content

    def test_a_mark_that_comes_late_is_void_if_the_next_planner_went_back_before_it(self, place):
        storage = place(claimed=True)
        a_journal(storage, LONG[:14], every=KEPT_EVERY)
        since = last_base(storage, at_most=9)
        life = Segment.named(storage.store.listing("lines")[0].name).life
        a_journal(place(claimed=True), LONG[:20], first=4, every=KEPT_EVERY)
        content = bytes_of(place)

        storage.store.publish(f"lines/{Mark(since, life).name}", b"")

        assert since.offset
        assert bytes_of(place) == content
        assert read_extent(place()) == Extent(first_step=0, next_step=19, skipped={})

    def test_objects_of_others_are_left_alone(self, place, tmp_path):
        storage = place(claimed=True)
        for name in ("README", "1-2-00000001-aa", "0" * 16 + "-" + "9" * 16 + "-x-y"):
            storage.store.publish(f"lines/{name}", b"mine")

        a_journal(storage, FOUND)
        a_journal(place(claimed=True), FOUND, first=11)

        assert bytes_of(place) == unbroken(tmp_path, FOUND)
        names = {entry.name for entry in storage.store.listing("lines")}
        assert {"README", "1-2-00000001-aa"} <= names

    def test_an_object_that_is_gone_from_the_middle_is_told(self, place):
        with opened(place(claimed=True), FOUND[0]) as journal:
            for record in records_between(FOUND):
                journal.append(record.to_json(NAMES))
        storage = place()
        gone, behind = itertools.islice(storage.extents(), 4, 6)
        storage.store.remove(f"lines/{gone.segment.name}")

        with pytest.raises(
            IntegrityError,
            match=rf"bytes {gone.start} to {gone.stop} .* lie in no segment, and {behind.segment.name} follows",
        ):
            read_journal(place())
