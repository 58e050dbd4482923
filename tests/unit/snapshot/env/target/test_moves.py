"""The renames of a restore, the journal, and what each step does when it is done already."""

import json
from pathlib import Path

import pytest

from omniload.base.errors import StateError
from snapshot.env.format.entries import Entry, Kind, Target
from snapshot.env.node.tree import listing_of
from snapshot.env.target.environment import Environment
from snapshot.env.target.moves import carry_out, plan_moves
from snapshot.env.target.records import Move, Record, Records
from tests.support.snapshot.env_builders import (
    a_file,
    a_folder,
    a_link,
    a_restorer,
    contents,
    environment_at,
    saved,
)

RECORD = Record(
    action="apply",
    key="k",
    form="link",
    base={"image": "", "installed": "x"},
    targets=("/t",),
    moves=(Move(0, "na\udcffme", stages=True), Move(0, "old", stages=False)),
    boot="b",
)


def moves_of(*entries, **there):
    kinds = {path.replace("__", "/"): kind for path, kind in there.items()}
    return [tuple(m[1:]) for m in plan_moves(listing_of(entries), lambda _, path: kinds.get(path))]


def test_a_new_directory_moves_as_a_whole():
    moves = moves_of(a_folder(""), a_folder("p"), a_file("p/a"), a_folder("p/q"), a_file("p/q/b"))

    assert moves == [("p", True)]


def test_in_a_directory_that_is_there_files_move_alone():
    moves = moves_of(
        a_folder(""),
        a_folder("p"),
        a_file("p/a"),
        a_folder("p/q"),
        a_file("p/q/b"),
        p=Kind.DIRECTORY,
    )

    assert moves == [("p/a", True), ("p/q", True)]


def test_a_directory_takes_the_place_of_a_file_or_a_link_as_a_whole():
    entries = (a_folder(""), a_folder("p"), a_file("p/a"))

    assert moves_of(*entries, p=Kind.FILE) == [("p", True)]
    assert moves_of(*entries, p=Kind.LINK) == [("p", True)]


def test_links_and_files_take_the_place_of_anything():
    assert moves_of(a_folder(""), a_link("l", "x"), l=Kind.DIRECTORY) == [("l", True)]
    assert moves_of(a_folder(""), a_file("f"), f=Kind.LINK) == [("f", True)]


def test_a_deletion_moves_only_what_is_there():
    gone = Entry(0, "old", Kind.DELETED)

    assert moves_of(a_folder(""), gone) == []
    assert moves_of(a_folder(""), gone, old=Kind.DIRECTORY) == [("old", False)]


def test_a_name_that_only_begins_like_a_directory_is_not_in_it():
    moves = moves_of(a_folder(""), a_folder("p"), a_file("p.py"))

    assert sorted(moves) == [("p", True), ("p.py", True)]


def test_targets_do_not_cover_each_other():
    entries = (a_folder(""), a_folder("p"), a_folder("", 1), a_folder("p", 1), a_file("p/x", 1))

    def there(number, path):
        return Kind.DIRECTORY if number == 1 and path == "p" else None

    assert [m[:2] for m in plan_moves(listing_of(entries), there)] == [
        (0, "p"),
        (1, "p/x"),
    ]


def test_a_record_reads_back_as_it_was_whatever_its_paths(tmp_path):
    records = Records(str(tmp_path))
    records.write("record", RECORD)

    assert records.read("record") == RECORD
    assert records.read("journal") is None
    records.remove("record")
    records.remove("record")
    assert records.read("record") is None


def test_a_record_is_replaced_in_one_go(tmp_path):
    records = Records(str(tmp_path))
    records.write("record", RECORD)
    records.write("record", Record(action="apply", key="2", form="copy", base={}, targets=()))

    assert records.read("record").key == "2"
    assert [path.name for path in records.folder.iterdir()] == ["record.json"]


@pytest.mark.parametrize("text", ["", "{", "not json", '{"version": 1, "moves"'])
def test_half_a_record_is_a_clear_fault(tmp_path, text):
    records = Records(str(tmp_path))
    records.folder.mkdir()
    (records.folder / "journal.json").write_text(text)

    with pytest.raises(StateError, match="make the environment anew"):
        records.read("journal")


