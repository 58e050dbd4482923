"""The record of a line of JSONL depends on its bytes alone, and not on neighbours, units and compression."""

import gzip
import json
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError
from omniload.mix.config import ByteTokenizer, JsonlSource, OnError, ShuffleConfig
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.parsing.json_lines.lines import (
    LARGEST_DEPTH,
    BadLineError,
    key_in,
    object_of,
    text_of,
)
from omniload.source.parsing.json_lines.many_lines import PlainLines
from omniload.source.patterns import find_files
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

DEEP = LARGEST_DEPTH + 1
KINDS = {
    "plain": b'{"id": 1, "text": "one"}',
    "empty text": b'{"text": ""}',
    "NaN elsewhere": b'{"score": NaN, "text": "nan"}',
    "infinities elsewhere": b'{"text": "inf", "s": [Infinity, -Infinity]}',
    "1e999 elsewhere": b'{"s": 1e999, "text": "large"}',
    "a huge integer": b'{"s": ' + b"9" * 5000 + b', "text": "digits"}',
    "NaN as text": b'{"text": NaN}',
    "half a pair elsewhere": b'{"t": "\\ud800", "text": "half"}',
    "half a pair as text": b'{"text": "a\\ud800b"}',
    "a whole pair": b'{"text": "\\ud83d\\ude00"}',
    "half a pair in a key": b'{"\\udc00": 1, "text": "k"}',
    "bad UTF-8 elsewhere": b'{"t": "\xff", "text": "x"}',
    "bad UTF-8 in a key": b'{"\xed\xa0\x80": 1, "text": "x"}',
    "no such escape elsewhere": b'{"t": "\\q", "text": "x"}',
    "no digits elsewhere": b'{"t": [1.e5], "text": "x"}',
    "bad UTF-8 as text": b'{"text": "\xc3("}',
    "an overlong form": b'{"text": "\xc0\x80"}',
    "the key twice": b'{"text": "a", "text": "b"}',
    "the key twice beside NaN": b'{"text": "a", "n": NaN, "text": "b"}',
    "the last of two keys is none": b'{"text": "a", "text": 1}',
    "the key escaped": b'{"te\\u0078t": "escaped"}',
    "two objects": b'{"text": "a"}{"text": "b"}',
    "two objects, a space between": b'{"text": "a"} {"text": "b"}',
    "first part of an object": b'{"text":',
    "second part of an object": b'"late"}',
    "blank": b"",
    "spaces": b" \t ",
    "carriage return": b"\r",
    "windows": b'{"text": "w"}\r',
    "form feed": b"\x0c",
    "mark": b'\xef\xbb\xbf{"text": "bom"}',
    "NUL": b"\x00\x00",
    "NUL after": b'{"text": "n"}\x00',
    "an escaped NUL": b'{"text": "\\u0000"}',
    "a raw tab in a string": b'{"text": "a\tb"}',
    "a trailing comma": b'{"text": "a",}',
    "a comment": b'{"text": "a"} // no',
    "Inf": b'{"s": Inf, "text": "a"}',
    "a leading zero": b'{"s": 01, "text": "a"}',
    "single quotes": b"{'text': 'a'}",
    "list": b'["text"]',
    "string": b'"text"',
    "null": b"null",
    "no such key": b'{"Text": "a"}',
    "none": b'{"text": null}',
    "number": b'{"text": 12}',
    "as text inside": b'{"more": {"text": "inner"}}',
    "deep": b'{"d": ' + b"[" * 900 + b"]" * 900 + b', "text": "deep"}',
    "deeper than JSON readers go": b'{"d": ' + b"[" * 2000 + b"]" * 2000 + b', "text": "x"}',
    "deep beside NaN": b'{"d": ' + b"[" * DEEP + b"NaN" + b"]" * DEEP + b', "text": "x"}',
    "brackets in a string beside NaN": b'{"s": "' + b"[{" * DEEP + b'", "n": NaN, "text": "x"}',
}

lines = st.one_of(
    st.sampled_from(sorted(KINDS.values())),
    st.dictionaries(
        st.sampled_from(["text", "Text", "id", "\ud800"]),
        st.one_of(st.text(), st.floats(), st.none(), st.integers(), st.lists(st.text())),
    ).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=12),
).map(lambda line: line.replace(b"\n", b" "))


def alone(line):
    """Return the text of a line by itself, or ``None`` if it is bad."""
    try:
        return text_of(memoryview(line), "text")
    except BadLineError:
        return None


def of_a_file(content):
    """Return the text of every line of a file, or ``None``, without a byte-order mark before the first line."""
    first, *others = content
    return [alone(first.removeprefix(KINDS["mark"][:3])), *map(alone, others)]


