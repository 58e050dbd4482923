"""Samples of MDS by the columns next to their text or token ids: conditions and keys."""

import re
import struct

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.mix.schema.records import Between
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import MdsSource
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_kinds import MdsTokens

COLUMNS = (
    ("id", "str", None),
    ("level", "int8", 1),
    ("meta", "json", None),
    ("odd", "uint16", None),
    ("score", "float32", 4),
    ("share", "str_float", None),
    ("tokens", "ndarray:uint16:1", None),
)


def opened(folder, rows, **keys):
    """Write rows of id, level, bytes of odd, score, share and tokens, and open them."""
    kind = MdsTokens()
    kind.columns = COLUMNS

    def sample(i, _):
        id_, level, odd, score, share, tokens = rows[i]
        cells = [id_, b"{}", odd, share, tokens]
        fixed = struct.pack("<b", level), struct.pack("<f", score)
        held = [id_, fixed[0], b"{}", odd, fixed[1], share, tokens]
        return struct.pack("<5I", *map(len, cells)) + b"".join(held)

    kind.sample = sample
    kind.write(folder / "part-0.mds", [""] * len(rows))
    config = MdsSource(type="mds", path=".", tokens="tokens", **keys)
    return open_format(SourceSpec("web", config, base_dir=folder)).format


ROWS = [
    (b"a", 1, b"\1\0", 0.5, b"0.25", b"\1\2"),
    (b"b", -1, b"\1\0", 0.5, b"1e-3", b"odd"),
    (b"c", 1, b"\1\0", 0.1, b"nan", b"\5\6"),
    (b"d", 1, b"\1", 0.5, b"0.9", b"\7\x08"),
    (b"e", 1, b"\1\0", 0.5, b"many", b"\x09\x0a"),
    (b"\xff", 1, b"\1\0", 0.5, b"0.9", b"\x0b\x0c"),
]
WHERE = {"level": 1, "odd": 1, "share": Between(at_least=0.1)}


def test_numbers_of_all_encodings_are_asked_for_and_each_sample_is_judged_by_itself(tmp_path):
    records = opened(tmp_path, ROWS, where=WHERE, key="id", dedupe="key").read_unit(0)

    assert records.kept_B.tolist() == [True, False, False, True, True, True]
    assert records.bad_B.tolist() == [False, False, False, True, True, True]
    assert records.keys_B[0] == key_of(b"a")
    assert records.column[0].tolist() == [0x0201]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (3, "'odd' has 1 bytes, and uint16 has 2"),
        (4, "'share' is 'many', and no number, as str_float is"),
        (5, "'id' is not UTF-8: "),
    ],
)
def test_a_bad_sample_is_told_with_its_column(tmp_path, row, said):
    rows = [ROWS[0], ROWS[row]]

    reason = opened(tmp_path, rows, where=WHERE, key="id", dedupe="key").read_unit(0).reason

    assert f"part-0.mds.zstd: sample 1: {said}" in reason


def test_a_number_of_half_the_width_is_another_and_an_integer_is_a_key_by_its_digits(tmp_path):
    records = opened(tmp_path, ROWS, where={"score": [0.1, 0.5]}, key="level", dedupe="key")

    records = records.read_unit(0)

    assert records.kept_B.tolist() == [True, True, False, True, True, True]
    assert records.keys_B[:2].tolist() == [key_of(b"1"), key_of(b"-1")]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"where": {"meta": 1}}, "'meta' is json, not a number, as where.meta asks for"),
        ({"where": {"level": "1"}}, "'level' is int8, not a text, as where.level asks for"),
        ({"where": {"meta.a": 1}}, "a name does not reach inside 'meta'"),
        ({"key": "score", "dedupe": "key"}, "'score' is float32, not texts or integers, as a key"),
        ({"key": "none", "dedupe": "key"}, "has no column 'none' for key; it has id, level, meta"),
    ],
)
def test_a_column_of_another_kind_is_refused(tmp_path, keys, said):
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, ROWS, **keys)


IDS = ("tokens", "ndarray:uint16:1", None)


@pytest.mark.parametrize(
    ("encoding", "stored", "value", "dtype", "said"),
    [
        ("ndarray:int32:1", "<i4", 300, "int8", "holds 300, which is more than a int8 holds"),
        ("bytes", "u1", 2, "bool", "holds 2, not 0 or 1"),
        ("ndarray:float64:1", "<f8", 1e300, "float32", r"holds 1e\+300, which is more than a float32"),
        ("ndarray:int32:1", "<i4", -(2**31), "float16", "holds -2147483648, which is more than a fl"),
        ("ndarray:int64:1", "<i8", -(2**63), "float16", "holds -9223372036854775808, which is more"),
    ],
)  # fmt: skip
def test_a_number_that_an_own_column_does_not_hold_is_a_bad_sample_told_as_stored(
    tmp_path, encoding, stored, value, dtype, said
):
    kind = MdsTokens()
    kind.columns = (IDS, ("w", encoding, None))
    numbers = [[1, 0], [1, value], [0, 1], [value, 0]]

    def sample(i, _):
        cells = b"\1\0\2\0", np.array(numbers[i], stored).tobytes()
        return struct.pack("<2I", *map(len, cells)) + b"".join(cells)

    kind.sample = sample
    kind.write(tmp_path / "part-0.mds", [""] * len(numbers))
    own = {"w": {"column": "w", "dtype": dtype}}
    config = MdsSource.model_validate(
        {"type": "mds", "path": ".", "tokens": "tokens", "columns": own}
    )

    records = open_format(SourceSpec("web", config, base_dir=tmp_path)).format.read_unit(0)

    assert records.bad_B.tolist() == [False, True, False, True]
    assert re.search(f"sample 1: w {said}", records.reason)
    (column,) = records.others.values()
    assert [column[i].tolist() for i in (0, 2)] == [[1, 0], [0, 1]]
