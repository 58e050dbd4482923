"""``dedupe``: of equal records the first is drawn, whichever process reads, and however often."""

import errno
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import omniload
from omniload.base.config import checked
from omniload.base.errors import ConfigError, UnavailableError
from omniload.mix.config import MixConfig
from omniload.source.distinct import mask
from omniload.source.estimate import profile
from omniload.source.formats.parquet import ParquetFormat
from omniload.source.spec import SourceSpec
from tests.support.plane.edits.mix_commands import json_of
from tests.support.plane.sources.drawn_texts import a_mix_of
from tests.support.plane.sources.drawn_texts import said_behind_d as drawn

TEXTS = [f"d{i % 37}" for i in range(100)]
"""The first 37 are all that differ."""


def a_mix(kind="parquet", **source):
    return a_mix_of(type=kind, path=f"*.{kind}", text="text", **source)


def write(folder, name, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=9)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [
        {"text": text, "id": i // 2, "lang": "en" if i % 3 else "de"}
        for i, text in enumerate(TEXTS)
    ]
    write(tmp_path, "a", rows[:50])
    write(tmp_path, "b", rows[50:])
    return tmp_path


def numbers(wanted):
    return sorted(str(i) for i in wanted)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_epoch_holds_each_text_once(folder, kind):
    assert drawn(a_mix(kind, dedupe="content")) == numbers(range(37))


def test_a_cache_that_cannot_be_looked_at_costs_only_time(folder, monkeypatch):
    # A name that is too long is refused to everyone; another user's home is refused only to others.
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ("m" * 256)))
    (folder / "mix.yaml").write_text(json.dumps(a_mix(dedupe="content")))

    assert drawn("mix.yaml") == numbers(range(37))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_epoch_holds_each_key_once(folder, kind):
    assert drawn(a_mix(kind, dedupe="key", key="id")) == numbers(i % 37 for i in range(0, 100, 2))


def test_a_record_that_conditions_leave_out_hides_no_later_one(folder):
    found = drawn(a_mix(dedupe="content", where={"lang": "de"}))

    assert found == numbers({i % 37 for i in range(0, 100, 3)})


def test_no_document_of_a_split_has_its_equal_in_another(folder):
    mix = a_mix(dedupe="content", key="id", splits={"eval": 0.3})
    mix["sources"]["web"]["splits"] = {"eval": 0.3}  # by key: equal texts lie in both

    held_out, trained = drawn(mix, split="eval"), drawn(mix)

    assert sorted(held_out + trained) == numbers(range(37))
    assert len(held_out) > 3


def test_epochs_resumes_and_ranks_see_the_same_records(folder):
    mix = a_mix(dedupe="content")
    mix["mix"]["stop"] = "never"

    def tokens(**words):
        with omniload.open(mix, arrays="numpy", steps=20, **words) as loader:
            found, states = [], []
            for batch in loader:
                found.append(batch.tokens.copy())
                states.append(loader.state_dict())
        return found, states

    whole, states = tokens()
    rest, _ = tokens(state=states[6])

    assert len(whole) == 20
    assert all(map(np.array_equal, whole[7:], rest))


def test_a_source_is_read_once_for_it_and_then_never(folder, monkeypatch):
    read = []
    reads = ParquetFormat.read_unit

    def counted(self, unit):
        read.append(unit)
        return reads(self, unit)

    monkeypatch.setattr(ParquetFormat, "read_unit", counted)
    (folder / "mix.yaml").write_text(json.dumps(a_mix(dedupe="content")))
    mix = checked(a_mix(dedupe="content"), MixConfig, name="mix")

    def opened():
        read.clear()
        found = profile(SourceSpec.of(mix, "web", folder, folder / "kept"), units=12)
        assert found.tokens_per_record > 0
        return len(read)

    assert [opened(), opened()] == [12 + 12, 12]  # for dedupe, and for the profile itself
    (kept,) = (folder / "kept").glob("web.*.distinct.arrow")
    kept.write_bytes(kept.read_bytes()[:-3])
    assert [opened(), opened()] == [24, 12]
    write(folder, "b", [{"text": "d99", "id": 1, "lang": "en"}])
    assert [opened(), opened()] == [7 + 7, 7]


@pytest.mark.usefixtures("folder")
def test_a_disk_without_room_for_the_keys_is_told_with_what_they_take(monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mask.FirstSeen, "finish", full)

    with pytest.raises(
        UnavailableError, match=r"sources\.web: .* 100 records, 1\.56 KiB, to .*free space there"
    ):
        drawn(a_mix(dedupe="content"))


def test_bits_of_another_version_are_found_anew(folder, monkeypatch):
    (folder / "mix.yaml").write_text(json.dumps(a_mix(dedupe="content")))
    assert drawn("mix.yaml") == numbers(range(37))
    (kept,) = folder.rglob("*.distinct.arrow")
    before = kept.read_bytes()

    monkeypatch.setattr(mask, "DISTINCT_VERSION", 2)

    assert drawn("mix.yaml") == numbers(range(37))
    assert kept.read_bytes() != before


def test_plan_and_stats_count_what_is_left(folder):
    (folder / "mix.yaml").write_text(json.dumps(a_mix(dedupe="content")))

    found = json_of("stats", folder / "mix.yaml", "--all", "--measure", "0")
    (source,) = found["sources"]

    assert (source["records"], source["bad"]) == (100, 0)
    assert source["epoch_tokens"] == sum(len(f"d{i}") + 1 for i in range(37))


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("jsonl", {"dedupe": "key"}, "names no key under key; name the column, or say content"),
        ("csv", {"dedupe": "key"}, "names no key under key; name the column, or say content"),
        ("webdataset", {"dedupe": "key"}, "names no key under known_by; name the column, or say"),
        ("jsonl", {"dedupe": "url"}, "dedupe"),
    ],
)
def test_what_cannot_be_compared_is_refused(kind, source, said):
    with pytest.raises(ConfigError, match=said):
        checked(a_mix(kind, **source), MixConfig, name="mix")
