"""Estimates of how large a source is."""

import base64
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.base.errors import ConfigError
from omniload.mix.config import ByteTokenizer, JsonlSource, ParquetSource, TextSource
from omniload.mix.schema.transforms import ChatTransform
from omniload.source.estimate import profile
from omniload.source.kept_profile import kept_profiles
from omniload.source.spec import SourceSpec
from tests.support.drawn import an_images_transform, png_of

LINES = JsonlSource(type="jsonl", path="*")
BYTES = ByteTokenizer(type="bytes")


def lines(texts):
    return b"".join(b'{"text": "%s"}\n' % text.encode() for text in texts)


def test_a_small_source_is_measured_exactly(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["abc", "", "defgh"]))

    found = profile(
        SourceSpec(
            "web", JsonlSource(type="jsonl", path="*.jsonl"), tokenizer=BYTES, base_dir=tmp_path
        )
    )

    assert found.exact
    assert (found.name, found.records, found.shards) == ("web", 3, 1)
    assert (found.tokens, found.longest_tokens) == (4 + 0 + 6, 6)
    assert found.size_bytes == (tmp_path / "a.jsonl").stat().st_size


def test_records_are_counted_and_tokens_estimated_from_a_part(tmp_path):
    for i in range(10):
        tokens = [[1] * (20 + row % 3) for row in range(100)]
        pq.write_table(pa.table({"tokens": tokens}), tmp_path / f"{i}.parquet", row_group_size=50)

    config = ParquetSource(type="parquet", path="*.parquet", tokens="tokens")
    found = profile(SourceSpec("web", config, tokenizer=None, base_dir=tmp_path))

    assert not found.exact
    assert (found.records, found.shards, found.sampled_records) == (1000, 10, 200)
    assert found.tokens == pytest.approx(21_000, rel=0.01)
    assert found.block_bytes == pytest.approx(4 * 50 * (21 * 4 + 8), rel=0.02)


def test_units_of_which_conditions_leave_out_every_record_make_no_block_small(tmp_path):
    """Such units are not decoded whole; those of the kept records are, and the shuffle puts them together."""
    texts = [f"{row:0999d}" for row in range(2_000)]
    table = pa.table({"text": texts, "kept": [row >= 1_500 for row in range(2_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    sizes = []
    for where in ({}, {"kept": True}):
        config = ParquetSource(type="parquet", path="*.parquet", text="text", where=where)
        spec = SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path)
        sizes.append(profile(spec).block_bytes)

    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_what_a_source_costs_is_kept_for_later_starts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["abc", "defgh"]))

    config = JsonlSource(type="jsonl", path="*.jsonl")
    cache = tmp_path / "cache"
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path, cache_dir=cache))

    costs = kept_profiles(cache, ["web"])["web"]
    assert 0 < costs.preprocess_s_per_token == found.preprocess_s_per_token
    assert costs.block_bytes == found.block_bytes


def test_units_weigh_by_their_records(tmp_path):
    pq.write_table(pa.table({"tokens": [[1] * 10] * 90}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"tokens": [[1] * 100] * 10}), tmp_path / "b.parquet")

    config = ParquetSource(type="parquet", path="*.parquet", tokens="tokens")
    found = profile(SourceSpec("web", config, tokenizer=None, base_dir=tmp_path))

    assert found.tokens_per_record == pytest.approx(19)


@pytest.mark.parametrize("place", [0, 900, 3000, 8999])
@pytest.mark.parametrize("size", [100_000, 700_000])
def test_one_document_far_longer_than_others_counts_once_wherever_it_lies(tmp_path, place, size):
    texts = ["x" * (50 + i * 37 % 100) for i in range(9000)]
    texts.insert(place, "y" * size)
    (tmp_path / "a.jsonl").write_bytes(lines(texts))

    config = JsonlSource(type="jsonl", path="*.jsonl", unit=1 << 16)
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))

    assert not found.exact
    assert found.tokens == pytest.approx(sum(map(len, texts)) + len(texts), rel=0.02)
    assert found.tokens_error is not None
    assert found.tokens_error < 0.02


def test_places_that_agree_by_chance_are_no_surer_than_their_records_let_them_be(tmp_path):
    """There are many short records and a few long ones, and each unit has as many as any other."""
    tokens = [[1] * (500 if row % 10 == 0 else 5) for row in range(1000)]
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "a.parquet", row_group_size=50)

    config = ParquetSource(type="parquet", path="*.parquet", tokens="tokens")
    found = profile(SourceSpec("web", config, base_dir=tmp_path))

    assert found.sampled_records == 200
    # The mean of 200 records is known to 0.19 of itself, and 4 of 5 records are estimated by it.
    assert found.tokens_error == pytest.approx(0.8 * 149 / math.sqrt(200) / 54.5, rel=0.02)


