"""``drawn_before``: what another loader had drawn is left out of the first epoch, and of no other."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import omniload
from omniload.base.config import checked
from omniload.base.errors import ConfigError, StateError
from omniload.mix.config import MixConfig
from omniload.mix.order import Order
from omniload.source.distinct.drawn_before import drawn_before, drawn_so_far, write_drawn
from omniload.source.formats.opening import open_format
from omniload.source.parts.share import Part
from omniload.source.source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.edits.mix_commands import run_mix

TEXTS = [f"d{i}" for i in range(100)]
DRAWN = {"a": np.array([0, 7, 8, 49]), "b": np.array([3])}
"""By shard of fifty."""
LEFT = sorted(set(range(100)) - {0, 7, 8, 49, 53})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, texts in (("a", TEXTS[:50]), ("b", TEXTS[50:])):
        rows = [{"text": text} for text in texts]
        pq.write_table(pa.Table.from_pylist(rows), f"{name}.parquet", row_group_size=9)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / f"{name}.jsonl").write_bytes(lines)
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(lines))
    return tmp_path


def a_mix(kind="parquet", path=None, **source):
    declared = {"type": kind, "path": path or f"*.{kind}", "text": "text", **source}
    return {
        "version": 2,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"web": {"drawn_before": "drawn.arrow", **declared}},
        "mix": {"stages": [{"weights": {"web": 1}}], "stop": "each_once"},
        "pack": {"length": 16},
        "batch": {"tokens": 64, "micro_tokens": 32},
    }


def write(kind="parquet", **shards):
    found = {f"{name}.{kind}": records for name, records in (DRAWN | shards).items()}
    write_drawn(Path("drawn.arrow"), found.items())


def drawn(mix, **words):
    """Return the numbers of the texts that a run draws, sorted."""
    with omniload.open(mix, arrays="numpy", **words) as loader:
        texts = [bytes(batch.tokens[batch.tokens < 256].tolist()) for batch in loader]
    return sorted(map(int, b"".join(texts).replace(b"\0", b"").decode().split("d")[1:]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_first_epoch_holds_every_other_record_once(kind):
    write(kind)

    assert drawn(a_mix(kind)) == LEFT


def test_records_of_texts_are_known_by_their_files(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_text(text)
    left_out = (1, 7, 70)
    write_drawn(
        Path("drawn.arrow"), {f"{i:03}.txt": np.zeros(1, np.int64) for i in left_out}.items()
    )
    mix = a_mix("text", "*.txt")
    del mix["sources"]["web"]["text"]
    mix["sources"]["web"]["files_per_unit"] = 16

    assert drawn(mix) == sorted(set(range(100)) - set(left_out))


def test_every_later_epoch_holds_all():
    write()
    mix = a_mix()
    mix["mix"] = {"amounts": {"web": {"epochs": 3}}}

    assert drawn(mix) == sorted(LEFT + 2 * list(range(100)))


def test_a_shard_is_known_compressed_or_not(folder):
    write("json")  # as Mosaic's index names the plain file

    assert drawn(a_mix("jsonl", "*.json.gz")) == LEFT


def test_it_goes_with_conditions_and_equal_texts():
    rows = [{"text": f"d{i % 40}", "n": i % 2} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=9)
    write_drawn(Path("drawn.arrow"), {"a.parquet": np.array([0, 2, 3])}.items())
    found = drawn(a_mix(path="a.parquet", where={"n": 0}, dedupe="content"))

    assert found == list(range(4, 40, 2))


def test_what_is_held_out_is_not_touched():
    write()
    mix = a_mix() | {"splits": {"eval": 0.4}}

    held_out, trained = drawn(mix, split="eval"), drawn(mix)

    whole = drawn(a_mix(drawn_before=None) | {"splits": {"eval": 0.4}}, split="eval")
    assert held_out == whole
    assert trained == sorted(set(LEFT) - set(whole))


@pytest.mark.parametrize("stop", ["never", "each_once"])
def test_a_first_epoch_in_which_nothing_is_left_to_train_on_is_gone_through(stop):
    rows = [{"text": f"d{i}" if i < 49 else ""} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=9)
    write_drawn(Path("drawn.arrow"), {"a.parquet": np.arange(49)}.items())
    mix = a_mix(path="a.parquet")
    mix["sources"]["other"] = {"type": "parquet", "path": "b.parquet", "text": "text"}
    mix["mix"] = {"stages": [{"weights": {"web": 1, "other": 1}}], "stop": stop}

    with omniload.open(mix, arrays="numpy", steps=6) as loader:
        batches = list(loader)
        state = loader.state_dict()
    with omniload.open(mix, arrays="numpy", steps=7, state=state) as loader:
        batches += list(loader)

    drawn_of_web = sum(batch.tokens_by_source["web"] for batch in batches)
    assert (drawn_of_web > 100) if stop == "never" else (drawn_of_web == 0)


def test_readers_of_parts_leave_out_what_one_reader_does():
    write()
    mix = checked(a_mix(), MixConfig, name="mix")
    source = open_source(
        SourceSpec("web", mix.sources["web"], seed=1, tokenizer=mix.tokenizer, base_dir=Path())
    )

    whole = source.read(0, 200).table.positions_N
    parts = [source.read_part(0, 200, Part(n, 3)).table.positions_N for n in range(3)]

    assert len(whole) == 195
    assert sorted(np.concatenate(parts).tolist()) == whole.tolist()


def test_a_run_goes_on_with_the_same_records_and_is_refused_without_them():
    write()
    mix = a_mix()
    with omniload.open(mix, arrays="numpy") as loader:
        loader.next_batch()
        state = loader.state_dict()
        rest = [batch.tokens.copy() for batch in loader]

    with omniload.open(mix, arrays="numpy", state=state) as loader:
        again = [batch.tokens.copy() for batch in loader]
    write(b=np.array([4]))

    assert len(rest) > 3
    assert all(map(np.array_equal, rest, again))
    said = (
        r"sources\.web\.drawn_before: \w+ saved, \w+ now, of source 'web' the records that another"
    )
    with pytest.raises(StateError, match=said):
        drawn(mix, state=state)
    with pytest.raises(StateError, match=r"drawn_before: \w+ saved, absent now"):
        drawn(a_mix(drawn_before=None), state=state)


def test_a_file_of_the_same_records_may_be_another(folder):
    write()
    with omniload.open(a_mix(), arrays="numpy") as loader:
        state = loader.state_dict()
    table = pa.table(
        {
            "shard": pa.array(["b.parquet", *["a.parquet"] * 5]).dictionary_encode(),
            "record": [3, 49, 8, 7, 0, 7],
        }
    )
    schema = table.schema.with_metadata({"omniload.drawn": "1"})
    with pa.ipc.new_file("other.arrow", schema) as out:
        out.write_table(table.cast(schema), max_chunksize=2)

    assert drawn(a_mix(drawn_before="other.arrow"), state=state) == LEFT


def stored(columns, version="1"):
    schema = pa.schema(
        [(name, array.type) for name, array in columns.items()],
        metadata={"omniload.drawn": version} if version else None,
    )
    with pa.ipc.new_file("drawn.arrow", schema) as out:
        out.write_batch(pa.record_batch(list(columns.values()), schema=schema))


SHARDS, RECORDS = pa.array(["a.parquet"]), pa.array([1])


def test_a_check_reads_the_file_every_time_and_says_the_line(folder):
    write()
    (folder / "mix.yaml").write_text(yaml.safe_dump(a_mix(), sort_keys=False))
    line = 1 + (folder / "mix.yaml").read_text().splitlines().index("    drawn_before: drawn.arrow")

    first = run_mix("check", "mix.yaml")
    again = run_mix("check", "mix.yaml")
    (folder / "drawn.arrow").unlink()
    gone = run_mix("check", "mix.yaml")

    assert (first.exception, again.exception) == (None, None), first.output
    said = f"mix.yaml:{line}: sources.web.drawn_before: "
    assert str(gone.exception).startswith(said)
    assert "no such file; keep it beside the mix file" in str(gone.exception)


class TestRefused:
    @pytest.mark.parametrize(
        ("shards", "said"),
        [
            (
                {"c.parquet": [1]},
                r"the shard 'c\.parquet', and 0 files of the source are called so",
            ),
            ({"a.parquet": [50]}, r"record 50 of 'a\.parquet', which has 50; is it of these"),
            ({"a.parquet": [-1]}, "record -1 of"),
            ({"": [1]}, "names the shard ''"),
            (
                {"a.parquet": range(50), "b.parquet": range(50)},
                "names all 100 records of the source",
            ),
        ],
    )
    def test_what_the_source_has_not(self, shards, said):
        write_drawn(
            Path("drawn.arrow"), {name: np.array(at) for name, at in shards.items()}.items()
        )

        with pytest.raises(ConfigError, match=said):
            drawn(a_mix())

    def test_a_name_of_two_shards(self, folder):
        for name in ("x", "y"):
            (folder / name).mkdir()
            shutil.copy(folder / "a.parquet", folder / name)
        write_drawn(Path("drawn.arrow"), {"a.parquet": np.array([1])}.items())

        with pytest.raises(ConfigError, match="2 files of the source are called so; name more of"):
            drawn(a_mix(path=["x/*.parquet", "y/*.parquet"]))

        write_drawn(Path("drawn.arrow"), {"y/a.parquet": np.array([1])}.items())
        found = drawn(a_mix(path=["x/*.parquet", "y/*.parquet"]))

        assert found == sorted([*range(50), 0, *range(2, 50)])

    @pytest.mark.parametrize(
        ("columns", "version", "said"),
        [
            ({"shard": SHARDS, "record": RECORDS}, None, "has None for omniload.drawn"),
            ({"shard": SHARDS, "record": RECORDS}, "2", "has b'2' for omniload.drawn"),
            ({"shard": SHARDS}, "1", "has nothing as column 'record', int64 is read"),
            ({"shard": RECORDS, "record": RECORDS}, "1", "has int64 as column 'shard', string is"),
            (
                {"shard": pa.array([None], pa.string()), "record": RECORDS},
                "1",
                "without a shard or a record",
            ),
            (
                {"shard": SHARDS, "record": pa.array([None], pa.int64())},
                "1",
                "without a shard or a record",
            ),
        ],
    )
    def test_files_of_another_form(self, columns, version, said):
        stored(columns, version)

        with pytest.raises(ConfigError, match=said):
            drawn(a_mix())

    @pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"PK\x03\x04", b"\x80\x02."])
    def test_other_files(self, folder, content):
        (folder / "drawn.arrow").write_bytes(content)

        with pytest.raises(ConfigError, match="is no such file of records"):
            drawn(a_mix())

    def test_none_at_all(self):
        with pytest.raises(
            ConfigError, match=r"drawn\.arrow: no such file; keep it beside the mix"
        ):
            drawn(a_mix())

    def test_damage_in_the_middle(self, folder):
        write_drawn(Path("drawn.arrow"), {"a.parquet": np.arange(50)}.items())
        data = bytearray((folder / "drawn.arrow").read_bytes())
        data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64
        (folder / "drawn.arrow").write_bytes(data)

        with pytest.raises(ConfigError, match=r"sources\.web\.drawn_before"):
            drawn(a_mix())


def so_far(before, path=None, own=None, waiting=(), at=(0, 0), **source):
    """Return what a run had drawn of the parquet files, and the source that it drew from."""
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


class TestWhatARunHadDrawn:
    def test_a_record_of_which_something_waits_counts_as_not_drawn(self):
        whole, opened, spec = so_far(before=20)
        source = open_source(spec)

        found, _, _ = so_far(before=20, waiting=[3, 19])

        numbers = [np.flatnonzero(each.drawn.between(0, 100)) for each in (whole, found)]
        left = sorted({*numbers[0].tolist()} - {*numbers[1].tolist()})
        texts = [bytes(source.read(p, p + 1).tokens.values_V[:-1].tolist()) for p in (3, 19)]
        assert left == sorted(int(text.decode()[1:]) for text in texts)
        assert opened.format.units().rows_U.sum() == whole.drawn.count == 100

    def test_what_it_left_out_of_its_own_first_epoch_stays_out(self):
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
    def test_the_record_at_the_cursor_is_drawn_once_its_one_sample_is(self, at, total, again):
        found, _, _ = so_far(before=20, at=at)

        assert (found.drawn.total(), found.again) == (total, again)

    def test_behind_the_last_record_a_whole_epoch_is_next(self):
        found, _, _ = so_far(before=99, at=(1, 0))

        assert (found.epoch, found.drawn.total()) == (1, 0)

    def test_of_documents_that_are_joined_only_whole_units_are_drawn(self):
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

    def test_an_epoch_that_is_over_has_nothing_behind_it(self):
        found, _, _ = so_far(before=200)

        assert (found.epoch, found.drawn.total(), list(found.by_shard())) == (2, 0, [])

    def test_files_of_one_name_are_told_apart_by_their_folders(self, folder):
        (folder / "x").mkdir()
        shutil.copy(folder / "a.parquet", folder / "x")
        paths = ["a.parquet", "b.parquet", "x/*.parquet"]

        found, _, _ = so_far(before=120, path=paths)
        write_drawn(Path("drawn.arrow"), found.by_shard())

        assert [name.removeprefix(f"{folder}/") for name in found.names] == [
            "a.parquet",
            "b.parquet",
            "x/a.parquet",
        ]
        assert len(drawn(a_mix(path=paths))) == 30


def test_a_shard_that_is_named_whole_is_not_taken_for_one_whose_name_ends_so(folder):
    inner = folder / folder.relative_to("/")
    inner.mkdir(parents=True)
    shutil.copy(folder / "a.parquet", inner)
    write_drawn(Path("drawn.arrow"), [(str(folder / "a.parquet"), np.arange(49))])

    assert drawn(a_mix(path=["a.parquet", f"{inner}/*.parquet"])) == sorted([*range(50), 49])
