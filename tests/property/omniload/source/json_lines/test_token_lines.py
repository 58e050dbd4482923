"""Lines of token ids: the record of a line depends on its bytes alone, and equals that of Python's own reader."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniload.mix.columns import LOSS_MASK
from omniload.mix.schema.sources.own_columns import OwnColumn
from omniload.mix.sources import JsonlSource
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.parsing.json_lines import many_lines
from omniload.source.patterns import find_files

WEIGHT = OwnColumn(column="weights", dtype="float32", of="labels")
KIND = OwnColumn(column="kinds", dtype="int8")
LANG = OwnColumn(column="lang", dtype="text", of="samples")
COLUMNS = {
    "loss_mask": "mask",
    "scores": "score",
    "text": "note",
    "weight": WEIGHT,
    "kind": KIND,
    "lang": LANG,
}
MOST_ID, MOST_FLOAT = 2**31 - 1, float(np.finfo(np.float32).max)


def are(values, fits):
    return isinstance(values, list) and all(map(fits, values))


def is_whole(least, most):
    return lambda each: type(each) is int and least <= each <= most


def is_number(each):
    return type(each) in {int, float} and abs(each) <= MOST_FLOAT


def is_text(each):
    return isinstance(each, str) and not any(0xD800 <= ord(letter) < 0xE000 for letter in each)


def wanted(line):
    """Return the record of a line by Python's own reader, each column as a list; ``None`` for a bad line."""
    if not line.strip():
        return {"ids": [], "mask": [], "weights": [], "kinds": []}
    held = json.loads(line)
    if not (isinstance(held, dict) and are(held.get("ids"), is_whole(0, MOST_ID))):
        return None
    count, score = len(held["ids"]), held.get("score")
    scores = score if isinstance(score, list) else [score]
    is_sound = (
        are(held.get("mask"), lambda each: type(each) in {int, bool} and each in {0, 1})
        and are(held.get("weights"), is_number)
        and are(held.get("kinds"), is_whole(-128, 127))
        and {len(held[name]) for name in ("mask", "weights", "kinds")} <= {count}
        and are(scores, is_number)
        and is_text(held.get("note"))
        and is_text(held.get("lang"))
    )
    if not is_sound:
        return None
    return held | {"scores": [np.float32(each) for each in scores]}


def found_in(records):
    """Return the record of each line of a unit, in the form of ``wanted``; ``None`` for a bad line."""
    others = {name.partition(":")[0]: column for name, column in records.others.items()}
    found = []
    for i in range(len(records.column)):
        if records.bad_B[i]:
            found.append(None)
            continue
        held = {
            "ids": records.column[i].tolist(),
            "mask": others[LOSS_MASK][i].tolist(),
            "weights": others["weight"][i].tolist(),
            "kinds": others["kind"][i].tolist(),
        }
        if held["ids"] or len(others["scores"][i]):
            held |= {
                "scores": others["scores"][i].tolist(),
                "note": others["text"][i].tobytes().decode(),
                "lang": others["lang"][i].tobytes().decode(),
            }
        found.append(held)
    return found


def alike(found, line):
    expected = wanted(line)
    if found is None or expected is None:
        return found is None and expected is None
    return all(
        np.array_equal(np.float32(value), np.float32(expected[name]))
        if name in {"weights", "scores"}
        else value == expected[name]
        for name, value in found.items()
    )


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")

    def open_format(content, unit_bytes=1 << 20, **changes):
        (folder / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in content))
        config = JsonlSource(
            type="jsonl",
            path="a.jsonl",
            tokens="ids",
            unit=unit_bytes,
            **{"columns": COLUMNS} | changes,
        )
        return JsonlFormat(find_files(["a.jsonl"], folder, source="rollouts"), config)

    return open_format


def units_of(reader):
    return [reader.read_unit(unit) for unit in range(len(reader.units()))]


WRONG = st.sampled_from(
    [None, "x", -1, 2, 1.0, 0.5, True, [1], {}, 2**31, 2**63, 2**64, -(2**63) - 1, 1e39, -0.0]
)


