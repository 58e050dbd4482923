"""The end of a journal: the records that a planner reads when it takes over, and those that it may add."""

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError, StateError
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.lines import JournalLine, line_of, sound_lines
from omniload.mix.journal.reading import (
    Extent,
    read_digests,
    read_extent,
    read_journal,
    read_tail,
    state_before,
    states_in,
)
from omniload.mix.journal.records import StepRecord
from omniload.mix.state import MixState
from tests.support.plane.journals import (
    NAMES,
    PRINT,
    WEIGHTS,
    a_journal,
    opened,
    records_between,
    states,
)

FOUND = states(40)


def states_of(tail):
    base = MixState.from_json(tail.base, NAMES, PRINT)
    return digests(states_in(tail, base, NAMES, lambda _: WEIGHTS))


def digests(found):
    return [state.digest() for state in found]


@given(
    steps=st.integers(0, 39),
    every=st.integers(1, 12),
    ahead=st.integers(1, 12),
    torn=st.integers(0, 300),
)
def test_the_tail_of_a_journal_torn_anywhere_leads_to_the_last_whole_record(
    tmp_path_factory, steps, every, ahead, torn
):
    path = a_journal(tmp_path_factory.mktemp("j") / "j", FOUND[: steps + 1], every=every)
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    path.write_bytes(whole[: max(head, len(whole) - torn)])
    lines = list(sound_lines(path))

    tail = read_tail(path, ahead)

    assert tail.next_step == len([line for line in lines[1:] if not line.is_note])
    assert states_of(tail) == digests(FOUND[tail.first_step : tail.next_step + 1])
    # No base in between would have done.
    wanted = max(0, tail.next_step - ahead)
    assert tail.first_step == wanted // every * every


def test_the_tail_is_found_without_reading_what_is_before_it(tmp_path):
    path = a_journal(tmp_path / "j", FOUND, every=10)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step":3,', b'"step":4,', 1))

    assert read_tail(path, 5).first_step == 30
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        read_journal(path)


def test_a_journal_of_many_blocks_without_a_base_is_read_from_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr("omniload.mix.journal.lines._BLOCK", 100)
    path = a_journal(tmp_path / "j", FOUND)
    based = a_journal(tmp_path / "k", FOUND, every=7)

    assert read_tail(path, 3).first_step == 0
    assert read_tail(based, 3).first_step == 35
    assert read_tail(based, 6).first_step == 28


@pytest.mark.parametrize("step", [0, 9, 10, 11, 38, 39])
def test_a_step_is_read_from_the_last_base_that_leads_to_it_and_what_is_behind_it_is_not(
    tmp_path, step
):
    path = a_journal(tmp_path / "j", FOUND, every=10)
    whole = path.read_bytes()

    base, stored = read_journal(path, step)

    assert base["step"] == step // 10 * 10
    assert [record["step"] for record in stored] == list(
        range(base["step"], min(step + 1, len(FOUND) - 1))
    )
    records = [StepRecord.from_json(record, NAMES) for record in stored]
    start = MixState.from_json(base, NAMES, PRINT)
    reached = state_before(step, start, records, lambda _: WEIGHTS)
    assert reached.digest() == FOUND[step].digest()
    # Damage of a later line is none of this step.
    path.write_bytes(whole.replace(b'"step":38,', b'"step":37,', 1))
    assert step >= 38 or read_journal(path, step) == (base, stored)


@pytest.mark.parametrize("step", [4, 40])
def test_a_step_that_no_journal_leads_to_is_told_with_those_that_it_has(tmp_path, step):
    path = a_journal(tmp_path / "j", FOUND, first=5, every=10)

    with pytest.raises(
        StateError, match=rf"covers steps 5 to 38, .*before step 39; step {step} is outside"
    ):
        read_journal(path, step)


def test_a_whole_journal_is_summed_up_and_its_digests_are_read_one_after_another(
    tmp_path, monkeypatch
):
    path = tmp_path / "j"
    bad = [{0: 2}, {}, {0: 1, 1: 4}, {}, {}, {}]
    with opened(path, FOUND[3]) as journal:
        for record, found in zip(records_between(FOUND[3:10]), bad, strict=True):
            journal.append(replace(record, bad=found).to_json(NAMES))
    parsed, parse = [], JournalLine.parsed
    monkeypatch.setattr(
        JournalLine, "parsed", lambda line: parsed.append(line.text[:9]) or parse(line)
    )

    assert read_extent(path) == Extent(
        first_step=3, next_step=9, skipped={NAMES[0]: 3, NAMES[1]: 4}
    )
    assert parsed.count(b'{"step":3') + parsed.count(b'{"step":5') == len(parsed) - 2

    parsed.clear()
    digests_read = read_digests(path)
    assert next(digests_read) == (3, "digest 3")
    assert parsed.count(b'{"step":4') == 0
    assert list(digests_read) == [(step, f"digest {step}") for step in range(4, 9)]


