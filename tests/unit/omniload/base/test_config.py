"""Configuration faults: every one at once, with file, line and key."""

import json
import os
import re
from functools import cached_property
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from omniload.base import config
from omniload.base.config import StrictModel, checked, fault_at, line_of, load_yaml, parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig


class Square(StrictModel):
    type: Literal["square"]
    side: int = Field(gt=0)


class Circle(StrictModel):
    type: Literal["circle"]
    radius: float


class Drawing(StrictModel):
    name: str
    shapes: tuple[Annotated[Square | Circle, Field(discriminator="type")], ...] = Field(
        min_length=1
    )
    limits: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)


def faults_of(text, model=Drawing):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, model, name="a.yaml")
    return str(caught.value).splitlines()


def test_what_a_copy_works_out_is_of_its_own_fields():
    class Counted(Drawing):
        @cached_property
        def size(self):
            return len(self.shapes)

    square = {"type": "square", "side": 3}
    one = Counted(name="one", shapes=(square,))
    assert one.size == 1

    two = one.model_copy(update={"shapes": (*one.shapes, *one.shapes)})

    assert (two.size, one.size, two.name) == (2, 1, "one")
    assert two == Counted(name="one", shapes=(square, square))


def test_a_good_file_is_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("name: x\nshapes:\n- {type: square, side: 2}\n", encoding="utf-8")

    assert load_yaml(file, Drawing) == Drawing(name="x", shapes=(Square(type="square", side=2),))


def test_faults_are_reported_all_at_once_each_with_its_line_and_key():
    text = """\
name: x
shapes:
- type: square
  side: 0
- type: circle
limits:
  wide: -1
colour: red
"""

    assert faults_of(text) == [
        "a.yaml:4: shapes.0.side: found 0; give more than 0",
        "a.yaml:5: shapes.1.radius: is missing; give it",
        "a.yaml:7: limits.wide: found -1; give at least 0",
        "a.yaml:8: colour: no such key; remove it; keys here are limits, name, shapes",
    ]


def test_a_place_for_anchors_is_told_where_those_stand():
    (fault,) = faults_of("x-base: &base {type: square}\nname: x\nshapes: [{<<: *base, side: 2}]\n")

    assert fault == (
        "a.yaml:1: x-base: no such key; remove it: an anchor (&name) stands at the first value that is used again"
    )


def test_a_value_that_has_no_blank_ahead_of_it_is_told_with_the_line_to_write():
    assert faults_of("name: x\nshapes: []\nlimits: {wide:1}\n")[-1] == (
        "a.yaml:3: limits.wide:1: found None; give it behind a colon and a blank, wide: 1"
    )


def test_a_word_that_is_none_of_some_is_told_with_those_and_the_one_that_may_be_meant():
    class Worded(StrictModel):
        mode: Literal["offline", "online"]

    assert [faults_of(f"mode: {given}\n", Worded) for given in ("on", "offlin", "7", "[a]")] == [
        ["a.yaml:1: mode: found 'on'; give 'offline' or 'online'"],
        ["a.yaml:1: mode: found 'offlin' (did you mean 'offline'?); give 'offline' or 'online'"],
        ["a.yaml:1: mode: found 7; give 'offline' or 'online'"],
        ["a.yaml:1: mode: found a list; give 'offline' or 'online'"],
    ]


def test_a_text_that_is_too_long_is_told_with_its_length():
    class Named(StrictModel):
        name: Annotated[str, Field(max_length=8)]

    assert faults_of("name: " + "n" * 1200, Named) == [
        f"a.yaml:1: name: found 1,200 letters, '{'n' * 59}...; give at most 8"
    ]


def test_the_tag_of_a_union_is_no_part_of_the_key():
    (fault,) = faults_of("name: x\nshapes:\n- {type: square, side: wide}\n")

    assert fault.startswith("a.yaml:3: shapes.0.side: ")


def test_an_unknown_tag_names_those_there_are():
    (fault,) = faults_of("name: x\nshapes:\n- {type: star}\n")

    assert fault.startswith("a.yaml:3: shapes.0: ")
    assert "'star'" in fault
    assert fault.endswith("choose among square, circle")


def test_a_tag_that_is_missing_names_those_there_are_and_the_key_that_may_be_meant():
    assert faults_of("name: x\nshapes:\n- {tpye: square, side: 2}\n- {side: 2}\n") == [
        "a.yaml:3: shapes.0: type is missing (did you mean it by 'tpye'?); give one of circle, square",
        "a.yaml:4: shapes.1: type is missing; give one of circle, square",
    ]


def test_a_word_or_a_list_in_the_place_of_a_mapping_of_a_union_is_shown_with_what_belongs_there():
    assert faults_of("name: x\nshapes: [square, [2]]\n") == [
        "a.yaml:2: shapes.0: found 'square'; give a mapping, as {type: square}",
        "a.yaml:2: shapes.1: found [2]; give a mapping, as {type: TYPE, key: value}",
    ]