@st.composite
def lines(draw):
    """A line with the same number of values under each key; a few are changed, or have another number of values."""
    count = draw(st.integers(0, 3))

    def some(values):
        return st.lists(values, min_size=count, max_size=count)

    held = {
        "ids": draw(some(st.integers(0, MOST_ID))),
        "mask": draw(some(st.booleans() | st.integers(0, 1))),
        "weights": draw(some(st.integers(-9, 9) | st.floats(-8, 8, width=16))),
        "kinds": draw(some(st.integers(-128, 127))),
        "score": draw(st.floats(-1, 1, width=32) | st.lists(st.integers(0, 9), max_size=2)),
        "note": draw(st.text(max_size=3)),
        "lang": draw(st.sampled_from(["en", "dé"])),
        "more": [[1], {"ids": [2]}],
    }
    for key in draw(st.lists(st.sampled_from(sorted(held)), max_size=1)):
        match draw(st.integers(0, 3)), held[key]:
            case 0, _:
                del held[key]
            case 1, [_, *rest]:
                held[key] = rest
            case 2, list() as values:
                held[key] = [*values[1:], draw(WRONG)]
            case _:
                held[key] = draw(WRONG)
    return json.dumps(held, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")


SOUND = (
    b'{"ids": [7, 8], "mask": [true, 0], "weights": [0.5, 1], "kinds": [-1, 1], '
    b'"score": 2, "note": "a", "lang": "en"}'
)


@given(st.lists(lines() | st.just(b""), min_size=1, max_size=6), st.integers(1, 200))
@example([SOUND.replace(b"8]", b"8.0]"), SOUND], 1 << 20)
@example([SOUND.replace(b"8]", b"18446744073709551615]")], 1 << 20)
@example([SOUND.replace(b"1]", b"1e39]"), b" "], 1 << 20)
@example([SOUND.replace(b'"ids"', b'"ids": [1], "ids"')], 1 << 20)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_line_gives_what_it_holds_whatever_stands_beside_it(opened, content, unit_bytes):
    together = [each for unit in units_of(opened(content, unit_bytes)) for each in found_in(unit)]
    alone = [each for line in content for each in found_in(opened([line]).read_unit(0))]

    assert together == alone
    assert [alike(found, line) for found, line in zip(together, content, strict=True)] == [
        True
    ] * len(content)


@given(st.lists(lines(), min_size=1, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_that_are_read_one_by_one_give_what_those_read_at_once_give(opened, content):
    at_once = opened(content).read_unit(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(many_lines.PlainLines, "read", lambda *_: None)
        one_by_one = opened(content).read_unit(0)

    assert found_in(one_by_one) == found_in(at_once)
    assert one_by_one.reason == at_once.reason


@given(st.lists(lines(), min_size=1, max_size=6), st.integers(1, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([SOUND, SOUND, SOUND.replace(b"[7", b"[null"), SOUND], 200)
def test_how_many_lines_are_read_at_once_is_nothing_to_them(opened, content, part_bytes):
    whole = opened(content).read_unit(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(many_lines, "_PART_BYTES", part_bytes)
        parts = opened(content).read_unit(0)

    assert found_in(parts) == found_in(whole)
    assert parts.reason == whole.reason


def test_sound_lines_are_read_at_once(opened, monkeypatch):
    monkeypatch.setattr("omniload.source.parsing.json_lines.token_lines.one_by_one", None)

    (unit,) = units_of(opened([SOUND] * 3))

    assert unit.column.values_V.tolist() == [7, 8] * 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("8]", "-8]", "2: holds token id -8; a token id is from 0 to 2147483647"),
        ("8]", "8.5]", "2: 'ids' holds 8.5; write integers"),
        ("8]", "null]", "2: 'ids' holds None; write integers"),
        ("8]", "9223372036854775808]", "2: 'ids' holds 9223372036854775808, which is more than 64"),
        ("[7, 8]", '"7 8"', "2: 'ids' is '7 8', not a list of integers"),
        (
            '"ids"',
            '"id"',
            "2: has no key 'ids'; it has id, kinds, lang, mask, note, score, weights",
        ),
        ("[true, 0]", "[true]", "2: loss_mask has 1 values for 2 tokens"),
        ("[true, 0]", "[true, 2]", "2: loss_mask holds 2, not 0 or 1"),
        ("[true, 0]", '["a", 0]', "2: 'mask' holds 'a'; write 0 and 1, or booleans"),
        ("[0.5, 1]", "[0.5, true]", "2: 'weights' holds True; write numbers"),
        ("[-1, 1]", "[-1, 128]", "2: kind holds 128, which is more than a int8 holds"),
        ("2,", '"two",', "2: 'score' holds 'two'; write numbers"),
        ('"a"', "1", "2: 'note' is 1, not a string"),
        ('"en"', "1", "2: 'lang' is 1, not a string"),
    ],
)
def test_a_line_that_gives_no_sample_is_told_with_its_number_and_what_it_holds(
    opened, old, new, said
):
    wrong = SOUND.replace(old.encode(), new.encode(), 1)

    (unit,) = units_of(opened([SOUND, wrong, SOUND]))

    assert unit.bad_B.tolist() == [False, True, False]
    assert said in unit.reason.partition("a.jsonl:")[2].strip()


@pytest.mark.parametrize("first", ["ids", "line"])
def test_the_first_bad_line_is_told_whatever_is_wrong_with_it(opened, first):
    wrong = [SOUND.replace(b"8]", b"-8]"), b"[]"]

    (unit,) = units_of(opened(wrong if first == "ids" else wrong[::-1]))

    assert ("token id -8" in unit.reason) == (first == "ids")


def test_a_label_is_the_mask_of_its_token(opened):
    content = [
        b'{"ids": [5, 6, 7], "labels": [-100, 6, 7]}',
        b'{"ids": [5, 6, 7], "labels": [6, 7, -100]}',
    ]

    (unit,) = units_of(opened(content, columns={"labels": "labels"}))

    assert unit.others[LOSS_MASK][0].tolist() == [False, True, True]
    assert unit.bad_B.tolist() == [False, True]
    assert "labels holds 6 for token 0, which is 5; a label is the id of its own" in unit.reason


@pytest.mark.parametrize(
    ("labels", "columns", "is_told"),
    [
        ("[-100, 6]", {}, True),
        ("[5, 6]", {}, False),
        ("null", {}, False),
        ("[1.5, -100]", {}, False),
        ("[-100, 6]", {"labels": "labels"}, False),
        ("[-100, 6]", {"loss_mask": "mask"}, False),
    ],
)
def test_labels_that_are_not_named_are_a_doubt_where_they_leave_out_a_token(
    opened, labels, columns, is_told
):
    line = f'{{"ids": [5, 6], "mask": [0, 1], "labels": {labels}}}'.encode()

    said = opened([line], columns=columns).doubt()

    assert said.startswith("the first records have 'labels' of -100") == is_told
    assert bool(said) == is_told


def test_conditions_and_keys_go_by_other_keys_of_the_line(opened):
    content = [
        b'{"ids": [%d], "lang": "%s", "doc": %d}' % each for each in ((1, b"en", 8), (2, b"de", 9))
    ]

    (unit,) = units_of(opened(content, columns={}, where={"lang": "de"}))

    assert unit.kept_B.tolist() == [False, True]
    assert [unit.column[i].tolist() for i in range(2)] == [[], [2]]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tokens": "ids", "text": "body"}, "text is 'body' and tokens is 'ids'; name exactly one"),
        ({"tokens": ""}, "at least 1 character"),
        (
            {"columns": {"loss_mask": "mask"}},
            "the source holds text; name its column of token ids under tokens",
        ),
        (
            {"columns": {"scores": "score"}},
            "columns.scores stands beside token ids alone in lines of JSON",
        ),
        (
            {"tokens": "ids", "columns": {"loss_mask": "mask", "labels": "labels"}},
            "name one of them",
        ),
        ({"tokens": "ids", "transforms": [{"type": "chat"}]}, "chat"),
    ],
)
def test_a_source_that_says_two_things_is_refused(said, message):
    with pytest.raises(ValueError, match=message):
        JsonlSource(type="jsonl", path="a.jsonl", **said)


def test_a_source_of_texts_is_written_as_by_releases_that_knew_no_tokens():
    source = JsonlSource(type="jsonl", path="a.jsonl")

    assert {"tokens", "columns"}.isdisjoint(source.model_dump())
    assert JsonlSource(**JsonlSource(type="jsonl", path="a", tokens="ids").model_dump()).tokens
