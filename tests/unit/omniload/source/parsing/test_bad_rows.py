"""Messages about a bad row of a table: its file, its number as the tools of its format count, its column."""

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.records import OnError, ShuffleConfig
from omniload.mix.sources import ArrowSource, CsvSource, LanceSource, MdsSource, ParquetSource
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_kinds import MdsTexts, MdsTokens, MegatronInt32

STORED = ShuffleConfig(method="none")
TEXTS = [b"x" * 300] * 7
TEXTS[5] = b"\xff" + b"x" * 299
BAD = 5
"""Its number among all rows; units have two or three."""


def as_texts(values):
    return pa.array(values, pa.binary()).view(pa.string())


def reasons_of(opened):
    """Read all units; return the reasons that each gives for its bad rows."""
    return [opened.read_unit(unit).reason for unit in range(len(opened.units()))]


def parquet(folder, column):
    pq.write_table(pa.table({"own": column}), folder / "a.parquet", row_group_size=3)
    return ParquetSource, "parquet", {}, "a.parquet: row group 1: row 2"


def arrow(folder, column):
    table = pa.table({"own": column})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as to:
        to.write_table(table, max_chunksize=3)
    return ArrowSource, "arrow", {}, "a.arrow: batch 1: row 2"


def of_lance(folder, column):
    lance.write_dataset(pa.table({"own": column}), folder / "a.lance")
    return LanceSource, "lance", {"unit": 1}, r"a.lance/data/.*\.lance: row 5"


NULL = as_texts([None if i == BAD else b"x" for i in range(7)])
NEGATIVE = pa.array([[1, -7 if i == BAD else 7] for i in range(7)])


@pytest.mark.parametrize(
    ("write", "holds", "column", "fault"),
    [
        *((write, "text", NULL, "'own' is null") for write in (parquet, arrow, of_lance)),
        # Lance's library writes no such text.
        *((write, "text", as_texts(TEXTS), "'own' is not UTF-8") for write in (parquet, arrow)),
        *(
            (write, "tokens", NEGATIVE, "'own' holds token id -7")
            for write in (parquet, arrow, of_lance)
        ),
    ],
)
def test_a_bad_row_of_a_table_is_named_with_its_column(tmp_path, write, holds, column, fault):
    kind, name, more, place = write(tmp_path, column)
    config = kind(type=name, path=f"a.{name}", shuffle=STORED, **{holds: "own"}, **more)
    tokenizer = ByteTokenizer(type="bytes") if holds == "text" else None
    source = open_source(SourceSpec("web", config, seed=1, tokenizer=tokenizer, base_dir=tmp_path))

    with pytest.raises(IntegrityError, match=f"{place}: column {fault}"):
        source.read(0, 7)


@pytest.mark.parametrize("write", [parquet, arrow, of_lance])
def test_the_first_records_are_looked_at_with_all_that_stands_beside_them(tmp_path, write):
    kind, name, more, _ = write(tmp_path, pa.array([[5, 7]] * 7))
    config = kind(type=name, path=f"a.{name}", tokens="own", columns={"loss_mask": "own"}, **more)

    first = open_format(SourceSpec("web", config, base_dir=tmp_path)).format.first_records()

    assert first.reason.endswith(": row 0: loss_mask holds 5, not 0 or 1")
    assert first.bad_B.all()


def test_a_bad_row_of_csv_is_named_with_its_column_and_its_number_behind_the_header(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"own\n" + b"".join(text + b"\n" for text in TEXTS))
    config = CsvSource(type="csv", path="a.csv", text="own", unit=700, shuffle=STORED)
    opened = open_format(SourceSpec("web", config, base_dir=tmp_path)).format

    (reason,) = filter(None, reasons_of(opened))

    assert len(opened.units()) > 2
    assert reason.startswith(f"{tmp_path}/a.csv: row {BAD}: column 'own' is not UTF-8")


def of_mds(folder, kind, samples, **keys):
    """Write samples as they lie in a shard, and open it."""
    kind.sample = lambda i, _: samples[i]
    kind.write(folder / "part-0.mds", [""] * len(samples))
    config = MdsSource(type="mds", path=".", unit=700, shuffle=STORED, **keys)
    return open_format(SourceSpec("web", config, base_dir=folder)).format