def test_a_key_given_twice_is_a_fault_even_where_the_values_agree():
    assert faults_of("name: x\nname: x\nshapes: [{type: circle, radius: 1, radius: 1}]\n") == [
        "a.yaml:2: name: key given twice, first in line 1; keep one of them",
        "a.yaml:3: shapes.0.radius: key given twice, first in line 3; keep one of them",
    ]


def test_a_missing_key_of_an_empty_file_is_placed_on_its_first_line():
    assert faults_of("")[0] == "a.yaml:1: name: is missing; give it"


def test_a_list_where_keys_belong_is_a_fault_of_the_whole_file():
    (fault,) = faults_of("- 1\n- 2\n")

    assert fault == "a.yaml:1: found [1, 2]; give a mapping, as {key: value}"


def test_text_that_is_no_yaml_is_reported_with_its_line():
    (fault,) = faults_of("name: x\nshapes: [\n")

    assert fault.startswith("a.yaml:3: not valid YAML: ")


NINE = range(9)
ALIAS_BOMB = "a: &a0 [x, x]\n" + "".join(
    f"b{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in NINE)}]\n" for i in range(1, 40)
)
MERGE_BOMB = "a: &a0 {x: 1}\n" + "".join(
    f"b{i}: &a{i} {{<<: [{', '.join(f'*a{i - 1}' for _ in NINE)}]}}\n" for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[name]: x\n", "a key is a list or a mapping"),
        ("name: x\nshapes: &s [*s]\n", "shapes.0 refers to what holds it"),
        ("name: !!python/object:os.system {}\n", "python/object:os.system; tags are not read"),
        ("name: !!int ''\n", "name has the tag tag:yaml.org,2002:int; tags are not read"),
        ("name: x\n---\nname: y\n", "a second document begins"),
        ("name: *none\n", "refers to *none, which no value is named"),
        ("name: x\nlimits: {<<: 3}\n", "merges what is no mapping"),
        ("name: \x00\n", "control characters are not allowed"),
        (
            f"limits: {{wide: {'9' * 5000}}}\n",
            "limits.wide is a number of 5,000 digits, more than 40",
        ),
        ("limits: {wide: 012}\n", "wide is 012, octal in YAML 1.1 and decimal in YAML 1.2"),
        ("[" * 100_000, "nests deeper than 32 levels"),
        ("- " * 100_000, "nests deeper than 32 levels"),
        (ALIAS_BOMB, "more than 100,000; remove aliases of aliases"),
        (MERGE_BOMB, "more than 100,000; remove aliases of aliases"),
        ("name: [" + "a," * 100_000 + "]", "more than 100,000"),
    ],
)
def test_yaml_that_python_cannot_hold_is_a_fault_and_not_a_traceback(text, reason):
    faults = "\n".join(faults_of(text))

    assert "not valid YAML" in faults
    assert reason in faults


def test_a_value_used_twice_by_anchor_is_no_fault():
    text = "name: x\nshapes:\n- &a {type: circle, radius: 1}\n- *a\n"

    assert len(parse_yaml(text, Drawing, name="a.yaml").shapes) == 2


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file; give the path"):
        load_yaml(tmp_path / "none.yaml", Drawing)


def test_a_folder_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; give the path of a YAML file"):
        load_yaml(tmp_path, Drawing)


def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")

    with pytest.raises(ConfigError, match=r"pipe\.yaml: is a pipe; give the path of a YAML file"):
        load_yaml(tmp_path / "pipe.yaml", Drawing)
    with pytest.raises(ConfigError, match="/dev/zero: is a device"):
        load_yaml("/dev/zero", Drawing)


def test_a_file_too_large_for_settings_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.touch()
    os.truncate(file, 3 << 40)

    with pytest.raises(ConfigError, match=r"holds 3 TiB, more than 1 MiB; is it a YAML file\?"):
        load_yaml(file, Drawing)


def test_text_too_large_for_settings_is_refused_wherever_it_comes_from():
    (fault,) = faults_of("# " + "x" * (1 << 20))

    assert "more than the 1 MiB of a file of settings" in fault


@pytest.mark.parametrize("word", ["true", "false", "[{side: true}]"])
def test_a_truth_is_no_number(word):
    faults = faults_of(f"name: x\nshapes: [{{type: circle, radius: 1}}]\nlimits:\n  wide: {word}\n")

    assert faults[0].startswith("a.yaml:4: limits.wide: ")
    assert len(faults) == 1