def test_what_is_said_of_how_sure_it_is_holds_in_nineteen_of_twenty_cases(tmp_path):
    rng, held = np.random.default_rng(3), 0
    config = ParquetSource(type="parquet", path="*.parquet", tokens="tokens")
    for _ in range(100):
        lengths = rng.lognormal(3, 0.8, 600).astype(int) + 1
        ids = pa.array(np.ones(lengths.sum(), np.int32))
        bounds = pa.array(np.append(0, lengths.cumsum()), pa.int32())
        table = pa.table({"tokens": pa.ListArray.from_arrays(bounds, ids)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)
        found = profile(SourceSpec("web", config, base_dir=tmp_path))
        held += abs(found.tokens - lengths.sum()) <= 2 * found.tokens_error * found.tokens

    assert held >= 93


def test_one_place_says_nothing_of_how_sure_it_is_and_all_records_say_all(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x" * 2000] * 2000))

    config = JsonlSource(type="jsonl", path="*.jsonl", unit=1 << 30)
    one = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))
    (tmp_path / "a.jsonl").write_bytes(lines(["x"] * 9))
    whole = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))

    assert (one.exact, one.tokens_error) == (False, None)
    assert (whole.exact, whole.tokens_error) == (True, 0.0)


@pytest.mark.parametrize(("is_sorted", "between"), [(True, 0.9), (False, 0.1)])
def test_files_that_are_sorted_by_length_are_known_by_their_places(tmp_path, is_sorted, between):
    lengths = [10 + i * 7919 % 3000 for i in range(3000)]
    texts = ["x" * n for n in (sorted(lengths) if is_sorted else lengths)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))

    config = JsonlSource(type="jsonl", path="*.jsonl", unit=1 << 16)
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))

    assert found.units > 50
    assert (found.between > 0.8) == (between > 0.8)
    assert found.between == pytest.approx(between, abs=0.1)


def test_a_long_unit_is_sampled_within_bounds(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x" * 2000] * 2000))

    config = JsonlSource(type="jsonl", path="*.jsonl", unit=1 << 30)
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))

    assert found.records == 2000
    assert 500 <= found.sampled_records <= 530
    assert found.tokens == 2000 * 2001


def test_bad_records_are_counted_and_hold_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["abc"]) + b"bad\n")

    config = JsonlSource(type="jsonl", path="*.jsonl")
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path))

    assert (found.bad_records, found.records, found.tokens) == (1, 2, 4)


def test_text_files_are_measured_by_file(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("abc")

    config = TextSource(type="text", path="*.txt", files_per_unit=2)
    found = profile(SourceSpec("web", config, tokenizer=BYTES, base_dir=tmp_path), units=1)

    assert (found.records, found.shards, found.size_bytes, found.tokens) == (5, 5, 15, 20)


def test_a_source_without_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")

    with pytest.raises(ConfigError, match="holds no record"):
        profile(SourceSpec("web", LINES, tokenizer=BYTES, base_dir=tmp_path))


def test_text_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]))

    with pytest.raises(ConfigError, match="there is no tokenizer"):
        profile(SourceSpec("web", LINES, tokenizer=None, base_dir=tmp_path))


def test_records_that_give_a_sample_are_sought_where_few_do(tmp_path):
    for i in range(40):
        of = pa.table({"tokens": [[1] * 9] * 6, "lang": ["en" if i == 33 else "de"] * 6})
        pq.write_table(of, tmp_path / f"{i:02}.parquet")

    config = ParquetSource(type="parquet", path="*.parquet", tokens="tokens", where={"lang": "en"})
    found = profile(SourceSpec("web", config, tokenizer=None, base_dir=tmp_path))

    assert (found.tokens, found.samples_per_record, found.exact) == (54, 1 / 40, True)


def test_conversations_with_images_in_them_weigh_by_records_because_an_image_has_more_bytes_than_tokens(
    tmp_path,
):
    (tmp_path / "sees.jinja").write_text(
        "{% for m in messages %}{% for part in m.content %}"
        "{{ '<|pad|>' if part.type == 'image' else part.text }}{% endfor %}\n{% endfor %}"
    )
    rng = np.random.default_rng(3)
    noise = png_of(rng.integers(0, 256, (90, 90, 3), dtype=np.uint8))
    url = f"data:image/png;base64,{base64.b64encode(noise).decode()}"
    image, text = {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}
    long = {"type": "text", "text": "x" * 599}
    said = [[image, text] if drawn else [long] for drawn in rng.random(300) < 1 / 3]
    records = [{"text": [{"role": "user", "content": each}]} for each in said]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))

    chat = ChatTransform(type="chat", template="sees.jinja", image="<|pad|>", loss="all")
    config = JsonlSource(
        type="jsonl", path="a.jsonl", unit=2 << 20, transforms=(chat, an_images_transform())
    )
    found = profile(SourceSpec("seen", config, tokenizer=BYTES, base_dir=tmp_path))

    whole = sum(600 if each == [long] else 36 + 2 for each in said)
    assert found.sampled_records < 250
    assert found.tokens_error is not None
    assert abs(found.tokens - whole) <= 2 * found.tokens_error * whole
    assert 0.01 < found.tokens_error < 0.1
