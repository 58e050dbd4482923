"""Benchmarks of the data plane's figures, on a little data: what is compared reads the same, and tables say so."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from benchmarks.data import (
    edit_sequences,
    image_tiles,
    images_ahead,
    libraries,
    live_change,
    many_sources,
    shuffle,
    since,
)
from benchmarks.data.bad_inputs import table_of as bad_table
from benchmarks.data.libraries import (
    even_texts,
    rates_of,
    reading_tables,
    table_of,
    write_chats,
    write_texts,
)
from benchmarks.data.library_ways import (
    CHAT_FILE,
    MODEL,
    batch_ways,
    lines_ways,
    reading_ways,
    same_duties,
    tokenising_ways,
)
from benchmarks.data.parquet_reading import (
    Case,
    cases_of,
    ratios_of,
    table_of_parts,
    table_of_ratios,
    write_case,
)
from benchmarks.data.reading_parts import PARTS, SAME, parts_of
from omniload.mix.config import load_mix
from tests.support.chats import MARKED, write_model
from tests.support.plane.sources.bad_inputs import Outcomes

TEXTS = [f"def f{i}():\n    return 'é' * {i}\n" * (i % 5 + 1) for i in range(60)]


def test_every_way_of_reading_reads_all_letters(tmp_path):
    write_texts(tmp_path, TEXTS)

    letters = {
        (form, name): way()[0]
        for form, ways in reading_ways(tmp_path).items()
        for name, way in ways.items()
    }

    assert set(letters.values()) == {sum(len(text.encode()) for text in TEXTS)}
    assert {form for form, _ in letters} == {"parquet", "jsonl.zst"}


def test_libraries_that_are_not_installed_are_asked_for_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    monkeypatch.setattr(libraries, "documents_of", lambda size: pytest.fail("measures"))

    result = CliRunner().invoke(libraries.main, ["--no-report"])

    assert result.exit_code == 1
    assert "make setup" in result.output
    assert ".venv-frameworks/bin/python -m benchmarks.data.libraries" in result.output


def test_files_of_each_kind_are_read_alike_by_all_ways(tmp_path):
    for number, case in enumerate(cases_of(1, large=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_case(folder, case, TEXTS * 40)
        ways = batch_ways(folder) if case.group_mib else lines_ways(folder)

        if case.group_mib:
            ways |= {f"{name}, pyarrow": way for name, way in same_duties(folder).items()}

        assert len({way()[0] for way in ways.values()}) == 1, case
        assert list(ways)[:2] == ["in order", "shuffled"]


def test_ratios_are_of_turns_and_shown_by_their_median():
    case = Case(letters=2_000, codec="zstd", group_mib=8, mib=64)
    rates = {"in order": [2e6, 9e6, 4e6], "shuffled": [1e6, 1e6, 1e6], "theirs": [1e6, 3e6, 4e6]}

    table = table_of_ratios("x", {case: rates})

    assert ratios_of(rates, "in order", "theirs") == [2.0, 3.0, 1.0]
    assert table.columns[1:] == (
        "in order, over theirs",
        "shuffled, over theirs",
        "MB a CPU second, theirs",
    )
    assert table.rows == (
        (
            "2,000 letters, zstd, groups of 8 MiB",
            "2.00 (1.00 to 3.00)",
            "0.33 (0.25 to 1.00)",
            "3",
        ),
    )


def test_parts_of_a_read_are_told_a_record_of_each_kind_of_file(tmp_path):
    parts = {}
    for number, case in enumerate(cases_of(1, large=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_case(folder, case, TEXTS * 40)
        parts[case] = parts_of(folder, 1)

    table = table_of_parts(parts)

    assert table.columns == ("documents and file", "order", *PARTS, "together", SAME)
    assert [row[:2] for row in table.rows] == [
        (str(case), order) for case in parts for order in ("in order", "shuffled")
    ]
    # Something was counted of each part that such a file has: no function went by another name.
    for case, orders in parts.items():
        for found in orders.values():
            assert (SAME in found) == bool(case.group_mib)
            # Long lines are looked at by their parser alone.
            long = not case.group_mib and case.letters > 1 << 14
            assert {part for part in PARTS if found[part] <= 0} <= ({"checks"} if long else set())


def test_documents_of_one_size_hold_the_same_letters():
    even = even_texts(TEXTS, 100)

    assert "".join(even) == "".join(TEXTS)
    assert {len(text) for text in even[:-1]} == {100}
    assert 0 < len(even[-1]) <= 100


def test_reading_is_compared_in_both_orders_over_both_sizes(tmp_path):
    tables = reading_tables(tmp_path, TEXTS * 40, 1)

    assert [table.caption for table in tables] == [
        f"Reading {form}, {size}, one core"
        for size in ("modules and functions", "3,000 letters each")
        for form in ("parquet", "jsonl.zst")
    ]
    for table in tables:
        assert [row[0] for row in table.rows][:2] == [
            "omniload, shuffled, less tokenising",
            "omniload, in the order of the file",
        ]
    assert list(tmp_path.iterdir()) == []


def test_every_way_of_tokenising_makes_as_many_tokens(tmp_path):
    write_model(tmp_path / MODEL, MARKED)

    counts = {name: way()[0] for name, way in tokenising_ways(tmp_path, TEXTS).items()}

    assert len(set(counts.values())) == 1
    assert min(counts.values()) > len(TEXTS)


def test_the_first_turn_counts_for_nothing_and_ours_is_compared_with_each():
    turns = iter([(1, 1.0), (1, 1.0), (6, 2.0), (3, 3.0)])

    rates = rates_of({"ours": lambda: next(turns), "theirs": lambda: next(turns)}, 1)

    assert rates == {"ours": [3.0], "theirs": [1.0]}
    assert [row[-1] for row in table_of("x", "y", rates, 1).rows] == ["1.00", "3.00"]


def test_a_way_that_is_gone_unmeasured_before_counts_by_what_follows():
    turns = iter([(1, 1.0), (9, 1.0), (6, 2.0)])

    assert rates_of({"ours": lambda: next(turns)}, 1, unmeasured=1) == {"ours": [3.0]}


def test_chats_have_a_line_each(tmp_path):
    write_chats(tmp_path, TEXTS * 20, 12)

    assert len((tmp_path / CHAT_FILE).read_bytes().splitlines()) == 12


def test_mixes_of_many_sources_are_two_sound_files_and_two_that_are_not(tmp_path):
    files = many_sources.write_mixes(tmp_path, 3)

    mix, _ = load_mix(files["sound"])
    assert len(mix.names) == 3
    assert (tmp_path / "s0002" / "0.parquet").exists()
    texts, _ = load_mix(files["texts"])
    assert texts.names == mix.names
    assert len((tmp_path / "s0002" / "0.jsonl").read_bytes().splitlines()) == 64
    assert all(
        yaml.safe_load(files[name].read_text())["sources"] != mix.sources
        for name in ("unknown keys", "no such column")
    )
    took = many_sources.Took(1.0, 2.0, 3)
    assert many_sources.table_of({"check": [took]}, 3).rows == (
        ("check", "1.00", "1.00", "1.00", "2.00", 3),
    )


def test_changes_are_shown_by_the_time_of_a_step():
    changes = [
        live_change.Change(answered_s=0.1, given=2, effective_s=0.4, agreed=True),
        live_change.Change(answered_s=0.3, given=3, effective_s=0.6, agreed=False),
    ]

    assert live_change.table_of({0.1: changes}, 4, "through Ray").rows == (
        ("0.1", 2, "0.20 (0.30)", "2.5 (3)", "0.50 (0.60)", "1 of 2"),
    )


def test_this_tree_is_compared_with_the_earlier_one():
    rates = {"before": [since.Rate(2e6, 1e6)], "now": [since.Rate(3e6, 2e6)]}
    rates[since.WITH_COLUMN] = [since.Rate(2.7e6, 1.5e6)]

    assert since.table_of({32_768: rates}).rows == (
        ("32k", "2.0", "3.0", "1.50", "1.0", "2.0", "2.00", "0.90", "0.75"),
    )


def test_a_sequence_of_edits_that_loses_a_token_is_named_by_its_seed(monkeypatch):
    run = edit_sequences.run_sequence(3)

    def runs(seed):
        if seed == 1:
            raise AssertionError("a token is lost")
        return run

    monkeypatch.setattr(edit_sequences, "run_sequence", runs)
    found = edit_sequences.found_in(range(3))
    rows = dict(found.table().rows)

    assert found.broken == {1: "AssertionError: a token is lost"}
    assert found.table().caption == "3 sequences, 1 of them lost or repeated a token"
    assert rows["lives of a run"] == f"{2 * run.lives:,}"
    assert rows["tokens in them, each compared"] == f"{2 * run.found().total():,}"


def test_spoilt_inputs_are_added_up():
    outcomes = Outcomes()
    outcomes.how.update(refused=3, skipped=2, read=1)
    outcomes.lost.append("x")

    table = bad_table("spoilt shards", {"a": outcomes, "b": outcomes})

    assert table.rows[0][:7] == ("a", 6, 3, 2, 1, 0, 1)
    assert table.rows[-1][:7] == ("all", 12, 6, 4, 2, 0, 2)


@pytest.mark.parametrize("half", [("a",), ("b",)])
def test_a_part_of_the_tokens_is_that_of_its_sources(half):
    tokens = {"a": 1, "b": 3}

    assert live_change._part_of(half, tokens) == tokens[half[0]] / 4


def test_orders_are_told_from_full_shuffles_by_their_neighbours():
    places = np.arange(8 * 1_024)
    shuffled = np.random.default_rng(0).permutation(places)

    stored, full = (shuffle.mixing_of(order, shards=8) for order in (places, shuffled))

    assert (round(stored.correlation, 3), stored.shards) == (1.0, 1.0)
    assert stored.distance < 0.001
    assert abs(full.correlation) < 0.05
    assert (round(full.distance, 1), full.shards) == (1.0, 8.0)


def test_every_way_of_shuffling_has_a_line():
    table = shuffle.table_of(shards=4, units=8, rows=64)

    assert [row[0] for row in table.rows] == list(shuffle.WAYS)
    by_units = next(row for row in table.rows if row[0] == "units, block of 4")
    assert (float(by_units[2]) > 0.5, by_units[4]) == (True, 4)


def test_every_way_of_shuffling_reads_an_epoch_for_its_cost(tmp_path):
    letters = shuffle.write_shards(tmp_path, shards=2, units=3, rows=5)

    table = shuffle.cost_table(tmp_path, 1, "small")

    assert letters > 2 * 3 * 5 * 1_000
    assert [row[0] for row in table.rows] == list(shuffle.WAYS)
    assert all(float(whole) >= float(first) for _, first, whole in table.rows)


def test_photographs_of_captions_are_decoded_as_large_as_they_are_said_to_be(tmp_path):
    images_ahead.write_captions(tmp_path, 40)

    rows = pq.read_table(tmp_path / "captions.parquet").to_pylist()

    assert len(rows) == 40
    assert {len(row["text"]) for row in rows} == {4}
    assert all(40_000 < len(image) < 80_000 for row in rows for image in row["images"])


def test_figures_of_two_trees_stand_beside_each_other_where_their_samples_are_the_same():
    before, now = (32.9, 4_272, 8_000, 5_648, 77), (5.04, 600, 900, 715, 77)

    table = images_ahead.table_of({(16, 4_096): (before, now)})

    assert [row[2:] for row in table.rows] == [
        ("before", "32.9", "4,272", "8,000", "5,648"),
        ("now", "5.0", "600", "900", "715"),
    ]
    with pytest.raises(ValueError, match="samples differ: 16 patches, 4096 tokens"):
        images_ahead.table_of({(16, 4_096): (before, (*now[:-1], 78))})


def test_a_photograph_is_cut_as_its_way_says_and_compared_where_there_is_something_to():
    data = image_tiles.photograph()
    found = []
    for way, theirs_ms in zip(image_tiles.WAYS, (None, 60.0, 60.0), strict=True):
        images, tokens, megabytes, _ = image_tiles.ours_of(way, data, 1)
        figures = image_tiles.Figures(
            images=images, tokens=tokens, megabytes=megabytes, ours_ms=30.0, theirs_ms=theirs_ms
        )
        found.append((way, figures))

    assert image_tiles.table_of(found).rows == (
        ("not cut", "1", "234", "0.6", "30", "", ""),
        ("InternVL", "13", "3,328", "7.8", "30", "60", "2.0"),
        ("SmolVLM", "13", "832", "10.2", "30", "60", "2.0"),
    )