def test_what_may_be_of_several_types_is_one_fault_and_says_what_is_wrong_in_it():
    class Range(StrictModel):
        least: float | None = None

        @model_validator(mode="after")
        def _said(self):
            if self.least is None:
                raise fault_at("no limit is given; give least")
            return self

    class Asked(StrictModel):
        where: dict[str, int | bool | Range | tuple[int, ...]]

    def faults(value):
        return faults_of(f"where: {{a: {value}}}", Asked)

    assert faults("{most: 1}") == [
        "a.yaml:1: where.a.most: no such key; remove it; keys here are least"
    ]
    assert faults("{least: b}") == ["a.yaml:1: where.a.least: found 'b'; give a number"]
    assert faults("{}") == ["a.yaml:1: where.a: no limit is given; give least"]
    assert faults("[[]]") == ["a.yaml:1: where.a.0: found []; give a whole number"]
    (none,) = faults("null")
    assert none.startswith(
        "a.yaml:1: where.a: found None; give a list, as [first, second] or a mapping"
    )
    assert none.endswith(" or a whole number or true or false")


def test_a_truth_in_a_list_is_found_in_its_line():
    assert faults_of(
        "name: x\nshapes:\n- type: square\n  side: 1\n- type: circle\n  radius: true\n"
    ) == ["a.yaml:6: shapes.1.radius: Input should be a number, not a truth"]


def test_a_text_that_is_no_text_of_any_file_is_refused_where_it_stands():
    name, shapes = os.fsdecode(b"a\xff"), [{"type": "square", "side": 1}]

    with pytest.raises(ConfigError) as refused:
        checked({"name": name, "shapes": shapes}, Drawing, name="the drawing")

    assert str(refused.value) == (
        "the drawing: name: 'a\\udcff' is not UTF-8; rename it, or give a relative path"
    )
    assert checked({"name": "né", "shapes": shapes}, Drawing, name="the drawing").name == "né"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_word_without_quotes_is_text_unless_yaml_1_2_says_otherwise(word, value):
    text = f"name: {word}\nshapes: [{{type: circle, radius: 1}}]\n"

    assert parse_yaml(text, Drawing, name="a.yaml").name == value


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("12", 12.0),
        ("+5", 5.0),
        ("0x1F", 31.0),
        ("0o17", 15.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
    ],
)
def test_numbers_are_those_of_yaml_1_2(word, value):
    text = f"name: x\nshapes: [{{type: circle, radius: {word}}}]\n"

    assert parse_yaml(text, Drawing, name="a.yaml").shapes[0].radius == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "name: x\nshapes: [{type: circle, radius: }]\n",
            "2: shapes.0.radius: found None; give a number",
        ),
        ("name: x\nshapes: 3\n", "2: shapes: found 3; give a list, as [first, second]"),
        *(
            (f"name: {given}\nshapes: [{{type: square, side: 1}}]\n", f"1: name: found {said}")
            for given, said in (
                ("[title, body]", "['title', 'body']; give one text, as name: title"),
                ("[a b, c]", "['a b', 'c']; give one text, as name: 'a b'"),
                ("[title, 3]", "['title', 3]; give a text"),
                ("['s3://A:SECRET@b']", "a URL; give a text"),
            )
        ),
        ("name: x\n\tshapes: []\n", "a tab, which YAML takes no indentation of: use blanks"),
        *(
            (f"name: {{a: {text}}}\n", 'or has { or [ in it, stands in quotes, as in "*.jsonl"')
            for text in ("*.jsonl", "**/*.jsonl", "*web", "@x", "%x", "a/{b,c}.x", "s[0-9].x")
        ),
        ("name: {a: b: c}\n", "did not find expected ',' or '}'"),
    ],
)
def test_what_belongs_there_is_said_as_a_person_says_it(text, said):
    (fault,) = faults_of(text)

    assert fault.endswith(said), fault


def test_sexagesimal_is_no_number():
    (fault,) = faults_of("name: x\nshapes: [{type: circle, radius: 1:30}]\n")

    assert fault == "a.yaml:2: shapes.0.radius: found '1:30'; give a number"


def test_what_a_mapping_merges_gives_way_to_its_own_keys():
    text = "name: x\nshapes:\n- &a {type: square, side: 1}\n- {<<: *a, side: 2}\n"

    assert [shape.side for shape in parse_yaml(text, Drawing, name="a.yaml").shapes] == [1, 2]


def test_thousands_of_faults_are_listed_as_far_as_anybody_reads():
    faults = faults_of("name: x\n" + "".join(f"key{i}: 1\n" for i in range(5_000)))

    assert len(faults) == 51
    assert faults[-1] == "and 4951 more faults"


def test_a_url_is_not_repeated_where_it_may_hold_a_secret():
    faults = faults_of("name: x\nshapes: [{type: circle, radius: s3://KEY:SECRET@bucket}]\n")

    assert "SECRET" not in "".join(faults)


