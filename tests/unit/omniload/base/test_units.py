"""Quantities as people write them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from omniload.base.settings.quantities import Bytes, Count, Seconds
from omniload.base.units import (
    counted,
    decimal_of,
    format_bytes,
    format_count,
    parse_bytes,
    parse_count,
    parse_ports,
    parse_seconds,
    so_often,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12", 12),
        ("512k", 512_000),
        ("16Ki", 16_384),
        ("2 mi", 2 << 20),
        ("1Ti", 1 << 40),
        ("1.5T", 1_500_000_000_000),
        ("2b", 2_000_000_000),
        ("2G", 2_000_000_000),
        ("1_000", 1000),
        (" 3 M ", 3_000_000),
        ("1.005k", 1005),
    ],
)
def test_counts_are_powers_of_a_thousand(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("7", 7),
        ("7B", 7),
        ("4MiB", 4 << 20),
        ("4MB", 4_000_000),
        ("0.5kib", 512),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_tell_binary_from_decimal_units(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("250ms", 0.25),
        ("30s", 30.0),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
        ("3", 3.0),
    ],
)
def test_durations_become_seconds(text, duration_s):
    assert parse_seconds(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("parse", [parse_count, parse_bytes, parse_seconds])
@pytest.mark.parametrize("text", ["", "many", "-1", "4 XB", "1e3", "1.k", "0x10"])
def test_text_that_is_no_quantity_is_refused_with_the_units_there_are(parse, text):
    with pytest.raises(ValueError, match=r"is not a quantity; write a number with one of \w+, "):
        parse(text)


@pytest.mark.parametrize(("parse", "text"), [(parse_count, "1.5"), (parse_bytes, "0.3KiB")])
def test_half_a_unit_is_refused(parse, text):
    with pytest.raises(ValueError, match="is not a whole number of units"):
        parse(text)


@pytest.mark.parametrize("parse", [parse_count, parse_bytes, parse_seconds])
def test_numbers_pass_as_they_are(parse):
    assert parse(17) == 17


@pytest.mark.parametrize("kind", [Count, Bytes, Seconds])
def test_a_field_is_at_least_zero(kind):
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        TypeAdapter(kind).validate_python(-1)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.9, "1 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (5 << 20, "5 MiB"),
        (3 << 40, "3 TiB"),
        (2000 << 40, "2000 TiB"),
    ],
)
def test_sizes_are_written_without_exponents(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (950, "950"),
        (999.9, "1k"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (4_500_000, "4.5M"),
        (2_000_000_000_000, "2T"),
        (5_000_000_000_000_000, "5000T"),
    ],
)
def test_counts_are_written_without_exponents(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("0042", 42),
        ("9" * 19, 10**19 - 1),
        ("9" * 20, None),  # and a text that int() refuses after a second of thought
        ("", None),
        ("-1", None),
        ("1\n", None),
        (" 1", None),
        ("\u0663", None),  # a decimal of another script
        ("\u00b2", None),  # a digit that int() refuses
    ],
)
def test_a_whole_number_is_one_of_ascii_digits_and_not_long(text, number):
    assert decimal_of(text) == number


def test_a_range_of_ports_holds_its_last_and_no_text_means_any():
    assert parse_ports("20000-20002") == range(20000, 20003)
    assert parse_ports("") is None


@pytest.mark.parametrize("text", ["20000", "20002-20000", "80-90", "1-65536", "a-b", "²-³", " 1-2"])
def test_what_is_no_range_of_ports_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="as 20000-20099"):
        parse_ports(text)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (2048, "2,048 steps")]
)
def test_one_of_a_thing_is_no_plural(count, said):
    assert counted(count, "step") == said
    assert counted(count, "batch", "batches").endswith("batch" if count == 1 else "batches")


def test_what_is_done_a_single_time_is_done_once():
    assert [so_often(count) for count in (0.5, 1, 1.0, 2)] == [
        "0.5 times",
        "once",
        "once",
        "2 times",
    ]