def test_a_planner_that_takes_over_leaves_the_journal_of_an_unbroken_run(tmp_path):
    unbroken = a_journal(tmp_path / "unbroken", FOUND, every=10).read_bytes()
    path = a_journal(tmp_path / "j", FOUND[:26], every=10)
    path.write_bytes(path.read_bytes()[:-20])  # it was killed as it wrote step 24
    tail = read_tail(path, 6)

    with Journal.taken_over(path, tail, 18) as journal:
        for record, after in zip(records_between(FOUND[18:]), FOUND[19:], strict=True):
            journal.append(record.to_json(NAMES))
            if after.step % 10 == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())

    assert tail.next_step == 24
    assert path.read_bytes() == unbroken


def test_a_step_that_is_planned_again_as_another_one_is_refused_and_nothing_written(tmp_path):
    path = a_journal(tmp_path / "j", FOUND[:10])
    before = path.read_bytes()
    record = records_between(FOUND)[5].to_json(NAMES) | {"digest": "another"}

    with (
        Journal.taken_over(path, read_tail(path, 4), 5) as journal,
        pytest.raises(
            IntegrityError, match=r"step 5 planned again has digest another, not .*'digest 5'"
        ),
    ):
        journal.append(record)

    assert path.read_bytes() == before


def test_a_journal_that_nobody_keeps_stays_short_and_holds_what_a_planner_needs(tmp_path):
    path = tmp_path / "j"
    sizes, reached = [], []
    with opened(path, FOUND[0], durable=False) as journal:
        for record, after in zip(records_between(FOUND), FOUND[1:], strict=True):
            journal.append(record.to_json(NAMES))
            if after.step % 4 == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())
            tail = read_tail(path, 4)
            reached.append(tail.next_step - max(0, after.step - 4) + 1 <= len(states_of(tail)))
            sizes.append(path.stat().st_size)
            assert states_of(tail)[-1] == after.digest()

    assert all(reached)
    assert max(sizes[12:]) < 1.2 * max(sizes[:12])


def test_a_run_that_resumes_keeps_the_bases_before_its_step(tmp_path):
    path = a_journal(tmp_path / "j", FOUND[:25], every=5)

    opened(path, FOUND[10]).close()

    lines = list(sound_lines(path))
    assert [line.parsed()["step"] for line in lines if line.is_note] == [5, 10]
    assert lines[-1].is_note
    assert read_tail(path, 1).first_step == 5
    assert len(read_journal(path)[1]) == 10


def a_journal_with(path, note):
    """Return a journal of five steps and a note after them."""
    a_journal(path, FOUND[:6])
    *_, last = sound_lines(path)
    with path.open("ab") as file:
        file.write(bytes(line_of(note, last.checksum)))
    return path


def test_a_note_that_this_release_does_not_know_is_refused(tmp_path):
    path = a_journal_with(tmp_path / "j", {"kind": "spell", "step": 5})

    with pytest.raises(StateError, match=r"j:7: a note of kind 'spell', this release knows base"):
        read_journal(path)


@pytest.mark.parametrize("step", [4, 6, "5"])
def test_a_base_of_another_step_than_the_next_is_refused(tmp_path, step):
    state = FOUND[4].to_json(NAMES, PRINT)
    path = a_journal_with(tmp_path / "j", {"kind": "base", "step": step, "state": state})

    with pytest.raises(IntegrityError, match=r"j:7: a note of step .* where step 5 is due"):
        read_journal(path)


def test_a_journal_of_the_version_before_is_read_and_gone_on_with(tmp_path):
    path = a_journal(tmp_path / "j", FOUND[:6])
    first, *rest = sound_lines(path)
    lines = [line_of(first.parsed() | {"version": 2}, b"")]
    for line in rest:
        lines.append(line_of(orjson.loads(line.text), lines[-1].checksum))
    path.write_bytes(b"".join(map(bytes, lines)))

    a_journal(path, FOUND[:12], first=5, every=10)

    assert states_of(read_tail(path, 1)) == digests(FOUND[10:12])
    assert len(read_journal(path)[1]) == 11