class Span(StrictModel):
    first: int
    last: int

    @model_validator(mode="after")
    def _in_order(self):
        if self.last < self.first:
            raise fault_at(f"last is {self.last}, before first {self.first}; raise it", "last")
        return self


class Spans(StrictModel):
    spans: tuple[Span, ...]


def test_a_fault_that_spans_keys_carries_the_line_of_the_key_to_change():
    text = "spans:\n- first: 1\n  last: 2\n- first: 3\n  last: 2\n"

    assert faults_of(text, Spans) == ["a.yaml:5: spans.1.last: last is 2, before first 3; raise it"]


def test_a_fault_that_spans_keys_names_the_key_where_a_program_gives_it():
    with pytest.raises(ConfigError, match=r"^given: spans\.0\.last: last is 1"):
        checked({"spans": [{"first": 2, "last": 1}]}, Spans, name="given")


def test_bytes_that_are_no_text_are_a_configuration_error(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"name: \xff\n")

    with pytest.raises(
        ConfigError, match=r"cannot be read as UTF-8 text: .*iconv -f ITS-CODING -t"
    ):
        load_yaml(file, Drawing)

    file.write_text("name: x\n", encoding="utf-16")
    with pytest.raises(
        ConfigError, match=r"write it as UTF-8: iconv -f UTF-16 -t UTF-8 .*a\.yaml >"
    ):
        load_yaml(file, Drawing)


def test_a_model_cannot_be_changed():
    shape = Square(type="square", side=1)

    with pytest.raises(ValidationError, match="frozen"):
        shape.side = 2


def test_a_fault_of_a_whole_union_member_names_no_key_that_the_file_lacks(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text("version: 1\nsources:\n  web: {type: parquet, path: web.parquet}\n")

    with pytest.raises(
        ConfigError, match=r"mix\.yaml:3: sources\.web: has neither text nor tokens"
    ):
        load_yaml(file, MixConfig)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("nam", "name"), ("limts", "limits"), ("name_of_all", None)],
)
def test_a_key_that_is_nearly_one_names_it(key, meant):
    (fault,) = faults_of(f"name: x\nshapes: [{{type: square, side: 1}}]\n{key}: 1\n")

    tail = (
        f"; did you mean {meant!r}?" if meant else "; remove it; keys here are limits, name, shapes"
    )
    assert fault == f"a.yaml:3: {key}: no such key{tail}"


def test_a_key_of_items_that_stands_beside_their_list_is_told_with_the_list():
    (fault,) = faults_of("name: x\nshapes: [{type: square, side: 1}]\nradius: 1\n")

    said = "no such key; it is of what stands in shapes, as shapes: [{radius: ...}]"
    assert fault == f"a.yaml:3: radius: {said}"


def test_a_key_of_an_item_is_looked_for_among_those_of_items():
    (fault,) = faults_of("name: x\nshapes:\n- {type: square, side: 1, sied: 2}\n")

    assert fault.endswith("; did you mean 'side'?")


def test_a_key_of_another_type_is_told_with_that_type():
    """The key is spelt correctly, so a suggestion of the same key would mislead the reader."""
    (fault,) = faults_of("name: x\nshapes:\n- {type: square, side: 1, radius: 2}\n")

    assert fault.endswith(
        ".radius: no such key for type square, and type circle has it: change the type, or remove the key"
    )


def test_what_a_program_gives_is_checked_as_a_file_is_without_lines():
    fields = {"name": "x", "shapes": [{"type": "square", "side": 1}]}
    assert checked(fields, Drawing, name="given").shapes[0].side == 1

    with pytest.raises(ConfigError) as caught:
        checked({"nam": "x", "shapes": fields["shapes"]}, Drawing, name="given")

    assert str(caught.value).splitlines() == [
        "given: name: is missing; give it",
        "given: nam: no such key; did you mean 'name'?",
    ]


def test_lines_of_many_faults_are_told_from_one_tree_of_the_file_as_it_is_now(
    tmp_path, monkeypatch
):
    composed, compose = [], config.compose
    monkeypatch.setattr(
        config, "compose", lambda text, name: composed.append(text) or compose(text, name=name)
    )
    file = tmp_path / "a.yaml"
    file.write_text("name: x\nshapes:\n- {side: 2}\n")

    assert [line_of(file, "name"), line_of(file, "shapes", 0, "side")] == [1, 3]
    assert len(composed) == 1
    file.write_text("\nname: x\n")
    assert line_of(file, "name") == 2


@pytest.mark.parametrize("key", ["", ".", ".."])
def test_a_key_of_dots_is_told_from_those_between_keys(key):
    with pytest.raises(ConfigError, match=rf"c\.yaml:1: {re.escape(repr(key))}: "):
        parse_yaml(json.dumps({key: 1}), StrictModel, name="c.yaml")
