"""CSV compared with Python's own reader: any fields, cut into units anywhere."""

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.sources import CsvSource
from omniload.source.files import local_file
from omniload.source.formats import csv as module
from omniload.source.formats.csv import CsvFormat

FIELDS = st.text(st.sampled_from('a,é"\n\r;\t '), max_size=6)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("csv") / "a.csv"


def texts_of(path, **keys):
    found = CsvFormat(
        [local_file(str(path))], CsvSource(type="csv", path="a.csv", text="text", **keys)
    )
    texts = []
    for unit in range(len(found.units())):
        column = found.read_unit(unit).column
        texts += [column[i].tobytes().decode() for i in range(len(column))]
    return texts


@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=12),
    unit=st.integers(1, 60),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    end=st.sampled_from(["\n", "\r\n"]),
    chunk=st.integers(1, 40),
    is_ended=st.booleans(),
)
def test_rows_are_those_that_python_reads(path, rows, unit, quoting, end, chunk, is_ended):
    if (
        quoting == csv.QUOTE_MINIMAL
    ):  # Python leaves a single carriage return unquoted, which we refuse
        rows = [tuple(field.replace("\r", "") for field in row) for row in rows]
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=quoting, lineterminator=end)
    writer.writerows([("text", "note"), *rows])
    path.write_bytes(out.getvalue().removesuffix("" if is_ended else end).encode())
    expected = [row[0] for row in csv.reader(io.StringIO(out.getvalue(), newline=""))][1:]

    def chunks(stream, _file):
        while len(data := stream.read_buffer(chunk)):
            yield data

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "chunks_of", chunks)
        assert texts_of(path, unit=unit) == expected == [text for text, _ in rows]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@given(
    blank=st.lists(st.sampled_from(["\n", "\r\n"]), max_size=3),
    rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=4),
    unit=st.integers(1, 60),
)
def test_a_mark_of_the_byte_order_and_blank_lines_before_the_header_are_no_rows(
    path, mark, blank, rows, unit
):
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("text", "note"), *rows])
    path.write_bytes((mark + "".join(blank) + out.getvalue()).encode())

    assert texts_of(path, unit=unit) == [text for text, _ in rows]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["text", "título"])
def test_a_row_with_too_few_fields_is_bad_whatever_its_header_is_called_and_stands_behind(
    path, mark, name
):
    path.write_text(f"{mark}\n{name},note\né,1\ntwo\nthree,3\n", encoding="utf-8")
    config = CsvSource(type="csv", path="a.csv", text=name)

    records = CsvFormat([local_file(str(path))], config).read_unit(0)

    assert records.bad_B.tolist() == [False, True, False]
    assert [records.column[i].tobytes().decode() for i in range(3)] == ["é", "", "three"]
    assert records.reason.endswith("has 1 fields, not 2")


@pytest.mark.parametrize("held", ["", "\n", "\r\n\n"])
def test_a_mark_of_the_byte_order_alone_is_an_empty_file(path, held):
    path.write_bytes(f"\ufeff{held}".encode())

    with pytest.raises(ConfigError, match=r"a\.csv: is empty, without a header"):
        texts_of(path)


@given(
    lines=st.lists(
        st.tuples(st.text(st.sampled_from('aé" '), max_size=5), st.just("1")), max_size=9
    )
)
def test_without_quotes_a_quote_is_a_letter(path, lines):
    path.write_text("text\tn\n" + "".join(f"{text}\t{n}\n" for text, n in lines), newline="")

    assert texts_of(path, delimiter="\t", quoted=False, unit=10) == [text for text, _ in lines]


@pytest.mark.parametrize("column", ["text", "zażółć"])
@pytest.mark.parametrize("begins", ["", "\ufeff", "\ufeff\r\n", "\n"])
def test_a_row_of_too_many_fields_is_bad_however_its_file_begins(path, begins, column):
    path.write_text(f'{begins}"n",{column}\n1,é,x\n2,"é\n"\n', encoding="utf-8", newline="")
    config = CsvSource(type="csv", path="a.csv", text=column)

    records = CsvFormat([local_file(str(path))], config).read_unit(0)

    assert records.bad_B.tolist() == [True, False]
    assert records.column[1].tobytes().decode() == "é\n"
    assert records.reason == f"{path}: row 0: has 3 fields, not 2"


def test_blank_lines_at_the_end_of_what_is_compressed_are_no_rows(path):
    packed = path.with_name("a.csv.gz")
    packed.write_bytes(gzip.compress(b"text\r\none\r\n\r\n\n"))

    assert texts_of(packed) == ["one"]