def texts_of(records):
    """Return the text of every line of a unit, or ``None`` if it is bad."""
    texts = [records.column[i].tobytes() for i in range(len(records.column))]
    return [None if bad else text for bad, text in zip(records.bad_B, texts, strict=True)]


def verdicts(reader):
    """Return the text of every line of a file, or ``None``, and the first reason of each unit."""
    found, reasons = [], []
    for unit in range(len(reader.units())):
        records = reader.read_unit(unit)
        found += texts_of(records)
        reasons.append(records.reason)
    return found, reasons


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")

    def open_format(data, unit_bytes=1 << 20, name="a.jsonl"):
        (folder / name).write_bytes(data)
        files = find_files([name], folder, source="web")
        return JsonlFormat(files, JsonlSource(type="jsonl", path=name, unit=unit_bytes))

    return open_format


PAIRS = [(a, b) for a in KINDS for b in KINDS]


def test_the_verdict_on_a_line_does_not_depend_on_the_line_beside_it(opened, tmp_path):
    data = [KINDS[first] + b"\n" + KINDS[second] + b"\n" for first, second in PAIRS]
    # Each pair has its own file, and so its own unit: nothing else shares it.
    for number, pair in enumerate(data):
        (tmp_path / f"{number:05}.jsonl").write_bytes(pair)
    config = JsonlSource(type="jsonl", path="*.jsonl")
    reader = JsonlFormat(find_files(["*.jsonl"], tmp_path, source="web"), config)
    assert len(reader.units()) == len(PAIRS)
    for unit, pair in enumerate(PAIRS):
        content = [KINDS[kind] for kind in pair]
        assert texts_of(reader.read_unit(unit)) == of_a_file(content), pair
    found, _ = verdicts(opened(b"".join(data)))
    assert found == of_a_file([KINDS[kind] for pair in PAIRS for kind in pair])