def test_a_record_of_another_version_is_refused(tmp_path):
    records = Records(str(tmp_path))
    records.folder.mkdir()
    (records.folder / "record.json").write_text(json.dumps({"version": 3}))

    with pytest.raises(StateError, match="version 3, this code reads 1"):
        records.read("record")


@pytest.fixture
def half_done(tmp_path):
    """A target with a stage of two files and a journal that names them and a deletion."""
    target = tmp_path / "t"
    stage = target / ".omniload-env" / "stage"
    stage.mkdir(parents=True)
    (target / ".omniload-env" / "backup").mkdir()
    (stage / "0").write_text("new a")
    (stage / "1").write_text("new b")
    (target / "a").write_text("old a")
    (target / "c").write_text("old c")
    moves = (Move(0, "a", stages=True), Move(0, "b", stages=True), Move(0, "c", stages=False))
    journal = Record(
        action="apply", key="k", form="copy", base={}, targets=(str(target),), moves=moves
    )
    records = Records(str(tmp_path))
    records.write("journal", journal)
    return records, journal, target


def shown(target):
    return {p.name: p.read_text() for p in target.iterdir() if p.is_file()}


def test_a_journal_is_carried_out_once_and_becomes_the_record(half_done):
    records, journal, target = half_done

    carry_out(records, journal)
    carry_out(records, journal)

    assert shown(target) == {"a": "new a", "b": "new b"}
    assert records.read("journal") is None
    assert records.read("record") == journal
    backups = {p.name: p.read_text() for p in (target / ".omniload-env" / "backup").iterdir()}
    assert backups == {"0": "old a", "2": "old c"}


def test_a_journal_that_was_begun_is_carried_on(half_done):
    records, journal, target = half_done
    (target / "a").rename(target / ".omniload-env" / "backup" / "0")

    carry_out(records, journal)

    assert shown(target) == {"a": "new a", "b": "new b"}


def test_what_came_back_since_the_kill_is_replaced(half_done):
    records, journal, target = half_done
    (target / "a").rename(target / ".omniload-env" / "backup" / "0")
    (target / "a").write_text("somebody else's")

    carry_out(records, journal)

    assert shown(target)["a"] == "new a"


def test_an_undo_brings_back_what_was_there_and_leaves_nothing_of_ours(half_done):
    records, journal, target = half_done
    carry_out(records, journal)

    carry_out(records, Record(**{**fields_of(journal), "action": "undo"}))

    assert shown(target) == {"a": "old a", "c": "old c"}
    assert not (target / ".omniload-env").exists()
    assert records.read("record") is None


def test_an_undo_of_something_the_user_removed_brings_back_the_old_one(half_done):
    records, journal, target = half_done
    carry_out(records, journal)
    (target / "a").unlink()
    (target / "b").unlink()

    carry_out(records, Record(**{**fields_of(journal), "action": "undo"}))

    assert shown(target) == {"a": "old a", "c": "old c"}


def fields_of(record):
    return {name: getattr(record, name) for name in Record.__dataclass_fields__}


def test_a_directory_of_the_environment_behind_a_link_is_refused(tmp_path):
    environment, manifest, _ = saved(tmp_path)
    site = Path(environment.targets[1].path)
    (site / "shared").rename(tmp_path / "elsewhere")
    (site / "shared").symlink_to(tmp_path / "elsewhere")
    before = contents(environment)

    # The link itself gives way to a directory of the snapshot; nothing is written behind it.
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert not (tmp_path / "elsewhere" / "added.py").exists()
    assert (site / "shared" / "added.py").exists()
    with environment.locked():
        environment.clear(environment.heal())
    assert contents(environment) == before


def test_an_environment_reached_through_a_link_is_the_same_environment(tmp_path):
    environment, manifest, held = saved(tmp_path)
    (tmp_path / "by-link").symlink_to(environment.interpreter.prefix)

    again = environment_at(tmp_path / "by-link")
    a_restorer(again, tmp_path).restore(manifest.head.key, "copy")

    assert again.targets == environment.targets
    assert contents(environment) == held
    assert environment.records.read("record").key == manifest.head.key


def test_an_environment_without_a_record_needs_no_clearing(tmp_path):
    environment = Environment(None, (Target("t", str(tmp_path)),), Records(str(tmp_path)))

    environment.clear(None)

    assert environment.heal() is None
