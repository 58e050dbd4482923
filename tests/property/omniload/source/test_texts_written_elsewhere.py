"""JSON lines, rows of CSV and plain text from other writers, compared with Python's reads, in every order."""

import csv
import io
import json

import msgspec
import orjson
import pyarrow as pa
import pyarrow.csv
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.sources.every_order import (
    METHODS,
    UNITS,
    emptied,
    require_records,
    seldom,
)
from tests.support.plane.sources.packed import PACKED, written
from tests.support.plane.sources.source_contract import expected_tokens

# Characters that `str.splitlines` takes for the end of a line and no format does, and those that formats escape.
letters = st.sampled_from('ab é\u2028\u2029\x85\x1c\x0b\x0c\x7f\ufeff\U0001f600\0\t\r\n\\/",;|')
texts = st.text(letters, max_size=8)


def record_of(text):
    """Return the sample of a text; None if the text is not valid UTF-8."""
    try:
        return expected_tokens(text) if text.encode() else ()
    except UnicodeEncodeError:
        return None


values = st.recursive(
    texts | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(letters, max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
others = st.dictionaries(st.sampled_from(["id", "Text", "é", "te\nxt"]), values, max_size=2)
objects = st.tuples(others, texts).map(lambda drawn: drawn[0] | {"text": drawn[1]})
writers = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value, separators=(",", ":"), sort_keys=True),
        lambda value: json.dumps(value, indent=1).replace("\n", "\r"),
        lambda value: json.dumps(value).replace('"text"', '"\\u0074e\\u0078t"'),
        lambda value: orjson.dumps(value).decode(),
        lambda value: msgspec.json.encode(value).decode(),
    ]
)
ODD = [
    *(
        b"",
        b" \t",
        b"\r",
        b"\x0c",
        "\u2028".encode(),
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"text":',
    ),
    *(b'{"text": 1}', b'{"text": null}', b'{"text": ["x"]}', b'{"text": "a"} {"text": "b"}'),
    *(b'{"text": "a", "text": "b"}', b'{"text": 1, "text": "b"}', b'{"text": "a", "text": 1}'),
    *(
        b'{"text": "\\ud83d\\ude00"}',
        b'{"text": "\\ude00\\ud83d"}',
        b'{"t": "\\ud800", "text": "x"}',
    ),
    *(
        b'{"text": "\xff"}',
        b'{"t": "\xff", "text": "x"}',
        b'{"text": "\xc0\x80"}',
        b"{'text': 'x'}",
    ),
    *(b'{"n": 1e999, "text": "x"}', b'{"n": -Infinity, "text": "x"}', b'{"n": 01, "text": "x"}'),
    *(b'{"n": ' + b"9" * digits + b', "text": "x"}' for digits in (19, 20, 21, 400, 4_000)),
    *(
        b'\xef\xbb\xbf{"text": "x"}',
        b'{"text": "x"}\x0c',
        b'\xc2\xa0{"text": "x"}',
        b'{"text": "x"}\0',
    ),
    b'{"text": "x"} // a comment',
]
"""Lines on which readers may disagree; Python decides."""
lines = st.one_of(
    st.tuples(writers, objects).map(lambda drawn: drawn[0](drawn[1]).encode()),
    st.tuples(writers, values).map(lambda drawn: drawn[0](drawn[1]).encode()),
    st.sampled_from(ODD),
)


def text_of_line(line):
    """Return the sample of a line as Python reads it; a blank line has none."""
    if not line.strip(b" \t\r\n"):
        return ()
    try:
        text = json.loads(line.decode())["text"]
    except (ValueError, KeyError, TypeError):
        return None
    return record_of(text) if isinstance(text, str) else None


@given(data=st.data())
@seldom
def test_lines_of_json_hold_what_python_finds_in_them(tmp_path, data):
    held, expected = emptied(tmp_path), []
    suffix = data.draw(st.sampled_from(list(PACKED)))
    for shard in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
        content = end.join(data.draw(st.lists(lines, max_size=6)))
        content += end if data.draw(st.booleans()) else b""
        found = written(data.draw, held / f"{shard}.jsonl{suffix}", content)
        # A file with only a mark is a blank line.
        found = found.removeprefix(b"\xef\xbb\xbf") or b"\n" * bool(found)
        expected += map(text_of_line, io.BytesIO(found))
    if expected:
        # Parts of a compressed file are not read in any order: the mix is refused.
        methods = [each for each in METHODS if each != "units" or not suffix]
        unit = data.draw(UNITS)
        require_records(held, expected, data.draw, methods=methods, type="jsonl", unit=unit)


