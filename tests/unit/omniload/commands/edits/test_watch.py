"""When a file counts as saved, and which files cannot be watched."""

import yaml

from omniload.base.errors import ConfigError
from omniload.commands.edits.watch import STILL_S, Saves, mark_of
from omniload.mix.run_record import write_run_record
from tests.support.plane.builders import a_mix
from tests.support.plane.edits.mix_commands import run_mix

OLD, SHORT, NEW = (1, 90, 5), (1, 20, 7), (1, 95, 8)


def looked(saves, *marks, every_s=0.1):
    """Look at marks one after another; return the places of those that were reported as saves."""
    return [i for i, mark in enumerate(marks) if saves.look(mark, i * every_s)]


def test_a_file_is_saved_once_it_was_still_and_told_once():
    assert looked(Saves(), *[OLD] * 10) == [3]


def test_half_a_file_is_no_save_nor_is_one_that_is_not_there():
    saves = Saves()
    assert looked(saves, *[OLD] * 4) == [3]

    told = looked(saves, None, SHORT, SHORT, NEW, NEW, NEW, NEW, NEW)

    assert told == [6]


def test_a_file_that_is_renamed_over_is_saved_though_it_has_the_same_size_and_time():
    saves = Saves()
    looked(saves, *[OLD] * 4)

    assert looked(saves, *[(2, *OLD[1:])] * 5) == [3]


def test_a_save_that_is_forgotten_is_told_again():
    saves = Saves()
    looked(saves, *[OLD] * 4)
    saves.forget()

    assert saves.look(OLD, STILL_S * 9)
    assert not saves.look(OLD, STILL_S * 10)


def test_an_empty_file_has_no_mark_and_any_change_gives_another(tmp_path):
    file = tmp_path / "mix.yaml"
    assert mark_of(file) is None
    file.write_text("")
    assert mark_of(file) is None
    file.write_text("a")
    one = mark_of(file)
    (tmp_path / "other").write_text("b")
    (tmp_path / "other").replace(file)

    assert None not in (one, mark_of(file))
    assert one != mark_of(file)


def test_links_in_a_circle_are_told_by_their_name(tmp_path):
    mix_path, circle = tmp_path / "mix.yaml", tmp_path / "circle.yaml"
    mix_path.write_text(yaml.safe_dump(a_mix().model_dump(mode="json")))
    write_run_record(tmp_path / "run", mix_path, {"dp": 1})
    circle.symlink_to(circle)

    told = run_mix("watch", tmp_path / "run", circle, "--once").exception

    assert isinstance(told, ConfigError)
    assert "circle.yaml" in str(told)
