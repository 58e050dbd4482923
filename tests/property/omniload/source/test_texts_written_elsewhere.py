"""JSON lines, rows of CSV and plain text that others write, against what Python reads, in every order."""

import csv
import gzip
import io
import json
import struct
from itertools import pairwise

import msgspec
import orjson
import pyarrow as pa
import pyarrow.csv
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.sources.every_order import (
    METHODS,
    UNITS,
    emptied,
    require_records,
    seldom,
)
from tests.support.plane.sources.source_contract import expected_tokens

# What `str.splitlines` takes for the end of a line and no format does, beside what formats write with care.
letters = st.sampled_from('ab é\u2028\u2029\x85\x1c\x0b\x0c\x7f\ufeff\U0001f600\0\t\r\n\\/",;|')
texts = st.text(letters, max_size=8)


def record_of(text):
    """Return the sample of a text; of what was no UTF-8 there is none."""
    try:
        return expected_tokens(text) if text.encode() else ()
    except UnicodeEncodeError:
        return None


def by_gzip(content, cuts):
    """Compress parts one by one, as `bgzip` does, with an empty one at the end."""
    return b"".join(map(gzip.compress, [*parts_of(content, cuts), b""]))


def by_zstd(content, cuts):
    """Compress parts one by one, as `pzstd` does, with a frame that is to be passed over before each."""
    aside = struct.pack("<II", 0x184D2A50, 3) + b"any"
    packed = []
    for i, part in enumerate(parts_of(content, cuts)):
        # As a stream writes it, whose frame does not say how much it holds, and as one that has all of it does.
        writer = zstandard.ZstdCompressor(write_checksum=bool(i % 2)).compressobj()
        whole = zstandard.ZstdCompressor().compress(part)
        packed.append(whole if i % 3 else writer.compress(part) + writer.flush())
    return b"".join(aside + each for each in packed)


def parts_of(content, cuts):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    return [content[a:b] for a, b in pairwise(bounds)]


def unpacked_by_zstd(packed):
    reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
    return reader.read()


PACKED = {
    "": (lambda content, _: content, bytes),
    ".gz": (by_gzip, gzip.decompress),
    ".zst": (by_zstd, unpacked_by_zstd),
}
"""Writer and reader of each suffix."""


def written(draw, path, content):
    """Write a file that may be compressed, by its name; return what others find in it."""
    pack, unpacked = PACKED[path.suffix if path.suffix in PACKED else ""]
    path.write_bytes(pack(content, draw(st.lists(st.integers(1, 400), max_size=3))))
    return unpacked(path.read_bytes())


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
"""Lines that readers may differ about; Python decides."""
lines = st.one_of(
    st.tuples(writers, objects).map(lambda drawn: drawn[0](drawn[1]).encode()),
    st.tuples(writers, values).map(lambda drawn: drawn[0](drawn[1]).encode()),
    st.sampled_from(ODD),
)


def text_of_line(line):
    """Return the sample of a line as Python reads it; a blank one has none."""
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
        expected += map(text_of_line, io.BytesIO(found))
    if expected:
        # Parts of what is compressed are not read in any order: the mix is refused.
        methods = [each for each in METHODS if each != "units" or not suffix]
        unit = data.draw(UNITS)
        require_records(held, expected, data.draw, methods=methods, type="jsonl", unit=unit)


NAMES = st.lists(st.sampled_from(["id", "é", "a b", "a,b", 'a "b"', "a\nb", ""]), unique=True)


@given(data=st.data())
@seldom
def test_rows_of_csv_are_those_that_the_csv_module_reads(tmp_path, data):
    held, expected = emptied(tmp_path), []
    suffix, delimiter = (
        data.draw(st.sampled_from(list(PACKED))),
        data.draw(st.sampled_from(",;|\t")),
    )
    for shard in range(data.draw(st.integers(1, 2))):
        names = data.draw(st.permutations([*data.draw(NAMES), "text"]))
        rows = st.lists(st.lists(texts, min_size=len(names), max_size=len(names)), max_size=6)
        content = data.draw(st.sampled_from([by_the_csv_module, by_arrow]))(
            data.draw, names, data.draw(rows), delimiter
        )
        content = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content
        found = written(data.draw, held / f"{shard}.csv{suffix}", content)
        expected += rows_of(found.decode("utf-8-sig"), delimiter)
    if expected:
        keys = {"delimiter": delimiter, "unit": data.draw(UNITS)}
        require_records(held, expected, data.draw, type="csv", **keys)


def by_the_csv_module(draw, names, rows, delimiter):
    """Write rows, some of them with a field too many or too few, and blank lines between them."""
    quoting = draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    if quoting == csv.QUOTE_MINIMAL:  # Python leaves a carriage return alone unquoted: refused
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    lines = [draw(st.sampled_from(["", "", end]))]
    for row in [names, *rows]:
        out = io.StringIO(newline="")
        spoilt = [row, row, row, [*row, "more"], row[1:] or row] if lines[1:] else [row]
        writer = csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=end)
        writer.writerow(draw(st.sampled_from(spoilt)))
        lines.append(out.getvalue() + draw(st.sampled_from(["", "", end])))
    content = "".join(lines)
    return (content if draw(st.booleans()) else content.removesuffix(end)).encode()


def by_arrow(draw, names, rows, delimiter):
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


def rows_of(found, delimiter):
    """Return the samples of a file; a row of another number of fields than the header is bad, a blank line is none."""
    read = csv.reader(io.StringIO(found, newline=""), delimiter=delimiter)
    names, *rows = filter(None, read)
    at = names.index("text")
    return [record_of(row[at]) if len(row) == len(names) else None for row in rows]


@given(data=st.data())
@seldom
def test_a_file_of_text_is_what_python_reads_without_changing_its_line_ends(tmp_path, data):
    held, expected = emptied(tmp_path), []
    contents = st.lists(texts.map(str.encode) | st.binary(max_size=12), min_size=1, max_size=9)
    for i, content in enumerate(data.draw(contents)):
        path = held / f"{i}.txt"
        path.write_bytes(content)
        try:
            with path.open(encoding="utf-8", newline="") as opened:
                text = opened.read()
        except UnicodeDecodeError:
            text = None
        expected.append(None if text is None or "\0" in text else record_of(text))
    require_records(
        held, expected, data.draw, type="text", files_per_unit=data.draw(st.integers(1, 4))
    )