@given(st.lists(lines, min_size=1, max_size=5), st.booleans(), st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([KINDS["two objects"], b""], True, 60)
@example([KINDS["mark"], KINDS["mark"]], False, 1)
@example([KINDS["first part of an object"], b'"a"}{"text": "b"}'], True, 60)
def test_neighbours_units_and_compression_are_nothing_to_a_line(opened, content, ended, unit_bytes):
    data = b"\n".join(content) + (b"\n" if ended or not content[-1] else b"")
    expected = of_a_file(content)

    assert verdicts(opened(data, unit_bytes))[0] == expected
    assert verdicts(opened(gzip.compress(data), unit_bytes, "a.jsonl.gz"))[0] == expected
    assert verdicts(opened(zstandard.compress(data), unit_bytes, "a.jsonl.zst"))[0] == expected


@given(lines)
@example(b'{"text": "a", "n": 1e999}')
@example(b'{"n": -0, "text": "\\u00e9"}')
def test_a_text_is_what_the_reader_of_python_finds(line):
    """Python's reader is the oracle if it reads the line: it is more lenient than ours in nothing else."""
    found = alone(line)
    try:
        value = json.loads(line.decode())
        text = value["text"].encode() if isinstance(value["text"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not line.strip(b" \t\r"):
        text = b""
    if b"9" * 4301 not in line and line.count(b"[") + line.count(b"{") < LARGEST_DEPTH:
        assert found == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("NaN elsewhere", b"nan"),
        ("infinities elsewhere", b"inf"),
        ("1e999 elsewhere", b"large"),
        ("a huge integer", b"digits"),
        ("half a pair elsewhere", b"half"),
        ("the key twice beside NaN", b"b"),
        ("the key escaped", b"escaped"),
        ("brackets in a string beside NaN", b"x"),
        ("deep", b"deep"),
        ("deep beside NaN", None),
        ("bad UTF-8 elsewhere", None),
        ("Inf", None),
    ],
)
def test_what_other_keys_hold_does_not_refuse_a_sound_text(kind, text):
    assert alone(KINDS[kind]) == text


@pytest.mark.parametrize("caller_depth", [0, 300])
def test_the_depth_of_the_caller_does_not_decide(caller_depth):
    line = b'{"d": ' + b"[" * 500 + b"NaN" + b"]" * 500 + b', "text": "x"}'

    def called_from(depth):
        return alone(line) if depth == 0 else called_from(depth - 1)

    assert called_from(caller_depth) == b"x"


@given(st.lists(lines, min_size=1, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_raise_blames_the_first_bad_line_by_its_number(opened, content):
    data = b"".join(line + b"\n" for line in content)
    bad = [i for i, line in enumerate(content, start=1) if alone(line) is None]

    _, reasons = verdicts(opened(data, unit_bytes=30))

    first = next((reason for reason in reasons if reason), None)
    assert (first is None) == (not bad)
    if first is not None:
        assert f"a.jsonl:{bad[0]}: " in first


@given(st.lists(lines, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([b"MMIDIDX\x00\x00"])
def test_skip_drops_exactly_the_bad_lines_and_counts_them(tmp_path_factory, content):
    # The first line shows the kind of the file: a file that begins like an index of Megatron is refused as such.
    content = [b'{"text": "of JSON"}', *content]
    folder = tmp_path_factory.mktemp("skip")
    (folder / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in content))
    config = JsonlSource(
        type="jsonl",
        path="a.jsonl",
        unit=30,
        shuffle=ShuffleConfig(method="none"),
        on_error=OnError(policy="skip"),
    )
    source = open_source(
        SourceSpec("web", config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=folder)
    )

    block = source.read(0, len(content))

    texts = [alone(line) for line in content]
    assert block.skipped == texts.count(None)
    assert [block.tokens[i][:-1].astype(np.uint8).tobytes() for i in range(len(block.tokens))] == [
        text for text in texts if text
    ]


def test_what_is_said_of_keys_is_short_and_nothing_that_a_terminal_obeys():
    line = json.dumps({f"\x1b[2J\ud800{i}" + "x" * 99: 1 for i in range(50)}).encode()

    with pytest.raises(BadLineError) as caught:
        text_of(memoryview(line), "text")

    said = str(caught.value)
    assert said.isprintable()
    assert said.encode()
    assert said.endswith(" and 38 more")
    assert len(said) < 700


def test_an_index_with_another_number_of_lines_is_not_trusted(opened):
    reader = opened(KINDS["plain"] + b"\n")
    reader.units().rows_U[0] = 2

    with pytest.raises(IntegrityError, match="hold 1 lines, 2 in the index"):
        reader.read_unit(0)


@example(number=(1 << 64) - 1)
@example(number=1 << 64)
@example(number=-(1 << 63))
@example(number=-(1 << 63) - 1)
@given(number=st.integers(-(1 << 70), 1 << 70))
def test_an_integer_is_the_same_key_whatever_stands_beside_it(number):
    def known_by(beside):
        value = object_of(memoryview(b'{"key": %d, "s": %s}' % (number, beside)))
        try:
            return key_in(value, "key")
        except BadLineError as error:
            return str(error)

    assert known_by(b"NaN") == known_by(b"0")


def test_integers_of_a_conversation_stay_integers_beside_nan():
    line = b'{"messages": [{"role": "user", "content": "a", "n": 5}], "s": NaN}'

    assert text_of(memoryview(line), "messages", nested=True) == (
        b'[{"role":"user","content":"a","n":5}]'
    )


def texts_at_once(data):
    """Return the texts of all lines if they are read at once, and the lines."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    found = PlainLines.of([("text", str, False)]).read(np.frombuffer(data, np.uint8), ends)
    return found and found[0], data[: ends[-1]].split(b"\n")


AT_ONCE = [
    "1e999 elsewhere",
    "a huge integer",
    "a whole pair",
    "empty text",
    "plain",
    "the key escaped",
]
STRUCTURE = list(b'{}[]",:\\ \t\r\n\x00\x0c\xff\xc3\xa9-+.0e1utNn/')
sound_lines = st.dictionaries(
    st.sampled_from(["text", "é", "id", "t\u0000"]),
    st.recursive(
        st.text(max_size=6)
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.none()
        | st.booleans(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        ),
        max_leaves=4,
    ),
).flatmap(
    lambda beside: st.tuples(st.text(max_size=9), st.booleans()).map(
        lambda drawn: json.dumps(beside | {"text": drawn[0]}, ensure_ascii=drawn[1]).encode(
            errors="surrogatepass"
        )
    )
)


@given(
    st.tuples(
        st.lists(sound_lines, max_size=2),
        st.lists(st.sampled_from(sorted(KINDS.values())), max_size=2),
        st.lists(sound_lines, max_size=2),
    ).map(lambda parts: [*parts[0], *parts[1], *parts[2]]),
    st.lists(st.tuples(st.integers(0), st.integers(0, 1), st.sampled_from(STRUCTURE)), max_size=3),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
@example([KINDS[kind] for kind in AT_ONCE], [], b"\r\n", True)
@example([KINDS["two objects"], KINDS["blank"], KINDS["plain"]], [], b"\n", True)
@example([KINDS["two objects"], b'{"text":', b'"a"}'], [], b"\n", True)
@example([KINDS["two objects"]], [], b"\n", True)
@example([KINDS["blank"], KINDS["two objects"]], [], b"\n", False)
@example([b'{"t": {}', b', "text": "a"}', KINDS["two objects"]], [], b"\n", True)
@example([b'{"t":', b'{}, "text": "a"}', KINDS["two objects"]], [], b"\n", True)
@example([b'{"t": {}', b'{}, "text": "a"}', KINDS["two objects"]], [], b"\n", True)
@example([b'{"t": "}', b'{", "text": "a"}', KINDS["two objects"]], [], b"\n", True)
def test_texts_of_many_lines_are_those_of_each_or_are_left_to_a_closer_look(
    content, changes, newline, ended
):
    data = newline.join(content) + (newline if ended else b"")
    for place, replaced, byte in changes:
        at = place % (len(data) + 1)
        data = data[:at] + bytes([byte]) + data[at + replaced :]
    if not data:
        return

    texts, lines = texts_at_once(data)

    if texts is not None:
        assert [text.encode() for text in texts] == [alone(line) for line in lines]
        # Python's reader is lenient exactly with the texts that are left to a closer look.
        assert texts == [json.loads(line, parse_int=float)["text"] for line in lines]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_line_among_sound_ones_is_read_as_by_itself_or_left_to_a_closer_look(kind):
    texts, lines = texts_at_once(b"\n".join([KINDS["plain"], KINDS[kind], KINDS["plain"]]))

    assert texts is None or [text.encode() for text in texts] == [alone(line) for line in lines]
    assert (texts is not None) >= (kind in AT_ONCE)


@given(st.lists(sound_lines, min_size=1, max_size=5), st.sampled_from([b"\n", b"\r\n"]))
@example([KINDS[kind] for kind in AT_ONCE], b"\n")
def test_lines_of_strict_json_are_read_at_once(content, newline):
    texts, lines = texts_at_once(newline.join(content) + newline)

    assert texts == [json.loads(line, parse_int=float)["text"] for line in lines]


@pytest.mark.parametrize("depth", [1010, 1023, 1024, 1100, 3000])
@pytest.mark.parametrize("limit", [1_000, 10_000])
def test_how_deep_a_line_may_nest_does_not_go_by_the_interpreter(depth, limit):
    line = b'{"d": ' + b"[" * depth + b"]" * depth + b', "text": "x"}'
    before = sys.getrecursionlimit()
    # The larger limit is that of Python 3.12 for extensions, whatever is set.
    sys.setrecursionlimit(limit)
    try:
        texts, _ = texts_at_once(b'{"text": "a"}\n' + line + b"\n")
    finally:
        sys.setrecursionlimit(before)

    assert texts in (None, ["a", "x"])
    assert (alone(line) is None) <= (texts is None)


def test_brackets_of_a_long_text_do_not_count_as_nesting_alone():
    text = "[{" * 511 + "x" * 3000

    texts, _ = texts_at_once(json.dumps({"text": text}).encode() + b"\n")

    assert texts == [text]


@pytest.mark.parametrize("key", ['a "key"', "back\\slash", "new\nline", "é", ""])
def test_whatever_the_key_is_called_texts_are_found_under_it(tmp_path, key):
    lines = [{"text": "no", key: "one"}, {key: "two"}]
    (tmp_path / "a.jsonl").write_bytes(
        b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    )
    files = find_files(["a.jsonl"], tmp_path, source="web")
    config = JsonlSource(type="jsonl", path="a.jsonl").model_copy(update={"text": key})

    assert texts_of(JsonlFormat(files, config).read_unit(0)) == [b"one", b"two"]


@pytest.mark.parametrize("long", [1, 60, 1 << 20])
@pytest.mark.parametrize("apart", [1, 1 << 20])
def test_a_unit_of_several_parts_is_read_as_one(tmp_path, monkeypatch, apart, long):
    monkeypatch.setattr("omniload.source.parsing.json_lines.many_lines._PART_BYTES", 100)
    monkeypatch.setattr("omniload.source.parsing.json_lines.many_lines._FAR_APART", apart)
    monkeypatch.setattr("omniload.source.formats.jsonl._LONG_LINE", long)
    lines = [KINDS[kind] for kind in sorted(KINDS)] + [b'{"text": "' + b"x" * 300 + b'"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    files = find_files(["a.jsonl"], tmp_path, source="web")

    records = JsonlFormat(files, JsonlSource(type="jsonl", path="a.jsonl")).read_unit(0)

    texts = [records.column[i].tobytes() for i in range(len(records.column))]
    first_bad = next(i for i, line in enumerate(lines) if alone(line) is None)
    assert f"a.jsonl:{first_bad + 1}: " in records.reason
    wanted = [alone(line) for line in lines]
    assert texts == [text or b"" for text in wanted]
    assert records.bad_B.tolist() == [text is None for text in wanted]