def test_a_bad_sample_of_mds_is_named_with_its_column(tmp_path):
    kind = MdsTexts()
    kind.columns = (("text", "str", None),)
    samples = [len(text).to_bytes(4, "little") + text for text in TEXTS]
    opened = of_mds(tmp_path, kind, samples, text="text")

    (reason,) = filter(None, reasons_of(opened))

    assert len(opened.units()) > 2
    assert reason.startswith(f"{tmp_path}/part-0.mds: sample {BAD}: column 'text' is not UTF-8")


@pytest.mark.parametrize("types", [["<i8"], ["<i8", "<i4"]])
def test_a_token_id_that_is_none_is_named_with_its_sample(tmp_path, types):
    kind = MdsTokens()
    kind.columns = (("tokens", "ndarray", None),)
    samples = []
    for i in range(7):
        dtype = np.dtype(types[i % len(types)])
        ids = np.array([1, -7 if i == BAD else 7] * 20, dtype)
        code = {"<i8": 65, "<i4": 33}[dtype.str]
        array = bytes([code, 1 << 2, len(ids)]) + ids.tobytes()
        samples.append(len(array).to_bytes(4, "little") + array)
    opened = of_mds(tmp_path, kind, samples, tokens="tokens")

    (reason,) = filter(None, reasons_of(opened))

    said = f": sample {BAD}: column 'tokens' holds token id -7; a token id is from 0 to"
    assert said in reason


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (b"", "has an array that is cut short"),
        (bytes([65]), "has an array that is cut short"),
        (bytes([65, 4]), "has an array of -1 bytes, of ids of 8"),
        (bytes([65, 4, 1]) + b"1234567", "has an array of 7 bytes, of ids of 8"),
        (bytes([11, 4, 1]) + b"12345678", "is of type 11, where integers belong; name another"),
        (bytes([65, 4, 1]) + b"\xff" * 8, "holds token id -1; a token id is from 0 to"),
    ],
)
def test_a_sample_of_mds_whose_array_is_none_is_a_bad_record(tmp_path, array, fault):
    kind = MdsTokens()
    kind.columns = (("tokens", "ndarray", None),)
    sound = bytes([65, 4, 1]) + (9).to_bytes(8, "little")
    arrays = [array if i == 3 else sound for i in range(7)]
    opened = of_mds(
        tmp_path,
        kind,
        [len(each).to_bytes(4, "little") + each for each in arrays],
        tokens="tokens",
    )

    units = [opened.read_unit(unit) for unit in range(len(opened.units()))]

    assert [bad for unit in units for bad in unit.bad_B] == [i == 3 for i in range(7)]
    assert [unit.column[i].tolist() for unit in units for i in np.flatnonzero(~unit.bad_B)] == [
        [9]
    ] * 6
    (reason,) = filter(None, (unit.reason for unit in units))
    assert f": sample 3: column 'tokens' {fault}" in reason


def test_a_document_of_megatron_with_a_negative_id_is_skipped_and_named_with_its_number(tmp_path):
    kind, texts = MegatronInt32(), [f"text {i}" for i in range(40)]
    kind.write(tmp_path / "a.bin", texts)
    ids = np.fromfile(tmp_path / "a.bin", np.int32)
    of_last = len(ids) - 2
    ids[of_last] = -9
    ids.tofile(tmp_path / "a.bin")
    config = kind.config(tmp_path).model_copy(update={"shuffle": STORED})

    with pytest.raises(IntegrityError, match=r"a\.bin: document 39: holds token id -9; .*; fix it"):
        open_source(SourceSpec("web", config, seed=1, base_dir=tmp_path)).read(0, 40)

    skipping = config.model_copy(update={"on_error": OnError(policy="skip")})
    block = open_source(SourceSpec("web", skipping, seed=1, base_dir=tmp_path)).read(0, 40)
    assert block.skipped == 1
    assert len(block.tokens) == 39


@pytest.mark.parametrize("read", [{"text": "own"}, {"text": "text", "where": {"own": "en"}}])
def test_views_within_a_dictionary_are_refused_as_arrow_gives_nobody_their_values(tmp_path, read):
    views = pa.array(["en"], pa.string_view()).dictionary_encode()
    table = pa.table({"text": ["a"], "own": views})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    config = ArrowSource(type="arrow", path="a.arrow", **read)

    with pytest.raises(ConfigError, match=r"column 'own' is dictionary<values=string_view.*, not "):
        open_format(SourceSpec("web", config, base_dir=tmp_path))
