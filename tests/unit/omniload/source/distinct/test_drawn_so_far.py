"""The drawn records of a run, which the next run leaves out."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from omniload.base.config import checked
from omniload.mix.config import MixConfig
from omniload.mix.order import Order
from omniload.source.distinct.drawn_before import drawn_before, drawn_so_far, write_drawn
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.drawn_texts import a_mix, drawn, in_folder, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return in_folder(tmp_path, monkeypatch)


def so_far(before, path=None, own=None, waiting=(), at=(0, 0), **source):
    """Return the records that a run had drawn from the parquet files, and its source."""
    mix = checked(a_mix(path=path, drawn_before=own, **source), MixConfig, name="mix")
    spec = SourceSpec.of(mix, "web", Path.cwd())
    opened = open_format(spec)
    units = opened.format.units()
    cursor = (before, *at)
    return (
        drawn_so_far(spec, units, opened.files, cursor=cursor, waiting=waiting),
        opened,
        spec,
    )


def test_a_record_of_which_something_waits_counts_as_not_drawn():
    whole, opened, spec = so_far(before=20)
    source = open_source(spec)

    found, _, _ = so_far(before=20, waiting=[3, 19])

    numbers = [np.flatnonzero(each.drawn.between(0, 100)) for each in (whole, found)]
    left = sorted({*numbers[0].tolist()} - {*numbers[1].tolist()})
    texts = [bytes(source.read(p, p + 1).tokens.values_V[:-1].tolist()) for p in (3, 19)]
    assert left == sorted(int(text.decode()[1:]) for text in texts)
    assert opened.format.units().rows_U.sum() == whole.drawn.count == 100


def test_what_it_left_out_of_its_own_first_epoch_stays_out():
    write()

    found, opened, spec = so_far(before=30, own="drawn.arrow")
    later, _, _ = so_far(before=130, own="drawn.arrow")

    own = drawn_before(spec, opened.format.units(), opened.files)
    assert (found.drawn.packed & own.drawn.packed == own.drawn.packed).all()
    assert 30 < found.drawn.total() <= 35
    assert (later.epoch, later.drawn.total()) == (1, 30)


@pytest.mark.parametrize(
    ("at", "total", "again"), [((0, 0), 20, 0), ((1, 0), 21, 0), ((0, 16), 20, 1)]
)
def test_the_record_at_the_cursor_is_drawn_once_its_one_sample_is(at, total, again):
    found, _, _ = so_far(before=20, at=at)

    assert (found.drawn.total(), found.again) == (total, again)


def test_a_record_that_waits_from_the_epoch_before_comes_once_for_both():
    _, _, spec = so_far(before=1)
    source = open_source(spec)

    def text_at(position):
        return bytes(source.read(position, position + 1).tokens.values_V[:-1].tolist()).decode()

    # One that was drawn in this epoch since.
    again = text_at(110)
    waits = next(position for position in range(100) if text_at(position) == again)
    found, _, _ = so_far(before=120, waiting=[waits])
    write_drawn(Path("drawn.arrow"), found.by_shard())

    rest = drawn(a_mix())

    assert (found.epoch, len(rest)) == (1, 81)
    assert rest.count(int(again[1:])) == 1


def test_behind_the_last_record_a_whole_epoch_is_next():
    found, _, _ = so_far(before=99, at=(1, 0))

    assert (found.epoch, found.drawn.total()) == (1, 0)


def test_of_documents_that_are_joined_only_whole_units_are_drawn():
    joined = {"transforms": [{"type": "concat", "tokens": 8}], "shuffle": {"block_units": 2}}

    found, opened, spec = so_far(before=50, at=(2, 0), waiting=[3], **joined)

    units = opened.format.units()
    shuffle = spec.config.shuffle
    order = Order(units.rows_U, units.shards_U, seed=1, source="web", shuffle=shuffle)
    units_N = order.locate(0, 50).units_N
    (span,) = order.spans(50, 51)
    missing = {int(units_N[3]), *order.block_of(0, span.block).units_U.tolist()}
    bounds = np.append(0, units.rows_U.cumsum())
    drawn = [found.drawn.between(*bounds[u : u + 2]) for u in range(len(units.rows_U))]
    assert {bool(each.any()) == bool(each.all()) for each in drawn} == {True}
    assert found.drawn.total() > 0
    assert not any(drawn[unit].any() for unit in missing)
    assert found.again == 51 - found.drawn.total()


def test_an_epoch_that_is_over_has_nothing_behind_it():
    found, _, _ = so_far(before=200)

    assert (found.epoch, found.drawn.total(), list(found.by_shard())) == (2, 0, [])


def test_files_of_one_name_are_told_apart_by_their_folders(folder):
    (folder / "x").mkdir()
    shutil.copy(folder / "a.parquet", folder / "x")
    paths = ["a.parquet", "b.parquet", "x/*.parquet"]

    found, _, _ = so_far(before=120, path=paths)
    write_drawn(Path("drawn.arrow"), found.by_shard())

    assert found.names == (f"{folder.name}/a.parquet", "b.parquet", "x/a.parquet")
    assert len(drawn(a_mix(path=paths))) == 30


def test_files_of_one_name_may_lie_elsewhere_the_next_time(folder):
    for name in ("x", "y"):
        (folder / name).mkdir()
        shutil.copy(folder / "a.parquet", folder / name)
    found, _, _ = so_far(before=70, path=["x/*.parquet", "y/*.parquet"])
    write_drawn(Path("drawn.arrow"), found.by_shard())

    (folder / "moved").mkdir()
    for name in ("x", "y"):
        (folder / name).rename(folder / "moved" / name)

    assert len(drawn(a_mix(path=["moved/x/*.parquet", "moved/y/*.parquet"]))) == 30


def test_a_file_beside_itself_compressed_is_told_from_it(folder):
    (folder / "a.json.gz").rename(folder / "a.jsonl.gz")
    paths = ["a.jsonl", "a.jsonl.gz"]
    mix = a_mix("jsonl", paths, drawn_before=None)
    spec = SourceSpec.of(checked(mix, MixConfig, name="mix"), "web", Path.cwd())
    opened = open_format(spec)
    cursor = (70, 0, 0)
    found = drawn_so_far(spec, opened.format.units(), opened.files, cursor=cursor)
    write_drawn(Path("drawn.arrow"), found.by_shard())

    assert len(drawn(a_mix("jsonl", paths))) == 30