NAMES = st.lists(st.sampled_from(["id", "é", "a b", "a,b", 'a "b"', "a\nb", ""]), unique=True)


@given(data=st.data())
@seldom
def test_rows_of_csv_are_those_that_the_csv_module_reads(tmp_path, data):
    held, expected = emptied(tmp_path), []
    suffix = data.draw(st.sampled_from(list(PACKED)))
    form = {"delimiter": data.draw(st.sampled_from(",;|\t")), "quoted": data.draw(st.booleans())}
    for shard in range(data.draw(st.integers(1, 2))):
        names = data.draw(st.permutations([*data.draw(NAMES), "text"]))
        rows = st.lists(st.lists(texts, min_size=len(names), max_size=len(names)), max_size=6)
        write = data.draw(st.sampled_from([by_the_csv_module, by_arrow][: 1 + form["quoted"]]))
        content = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
        content += write(data.draw, [names, *data.draw(rows)], **form)
        found = written(data.draw, held / f"{shard}.csv{suffix}", content)
        expected += rows_of(found.decode("utf-8-sig"), **form)
    if expected:
        require_records(held, expected, data.draw, type="csv", unit=data.draw(UNITS), **form)


def by_the_csv_module(draw, rows, delimiter, quoted):
    """Write rows, some of them with one field too many or too few, and blank lines around them."""
    form = csv.excel()
    form.delimiter, form.lineterminator = delimiter, draw(st.sampled_from(["\n", "\r\n"]))
    # Python leaves a single carriage return unquoted, which we refuse. Without quotes a field contains no delimiter
    # or line end.
    form.quoting, banned = (csv.QUOTE_NONE, f"{delimiter}\r\n")
    if quoted:
        some = [(csv.QUOTE_ALL, ""), (csv.QUOTE_MINIMAL, "\r"), (csv.QUOTE_NONNUMERIC, "")]
        form.quoting, banned = draw(st.sampled_from(some))
    else:
        form.quotechar = None
    blank = st.sampled_from(["", "", form.lineterminator])
    out = io.StringIO(draw(blank), newline="")
    out.seek(0, io.SEEK_END)
    for i, row in enumerate(rows):
        spoilt = [row, row, row, [*row, "more"], row[1:] or row] if i else [row]
        kept = [without(field, banned) for field in draw(st.sampled_from(spoilt))]
        csv.writer(out, form).writerow(kept if quoted or kept != [""] else ["x"])
        out.write(draw(blank))
    content = out.getvalue()
    return (content if draw(st.booleans()) else content.removesuffix(form.lineterminator)).encode()


def without(field, banned):
    return "".join(letter for letter in field if letter not in banned)


def by_arrow(draw, rows, delimiter, quoted):
    names, *rows = rows
    assert quoted, "it writes strings with quotes where they need them"
    columns = [pa.array([row[i] for row in rows], pa.string()) for i in range(len(names))]
    out = io.BytesIO()
    pyarrow.csv.write_csv(
        pa.table(columns, names),
        out,
        pyarrow.csv.WriteOptions(
            delimiter=delimiter,
            quoting_style=draw(st.sampled_from(["needed", "all_valid"])),
            batch_size=draw(st.integers(1, 3)),
        ),
    )
    return out.getvalue()


def rows_of(found, delimiter, quoted):
    """Return the samples of a file; a row with more or fewer fields than the header is bad, a blank line is none."""
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    read = csv.reader(io.StringIO(found, newline=""), delimiter=delimiter, quoting=quoting)
    names, *rows = filter(None, read)
    at = names.index("text")
    return [record_of(row[at]) if len(row) == len(names) else None for row in rows]


@given(data=st.data())
@seldom
def test_a_file_of_text_is_what_python_reads_without_changing_its_line_ends(tmp_path, data):
    held, expected = emptied(tmp_path), []
    # Without the letters with which an archive begins, because such a file is a bad record.
    any_bytes = st.lists(
        st.sampled_from(b"a\r\n\0\x80\xc3\xa9\xe2\xff\xef\xbb\xbf"), max_size=9
    ).map(bytes)
    contents = st.lists(texts.map(str.encode) | any_bytes, min_size=1, max_size=9)
    for i, content in enumerate(data.draw(contents)):
        (held / f"{i}.txt").write_bytes(content)
        try:
            # The whole text: Python's stream ignores a byte order mark that is cut off, while any other cut is a
            # fault.
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = None
        expected.append(None if text is None or "\0" in text else record_of(text))
    require_records(
        held, expected, data.draw, type="text", files_per_unit=data.draw(st.integers(1, 4))
    )
