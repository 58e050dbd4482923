"""``drawn_before``: records that another loader had drawn are left out of the first epoch, and of no other."""

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
from omniload.source.distinct.drawn_before import write_drawn
from omniload.source.parts.share import Part
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.edits.mix_commands import run_mix
from tests.support.plane.sources.drawn_texts import LEFT, TEXTS, a_mix, drawn, in_folder, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return in_folder(tmp_path, monkeypatch)


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
    write("json")  # Mosaic's index names the plain file

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
    assert "no such file; keep it next to the mix file" in str(gone.exception)


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
            ({"shard": SHARDS}, "1", "column 'record' is missing, not int64"),
            ({"shard": RECORDS, "record": RECORDS}, "1", "column 'shard' is int64, not string"),
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
            ConfigError, match=r"drawn\.arrow: no such file; keep it next to the mix"
        ):
            drawn(a_mix())

    def test_damage_in_the_middle(self, folder):
        write_drawn(Path("drawn.arrow"), {"a.parquet": np.arange(50)}.items())
        data = bytearray((folder / "drawn.arrow").read_bytes())
        data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64
        (folder / "drawn.arrow").write_bytes(data)

        with pytest.raises(ConfigError, match=r"sources\.web\.drawn_before"):
            drawn(a_mix())


def test_a_shard_that_is_named_whole_is_not_taken_for_one_whose_name_ends_so(folder):
    inner = folder / folder.relative_to("/")
    inner.mkdir(parents=True)
    shutil.copy(folder / "a.parquet", inner)
    write_drawn(Path("drawn.arrow"), [(str(folder / "a.parquet"), np.arange(49))])

    assert drawn(a_mix(path=["a.parquet", f"{inner}/*.parquet"])) == sorted([*range(50), 49])
