"""Bad records, and the statements of a source before it is read."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import ByteTokenizer, JsonlSource, OnError, ParquetSource, ShuffleConfig
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

BYTES = ByteTokenizer(type="bytes")
LINES = JsonlSource(type="jsonl", path="*.jsonl")
LINE = b'{"text": "ok"}\n'
BAD = b'{"text": "ok"!\n'


@pytest.fixture
def opened(tmp_path):
    """Open a source of lines, a unit of 4 lines each; ``bad`` lines are none."""

    def open_lines(num_lines=40, bad=(), block_units=2, **on_error):
        content = b"".join(BAD if i in bad else LINE for i in range(num_lines))
        (tmp_path / "a.jsonl").write_bytes(content)
        config = JsonlSource(
            type="jsonl",
            path="a.jsonl",
            unit=4 * len(LINE),
            shuffle=ShuffleConfig(block_units=block_units),
            on_error=OnError(**on_error),
        )
        return open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path))

    return open_lines


def test_a_bad_record_stops_the_run_and_says_how_to_go_on(opened):
    source = opened(bad={17})

    with pytest.raises(IntegrityError) as caught:
        source.read(0, 40)

    assert "a.jsonl:18: is not JSON" in str(caught.value)
    assert "on_error: {policy: skip} in sources.web" in str(caught.value)


def test_the_first_record_that_is_left_out_is_told_of_with_its_line_and_what_is_wrong(
    opened, caplog
):
    source = opened(bad={3, 17, 18}, policy="skip")

    source.read(0, 40)
    source.read(0, 40)

    (told,) = [line for line in caplog.messages if "left out" in line]
    assert re.search(r"sources\.web: .*a\.jsonl:(4|18): is not JSON", told)


def test_each_record_that_is_left_out_is_told_with_its_line_however_ranges_are_cut(opened):
    """Earlier, the error at the end of a run named only the last such record of a loader."""
    bad = {3, 17, 18, 30}
    source = opened(bad=bad, policy="skip")
    whole = source.read(0, 80).table

    assert len(whole.places) == len(whole.bad_N) == 8
    lines = {str(i + 1) for i in bad}
    for epoch in (whole.places[:4], whole.places[4:]):
        assert {place.rpartition("a.jsonl:")[2] for place in epoch} == lines
    for size in (1, 7):
        parts = [source.read(at, min(at + size, 80)).table for at in range(0, 80, size)]
        assert tuple(place for part in parts for place in part.places) == whole.places
    for part in (whole.within(20, 60), whole.bad_from(int(whole.bad_N[2]))):
        at = whole.bad_N.tolist().index(int(part.bad_N[0]))
        assert part.places == whole.places[at : at + len(part.bad_N)]
        assert part.place_of(int(part.bad_N[-1])) == part.places[-1]
        assert part.place_of(int(part.bad_N[-1]) + 1) == ""


def test_skipped_records_keep_their_positions_and_are_counted(opened):
    source = opened(bad={3, 17, 18}, policy="skip")

    block = source.read(0, 40)

    assert block.skipped == 3
    assert len(block.tokens) == len(block.table) == 37
    assert source.positions_per_epoch == 40
    assert set(range(40)) - set(block.table.positions_N.tolist()) == {
        p for p in range(40) if source.read(p, p + 1).skipped
    }


def test_skipped_records_are_counted_in_the_range_read_only(opened):
    source = opened(bad={3, 17, 18}, policy="skip")

    assert sum(source.read(p, p + 1).skipped for p in range(80)) == 6


def test_a_source_tells_of_bad_records_beyond_the_limit_and_leaves_it_to_its_planner_to_stop(
    opened,
):
    source = opened(bad=set(range(6)), policy="skip", limit=5)

    table = source.read(0, 40).table

    assert len(table.bad_N) == 6
    assert re.search(r"a\.jsonl:[1-6]: is not JSON", table.reason)


def test_a_read_without_a_bad_record_has_no_reason(opened):
    source = opened(bad={9}, policy="skip")
    (at,) = source.read(0, 40).table.bad_N.tolist()

    assert source.read(at, at + 1).table.reason
    assert not source.read(at + 1, at + 2).table.reason


def test_null_rows_of_parquet_follow_the_policy(tmp_path):
    pq.write_table(pa.table({"tokens": [[1], None, [2]]}), tmp_path / "a.parquet")
    config = ParquetSource(type="parquet", path="a.parquet", tokens="tokens")

    with pytest.raises(
        IntegrityError, match="row group 0: row 1: column 'tokens' is null; fix it, or set"
    ):
        open_source(SourceSpec("web", config, seed=1, tokenizer=None, base_dir=tmp_path)).read(0, 1)

    skipping = config.model_copy(update={"on_error": OnError(policy="skip")})
    source = open_source(SourceSpec("web", skipping, seed=1, tokenizer=None, base_dir=tmp_path))
    assert source.read(0, 3).skipped == 1


def test_a_source_without_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"sources\.web: \*\.jsonl holds no record"):
        open_source(SourceSpec("web", LINES, tokenizer=BYTES, base_dir=tmp_path))


def test_text_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINE)

    with pytest.raises(ConfigError, match="holds text and there is no tokenizer"):
        open_source(SourceSpec("web", LINES, tokenizer=None, base_dir=tmp_path))


def test_token_ids_need_no_tokenizer_and_are_used_as_they_are(tmp_path):
    pq.write_table(pa.table({"tokens": [[300, 5]]}), tmp_path / "a.parquet")
    config = ParquetSource(type="parquet", path="a.parquet", tokens="tokens")

    source = open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path))

    assert source.read(0, 1).tokens.values_V.tolist() == [300, 5]


def test_the_index_is_kept_where_asked(tmp_path, opened):
    opened()
    config = JsonlSource(type="jsonl", path="a.jsonl")

    open_source(
        SourceSpec(
            "web", config, seed=1, tokenizer=BYTES, base_dir=tmp_path, cache_dir=tmp_path / "cache"
        )
    )

    assert [path.name.startswith("web.") for path in (tmp_path / "cache").iterdir()] == [True]


def test_a_block_is_put_in_order_once_for_all_reads_of_it(opened, monkeypatch):
    drawn, philox = [], np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda **words: drawn.append(1) or philox(**words))
    source = opened()

    for start in range(0, 40, 4):
        source.read(start, start + 4)

    assert len(drawn) == 1 + 5  # the shards of the epoch, and the rows of each block
